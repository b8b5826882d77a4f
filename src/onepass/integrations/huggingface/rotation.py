"""Rotary embedding: calls a model's `apply_rotary_pos_emb` to find out what it computes, and replaces it by `onepass.rope`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.probe import close, parameters_of, randn
from onepass.ops.attention.rope import rope
from onepass.ops.attention.rope_formula import rope_formula

ROTATION = "apply_rotary_pos_emb"
_WRAPPERS = ("transformers.utils.deprecation", "transformers.utils.generic", "transformers.integrations.accelerate")


@dataclass(frozen=True)
class Rotation:
    """Which elements of a head form a pair, and how the model's tables have each pair's value."""

    interleaved: bool  # neighbours form a pair, else one of each half
    layout: str  # of tables: every value twice, in "halves" or in "pairs", or "once"; or "complex": cos and sin are parts of one
    single: bool = False  # its function takes q or k alone

    def tables(self, given: Any) -> tuple[Tensor, Tensor]:
        """Convert tables [B, S, R], or a complex one, to [S, R/2], or to [B, S, R/2] if each sequence has its own positions."""
        cos, sin = (given.real, given.imag) if self.layout == "complex" else map(self.half, given)
        return (cos[0], sin[0]) if cos.shape[0] == 1 else (cos, sin)

    def half(self, table: Tensor) -> Tensor:
        if self.layout == "once":
            return table
        return table[..., ::2] if self.layout == "pairs" else table[..., : table.shape[-1] // 2]

    def doubled(self, half: Tensor) -> Tensor:
        """Return a table as the model has it."""
        if self.layout == "once":
            return half
        return half.repeat_interleave(2, -1) if self.layout == "pairs" else torch.cat([half, half], -1)

    def given(self, angles: Tensor, size: float = 1.0) -> Any:
        """Return tables of angles [B, S, R/2] as the model has them, times a size."""
        if self.layout == "complex":
            return torch.polar(torch.full_like(angles, size), angles)
        return self.doubled(angles.cos() * size), self.doubled(angles.sin() * size)

    @property
    def function(self) -> Callable[..., Any]:
        return _function_of_one(self) if self.single else _function_of(self)


HALVES = Rotation(False, "halves")
COMPLEX = Rotation(True, "complex")  # DeepSeek V2's and Llama 4's, by another function
SINGLE = Rotation(False, "halves", single=True)  # Gemma 4's
ROTATIONS = (
    HALVES, Rotation(True, "pairs"), Rotation(False, "once"), Rotation(True, "halves"), Rotation(True, "once"), SINGLE,
)  # fmt: skip


@functools.cache
def _function_of(how: Rotation) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Rotate q and k. unsqueeze_dim: their dimension of heads, 1 or 2."""
        tables = how.tables((cos, sin))
        if unsqueeze_dim == 2:
            return rope(q, k, *tables, interleaved=how.interleaved)
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), *tables, interleaved=how.interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotated


@functools.cache
def _function_of_one(how: Rotation) -> Callable[..., Tensor]:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        """Rotate x. unsqueeze_dim: its dimension of heads, 1 or 2."""
        heads = x if unsqueeze_dim == 2 else x.transpose(1, 2)
        y, _ = rope(heads, heads[..., :0, :], *how.tables((cos, sin)), interleaved=how.interleaved)
        return y if unsqueeze_dim == 2 else y.transpose(1, 2)

    return rotated


def find_rotation(forward: Callable[..., Any]) -> Rotation | None:
    """Return the rotation that `apply_rotary_pos_emb` in this function's globals computes, or None."""
    function = globals_with(ROTATION, forward).get(ROTATION)
    return None if function is None else next((how for how in ROTATIONS if _is(function, how)), None)


def globals_with(name: str, forward: Any) -> dict[str, Any]:
    """Return the globals of a plain function that uses the one of this name. Return nothing for other callables."""
    if _only_calls(forward):
        return globals_with(name, forward.__wrapped__)
    if type(forward) is not FunctionType or hasattr(forward, "__wrapped__") or name not in forward.__code__.co_names:
        return {}
    return forward.__globals__


