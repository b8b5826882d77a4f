"""The contract's check of wrong arguments: errors name the argument, and say what it was."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.runtime.backend import explain
from onepass.testing.poison import unchanged
from onepass.testing.subject import Subject


def names_wrong_arguments(subject: Subject) -> None:
    """A tensor of a wrong type, shape or device raises, and so does what is no tensor, in the call and in `explain`.

    The message names the argument, and says what it was. Optional tensors that the sample lacks are among them.
    """
    given = dict(zip(subject.names(), subject.tensors(), strict=True))
    own = len(given)
    explained = partial(explain, subject.op.function)

    def run(function: Callable[..., Any], **changed: Any) -> None:
        values = list((given | changed).values())
        more = dict(list((given | changed).items())[own:])
        subject.sample.call(function, *values[:own], **{"backend": subject.backend, **more})

    for name, tensor in _optional_tensors(subject, given):
        with suppress(TypeError, ValueError):  # one that others exclude, or that comes with another: more samples have it
            run(explained, **{name: tensor})
            given[name] = tensor
    for name, wrong, was in [*_wrong_arguments(subject, given), ("backend", "cuda", "'cuda'")]:
        for function in (subject.op.function, explained):
            try:
                with unchanged(**given):
                    run(function, **{name: wrong})
            except (TypeError, ValueError) as error:
                message = str(error)
                named = re.search(rf"\b{name}\b", message) is not None
                assert named and " must " in message and was in message, f"of {name}, {was}: {message!r}"
            else:
                raise AssertionError(f"{name} was taken, {was}")


def _optional_tensors(subject: Subject, given: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the op may have beside these."""
    x, samples = next(iter(given.values())).detach(), subject.op.samples
    shapes = {name: tuple(t.shape) for name, t in given.items()} | subject.sample.options
    for name, parameter in inspect.signature(subject.op.function).parameters.items():
        if name not in shapes and str(parameter.annotation) == "Tensor | None":
            shape = samples.SHAPES_OF.get(subject.op.name, {}).get(name, lambda x, given: x.shape[-1:])(x, shapes)
            yield name, x.new_ones(shape, dtype=getattr(samples, "TYPES_OF", {}).get(name, x.dtype))


def _wrong_arguments(subject: Subject, given: dict[str, Tensor]) -> Iterator[tuple[str, Any, str]]:
    """Yield names of arguments, what they must not be, and how messages say that."""
    parameters = inspect.signature(subject.op.function).parameters
    for i, (name, t) in enumerate(given.items()):
        yield name, t.detach().to(torch.uint8), "torch.uint8"
        yield name, [1.0], "list"
        if name in parameters and "None" not in str(parameters[name].annotation):
            yield name, None, "None"
        if i:  # the others must have the first one's device, and sizes that go with its
            yield name, t.detach().to("meta"), "meta"
            yield name, t.detach()[None], str((1, *t.shape))
        elif t.is_floating_point():
            yield name, t.detach().sum(), ""
        if i and t.dim() == 1 and t.is_floating_point():
            yield name, t.detach()[1:], str((len(t) - 1,))
