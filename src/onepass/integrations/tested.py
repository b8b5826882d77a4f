"""The versions of other packages that onepass's tests have passed with. docs/compatibility.md shows them, and a test compares."""

TESTED: dict[str, tuple[str, ...]] = {  # by their names in pip, the newest last
    "accelerate": ("1.15.0",),
    "axolotl": ("0.19.0",),
    "deepspeed": ("0.19.8",),
    "flash-attn-4": ("4.0.0b36",),
    "kernels": ("0.16.2", "0.17.2"),
    "lightning": ("2.6.6",),
    "megatron-core": ("0.17.0", "0.18.0", "0.19.2"),
    "nvidia-cudnn-frontend": ("1.32.0",),
    "peft": ("0.21.2",),
    "quack-kernels": ("0.6.5",),
    "ray": ("2.60.0",),
    "torch": ("2.11", "2.13"),  # the other versions from 2.9 on are expected to work
    "torchtitan": ("0.3.0",),
    "transformers": ("5.17.0", "5.22.0", "5.24.0"),
    "trl": ("1.14", "1.15", "1.16.0"),
    "verl": ("0.7.1", "0.8.0", "0.9.1"),
}