def _only_calls(forward: Any) -> bool:
    """Whether this is a wrapper of transformers' that gives arguments their new names, returns the result as a tuple, or calls
    hooks of accelerate's first."""
    wraps = type(forward) is FunctionType and type(getattr(forward, "__wrapped__", None)) is FunctionType
    return wraps and forward.__globals__.get("__name__") in _WRAPPERS


def _is(function: Callable[..., Any], how: Rotation) -> bool:
    q, k, angles = randn(2, 3, 5, 8), randn(2, 1, 5, 8, seed=2), randn(2, 5, 4, seed=3)
    cos, sin = angles.cos(), angles.sin()
    tables = how.doubled(cos), how.doubled(sin)
    try:
        if how.single:
            rotated = function(q, *tables), function(k.transpose(1, 2), *tables, unsqueeze_dim=2).transpose(1, 2)
        else:
            rotated = function(q, k, *tables)
    except Exception:
        return False
    expected = (rope_formula(x.transpose(1, 2), cos, sin, how.interleaved).transpose(1, 2) for x in (q, k))
    return len(rotated) == 2 and all(close(y, other, 1e-6) for y, other in zip(rotated, expected, strict=True))


def with_globals(forward: Callable[..., Any], others: dict[str, Any]) -> Callable[..., Any]:
    """Return a copy of the function with other globals.

    The globals have no __name__, because compilers would look up globals in the module of that name.
    """
    assert isinstance(forward, FunctionType)
    if _only_calls(forward):
        return _wrapped_again(forward, with_globals(forward.__wrapped__, others))  # type: ignore[attr-defined]
    names = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    made = FunctionType(forward.__code__, names | others, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _wrapped_again(wrapper: FunctionType, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a wrapper that calls another function."""
    wrapped = wrapper.__wrapped__  # type: ignore[attr-defined]
    cells = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in wrapper.__closure__ or ())
    made = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    return functools.update_wrapper(made, inner)


# ---- the tables ----


def tables_are_read(model: nn.Module, how: Rotation) -> bool:
    """Whether every module that computes rotary tables gives each value as often as `how` says."""
    return has_tables(model) and all(_gives(module, how) for module in _makers(model))


def has_tables(model: nn.Module) -> bool:
    return bool(_makers(model))


def part_with_tables(model: nn.Module, name: str) -> nn.Module:
    """Return the smallest part around this module that computes tables, else the model: a tower for images has its own."""
    parents = name.split(".")[:-1]
    parts = (model.get_submodule(".".join(parents[:depth])) for depth in range(len(parents), 0, -1))
    return next(filter(has_tables, parts), model)


def _makers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "rotary" in type(module).__name__.lower()]


def turns_alone(model: nn.Module, how: Rotation) -> bool:
    """Whether the tables, which are read as `how` says, have no factor: heads keep their lengths."""
    halves = (how.tables(given) for maker in _makers(model) for given in _tables_of(maker))
    return all(torch.allclose(cos.float() ** 2 + sin.float() ** 2, torch.ones((), device=cos.device)) for cos, sin in halves)


def _tables_of(maker: nn.Module) -> list[Any]:
    """Return what a module makes of eight positions, for each type of layer; nothing where it can't be called."""
    device = next((buffer.device for buffer in maker.buffers()), torch.device("cpu"))
    if device.type == "meta":
        return []
    x, positions = torch.zeros(1, 8, 4, device=device), torch.arange(8, device=device)[None]
    try:
        return [maker(x, positions, *more) for more in _more_arguments(maker)]
    except Exception:
        return []


def _gives(maker: nn.Module, how: Rotation) -> bool:
    tables = _tables_of(maker)
    if how.layout == "complex" or any(isinstance(pair, Tensor) for pair in tables):
        return bool(tables) and how.layout == "complex" and all(isinstance(t, Tensor) and t.is_complex() for t in tables)
    return bool(tables) and all(t.dim() == 3 and t.equal(how.doubled(how.half(t))) for pair in tables for t in pair)


def _more_arguments(maker: nn.Module) -> Iterable[tuple[Any, ...]]:
    """Return further arguments of a module that computes a table for each type of layer."""
    if "layer_type" not in parameters_of(maker):
        return [()]
    return [(kind,) for kind in sorted(set(maker.config.layer_types))]  # type: ignore[union-attr, arg-type]
