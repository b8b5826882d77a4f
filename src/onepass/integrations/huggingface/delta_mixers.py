"""Linear attention with a gated delta rule, such as Qwen3.5's and Qwen3-Next's, as a few ops of onepass.

One product makes q, k and v, the output's gate, and what the rule's gates are made of. `causal_conv1d` convolves, splits, and
divides q's and k's heads by their lengths. `delta_gates` and `gated_delta_rule` follow, and `gated_norm_linear`: the gated norm
with the last product. A module is recognised by running its own code on small random numbers, beside this formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations, product
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onepass.gradients.places import parts_of
from onepass.integrations.delta_net import LENGTH_EPS, DeltaNet
from onepass.integrations.huggingface.attentions import LENGTHS, WITHOUT_EFFECT
from onepass.integrations.huggingface.convolutions import CONVOLUTION
from onepass.integrations.huggingface.delta_rules import DELTA_RULE
from onepass.integrations.huggingface.documents import as_one_row
from onepass.integrations.huggingface.gated_norms import GatedNormMatch
from onepass.integrations.huggingface.linear_layers import base_of, is_linear, sizes_of, tiny
from onepass.integrations.huggingface.linears import FoldedNorm, LinearsMatch
from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.probe import Function, close, probe, probe_forward, randn
from onepass.integrations.huggingface.rotation import globals_with, with_globals
from onepass.integrations.huggingface.snapshot import Snapshot, hooked, reads_of
from onepass.ops.convolution.causal_conv1d import causal_conv1d_reference
from onepass.ops.delta.delta_gates import delta_gates_reference
from onepass.ops.delta.gated_delta_rule import gated_delta_rule_reference
from onepass.ops.norm.gated_norm import gated_rms_norm_reference
from onepass.ops.norm.gated_norm_linear import gated_norm_linear

_TOKENS, _HIDDEN = 5, 6
_SLACK = 1e-4  # transformers' rule computes in fp32
_KNOWN = WITHOUT_EFFECT | LENGTHS | {"attention_mask"}  # arguments that are looked at, or have no effect without a cache


class _Sizes(NamedTuple):
    channels: int  # of q, k and v
    values: int  # of v
    heads: int  # of v

    @classmethod
    def of(cls, convolution: Any, norm: Any, a_log: Tensor) -> _Sizes:
        return cls(convolution.weight.shape[0], norm.weight.numel() * a_log.numel(), a_log.numel())

    def split(self, key_heads: int) -> tuple[tuple[int, int, int], int]:
        """Return the columns of q, k and v, and those of a head of q."""
        keys = (self.channels - self.values) // 2
        return (keys, keys, self.values), keys // key_heads

    def heads_of(self, pieces: Any, key_heads: int) -> Iterator[Tensor]:
        return (piece.unflatten(-1, (n, -1)) for piece, n in zip(pieces, (key_heads, key_heads, self.heads)))  # noqa: B905


@dataclass(frozen=True)
class DeltaRoles:
    """The names of a module's parts, by role, and its heads."""

    qkv: str
    gate: str | None  # None: `qkv` makes it too, and `b` makes a, in groups of one head of keys each
    b: str
    a: str | None
    convolution: str
    a_log: str
    dt_bias: str
    norm: str
    out: str
    key_heads: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """The layers that read the module's input, in the order in which their weights lie."""
        return tuple(name for name in (self.qkv, self.gate, self.b, self.a) if name is not None)

    def ordered(self, parts: Iterable[Tensor], sizes: _Sizes) -> tuple[Tensor, ...]:
        """Return q, k and v side by side, the output's gate, b and a, which may be in groups, of what the layers made."""
        if self.gate is not None:
            return tuple(parts)
        both, gates = (part.unflatten(-1, (self.key_heads, -1)) for part in parts)
        split, _ = sizes.split(self.key_heads)
        *qkv, z = both.split([columns // self.key_heads for columns in (*split, sizes.values)], -1)
        b, a = gates.chunk(2, -1)
        return torch.cat([part.flatten(-2) for part in qkv], -1), z.flatten(-2), b, a


@dataclass
class DeltaMixer:
    """A module that these ops compute whole."""

    module: nn.Module
    roles: DeltaRoles
    inputs: LinearsMatch
    out: LinearsMatch
    snapshot: Snapshot

    def is_like(self, module: nn.Module) -> bool:
        """Whether another module has this one's code, attributes and shapes."""
        if type(module) is not type(self.module) or not self.snapshot.unchanged(module):
            return False
        mine, other = (vars(each._modules[self.roles.norm]).get("_onepass") for each in (self.module, module))
        shapes = [{name: p.shape for name, p in each.named_parameters()} for each in (self.module, module)]
        return isinstance(other, GatedNormMatch) and mine.options == other.options and shapes[0] == shapes[1]  # type: ignore[union-attr]

    def suits(self, x: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether a call has no cache, and nobody has changed or watches the module's parts."""
        if args or x.dim() != 3:
            return False
        mask = options.get("attention_mask")
        if mask is not None and mask.shape != x.shape[:2]:
            return False
        if any(value is not None and value is not False and name not in _KNOWN for name, value in options.items()):
            return False
        convolution, norm = self._parts()
        gated = vars(norm).get("_onepass")
        if not isinstance(gated, GatedNormMatch) or not Patches.untouched(norm, gated) or not gated.snapshot.unchanged(norm):
            return False
        if hooked(convolution) or not self.snapshot.unchanged(self.module):
            return False
        return self.inputs.intact() and self.out.intact()

    def __call__(self, x: Tensor, options: dict[str, Any], folded: FoldedNorm | None = None) -> Tensor:
        roles, (convolution, norm) = self.roles, self._parts()
        parameters: Any = self.module._parameters
        sizes = _Sizes.of(convolution, norm, parameters[roles.a_log])
        mask, documents = options.get("attention_mask"), options.get("cu_seq_lens_q")
        documents = None if documents is None else documents.int()
        if mask is not None:
            x, folded = x if folded is None else folded.unfold(x), None
            x = (x * mask[:, :, None]).to(x.dtype)
        made = self.inputs(x, folded)
        if documents is not None:
            (made,) = as_one_row(made)
        qkv, z, b, a = roles.ordered(parts_of(made, self.inputs.sizes), sizes)
        gates = parameters[roles.a_log], parameters[roles.dt_bias]
        net = DeltaNet(convolution.weight, convolution.bias, *gates, sizes.split(roles.key_heads)[0], roles.key_heads)
        y = net(qkv, b, a, documents)
        given = {**vars(norm)["_onepass"].options, "precision": self.out.precision(), "lora": self.out.adapters() or None}
        given["group_size"] = given["group_size"] or norm.weight.numel()
        made = gated_norm_linear(y.flatten(-2), z, norm.weight, self.out.weight(x.dtype), self.out.bias(), **given)
        return made if documents is None else made.view(*x.shape[:-1], -1)

    def _parts(self) -> tuple[Any, Any]:
        """Return the convolution and the norm."""
        children = self.module._modules
        return children[self.roles.convolution], children[self.roles.norm]


# ---- recognition ----


def find_delta_mixer(module: nn.Module, known: Sequence[DeltaMixer] = ()) -> DeltaMixer | None:
    """Return a match if the module's code, which calls a known convolution and delta rule, is this formula.

    Args:
        known: matches of the same model. A module that is like one of them is not tried again, which takes a second.
    """
    like = next((each for each in known if each.is_like(module)), None)
    if like is not None:
        roles: DeltaRoles | None = like.roles
        snapshot = like.snapshot
    else:
        with reads_of(module) as reads:
            by_out = groupby(_candidates(module), lambda each: each.out)
            roles = next(filter(None, (_right(module, list(those)) for _, those in by_out)), None)
        snapshot = reads.snapshot()
    if roles is None or snapshot.read_tensors - {roles.a_log, roles.dt_bias}:
        return None
    inputs, out = LinearsMatch.found(module, roles.inputs), LinearsMatch.found(module, (roles.out,))
    return None if inputs is None or out is None else DeltaMixer(module, roles, inputs, out, snapshot)


def _candidates(module: nn.Module) -> Iterator[DeltaRoles]:
    """Yield the roles that sizes allow."""
    children: dict[str, Any] = {name: child for name, child in module._modules.items() if child is not None}
    convolutions = [name for name, child in children.items() if isinstance(child, nn.Conv1d)]
    norms = [name for name, child in children.items() if isinstance(vars(child).get("_onepass"), GatedNormMatch)]
    linears = {name: sizes_of(base_of(child)) for name, child in children.items() if is_linear(base_of(child))}
    parameters = {name: p.numel() for name, p in module._parameters.items() if p is not None}
    if [len(each) for each in (children, convolutions, norms, parameters)] not in ([7, 1, 1, 2], [5, 1, 1, 2]):
        return
    if len(linears) != len(children) - 2:
        return
    convolution, heads = children[convolutions[0]], max(parameters.values())
    channels, width = convolution.in_channels, children[norms[0]].weight.numel() * heads
    keys = (channels - width) // 2
    numbers = sorted(
        {n for n in vars(module).values() if type(n) is int and 0 < n <= heads and heads % n == keys % n == 0}, reverse=True
    )
    if convolution.groups != channels or keys < 1:
        return
    apart = [channels, width, heads, heads] if len(linears) == 5 else [channels + width, 2 * heads]
    for *names, out in sorted(permutations(linears), key=itemgetter(-1)):
        if [linears[name][1] for name in names] == apart and linears[out][0] == width:
            qkv, gate, b, a = names if len(names) == 4 else (names[0], None, names[1], None)
            for (a_log, dt_bias), key_heads in product(permutations(parameters), numbers):
                yield DeltaRoles(qkv, gate, b, a, convolutions[0], a_log, dt_bias, norms[0], out, key_heads)


def _right(module: nn.Module, candidates: list[DeltaRoles]) -> DeltaRoles | None:
    """Return the roles with which the formula gives what the module's code gives on small layers. All have the same `out`."""
    first, children = candidates[0], module._modules
    bases: dict[str, Any] = {name: base_of(children[name]) for name in (*first.inputs, first.out)}
    layers = {name: tiny(bases[name], _HIDDEN, sizes_of(bases[name])[1], 30 + i) for i, name in enumerate(first.inputs)}
    layers[first.out] = tiny(bases[first.out], sizes_of(bases[first.out])[0], _HIDDEN, 40)
    stock, gated = (cast(Any, children[name]) for name in (first.convolution, first.norm))
    options, weight = vars(gated)["_onepass"].options, randn(*gated.weight.shape, seed=43)
    taps, shift = randn(*stock.weight.shape, seed=41), None if stock.bias is None else randn(*stock.bias.shape, seed=42)
    own = {name: 0.3 * randn(*p.shape, seed=44 + i) for i, (name, p) in enumerate(module.named_parameters(recurse=False))}

    def normed(y: Tensor, z: Tensor) -> Tensor:
        return gated_rms_norm_reference(y, z, weight, **options)

    def formula(roles: DeltaRoles, x: Tensor) -> Tensor:
        sizes = _Sizes.of(stock, gated, own[roles.a_log])
        qkv, z, b, a = roles.ordered([layers[name](x) for name in roles.inputs], sizes)
        split, head = sizes.split(roles.key_heads)
        pieces = causal_conv1d_reference(qkv, taps, shift, split=split, l2_norm=(head, head, None), eps=LENGTH_EPS)
        q, k, v = sizes.heads_of(pieces, roles.key_heads)
        g, beta = delta_gates_reference(a.flatten(2), b.flatten(2), own[roles.a_log], own[roles.dt_bias])
        y: Any = gated_delta_rule_reference(q, k, v, g, beta)
        made: Tensor = layers[roles.out](normed(y, z.unflatten(-1, (sizes.heads, -1))).flatten(-2))
        return made

    convolution = probe(stock, {}, _parameters={"weight": taps, "bias": shift})
    stand_ins = {**layers, first.convolution: convolution, first.norm: Function(normed)}
    x, mask = randn(2, _TOKENS, _HIDDEN), torch.ones(2, _TOKENS, dtype=torch.long)
    mask[1, :2] = 0
    given, code = ((False, None, x), (True, mask, x * mask[:, :, None])), _plain_code(module)
    probes = [probe(module, stand_ins, training=training, _parameters=own) for training, _, _ in given]
    found = [
        probe_forward(m, x, probed_code=code, attention_mask=masked) for m, (_, masked, _) in zip(probes, given, strict=True)
    ]
    with torch.no_grad():
        for roles in candidates:
            if all(close(y, formula(roles, rows), _SLACK) for y, (_, _, rows) in zip(found, given, strict=True)):
                return roles
    return None


def _plain_code(module: nn.Module) -> Callable[..., Any]:
    """Return the class's forward with the model's own functions, where packages' have taken their place."""
    forward = type(module).forward
    return with_globals(forward, {name: inspect.unwrap(globals_with(name, forward)[name]) for name in (CONVOLUTION, DELTA_RULE)})
