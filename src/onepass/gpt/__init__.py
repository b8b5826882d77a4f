"""A GPT built from onepass ops: configuration, presets, model, LoRA, and conversion of weights from and to Hugging Face."""

from onepass.gpt.config import PRESETS, Config, preset
from onepass.gpt.generate import Generated
from onepass.gpt.lora import add_adapters, save_adapter
from onepass.gpt.model import Model
from onepass.gpt.weights import load_huggingface, save_huggingface

__all__ = [
    "PRESETS", "Config", "Generated", "Model", "add_adapters", "load_huggingface", "preset", "save_adapter", "save_huggingface",
]  # fmt: skip
