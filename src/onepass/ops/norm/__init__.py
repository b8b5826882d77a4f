"""LayerNorm and RMSNorm, alone and before a linear layer."""

from onepass.ops.norm.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference

__all__ = ["layer_norm", "layer_norm_reference", "rms_norm", "rms_norm_reference"]
