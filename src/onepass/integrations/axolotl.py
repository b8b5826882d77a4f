"""An Axolotl plugin: `huggingface.apply` on the model that Axolotl has loaded, adapters included. In Axolotl's YAML:

    plugins:
      - onepass.integrations.axolotl.OnepassPlugin
    onepass:            # options of huggingface.apply; may be left out
      precision: fp8

Its log says what was replaced, and what was not and why.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict
from torch import nn

from onepass.integrations.huggingface import Applied, apply

logger = logging.getLogger(__name__)


class OnepassOptions(BaseModel):
    """Options of `huggingface.apply`. Axolotl makes its own optimizers, so that main_grad is none of them."""

    model_config = ConfigDict(extra="forbid")
    norm: bool = True
    mlp: bool = True
    rope: bool = True
    loss: bool = True
    qkv: bool = True
    precision: Literal["fp8"] | None = None
    batch_invariant: bool = False


class OnepassArgs(BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    onepass: OnepassOptions | None = None


class OnepassPlugin(BasePlugin):
    """Axolotl finds it by its name, and calls it."""

    applied: Applied | None = None

    def get_input_args(self) -> str:
        return f"{__name__}.{OnepassArgs.__name__}"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        self.applied = apply(model, **OnepassOptions(**(cfg.onepass or {})).model_dump())
        logger.info("%s", self.applied)
