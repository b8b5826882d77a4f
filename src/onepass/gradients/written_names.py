"""What one pass through the several functions of a call has written, for the errors of those that come after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from onepass.gradients.main_grad import GradRequest, name_written


class WrittenNames(list[str]):
    """The parameters whose main_grad a pass has written, in the call's words. The first function of a pass clears it."""


def note_written(written: WrittenNames | None, name: str, main_grad: Tensor | None, request: GradRequest) -> None:
    """Note a parameter whose gradient was put away, where a call of several functions asks for it."""
    if written is not None and main_grad is not None and request is GradRequest.ACCUMULATE:
        written.append(name)


def names_written(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward's errors name what `ctx.written`, a `WrittenNames` or None, has by then."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        try:
            return backward(ctx, *grads)
        except RuntimeError as error:
            with name_written(ctx.written or ()):
                raise error

    return run
