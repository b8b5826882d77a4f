"""The oracle of gated_delta_rule (see `oracle`): its recurrence, token by token and document by document."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, NamedCase, heads_laid_out, judge_call, normals

from onepass.testing.budget import BudgetReport, run


def recurrence(q, k, v, g, beta, state, scale):
    """Return y and the state after the last token."""
    serves = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(serves, 2) for t in (q, k))
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    ys = [torch.zeros_like(v[:, :0])]
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        ys.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state)[:, None])
    return torch.cat(ys, 1), state


@dataclass(frozen=True)
class Case(NamedCase):
    B: int = 2
    S: int = 70
    key_heads: int = 2
    H: int = 4
    K: int = 8
    V: int = 5
    dtype: torch.dtype = FP32
    beta: torch.dtype = FP32
    ends: tuple[int, ...] | None = None
    state: torch.dtype | None = None
    final: bool = False
    scale: float | None = None
    decay: float = 1.0  # the size of -g
    layout: str = "contiguous"


def options_of(case: Case):
    cu_seqlens = None if case.ends is None else torch.tensor((0, *case.ends), dtype=torch.int32, device=DEVICE)
    return {"scale": case.scale, "cu_seqlens": cu_seqlens, "output_final_state": case.final}


def draw(case: Case, seed: int = 0):
    """Return the tensors, with a state or None, and incoming gradients. Drawn on the CPU: every machine gets the same values."""
    randn, rows = normals(seed), (case.B, case.S)
    q, k = (torch.nn.functional.normalize(randn(*rows, case.key_heads, case.K), dim=-1) for _ in range(2))
    v, dy = (randn(*rows, case.H, case.V) for _ in range(2))
    g, beta = -case.decay * randn(*rows, case.H).abs(), randn(*rows, case.H).sigmoid()
    shape = (case.B if case.ends is None else len(case.ends), case.H, case.K, case.V)
    state, dfinal = randn(*shape), randn(*shape)
    q, k, v = (heads_laid_out(t.to(case.dtype).to(DEVICE), case.layout) for t in (q, k, v))
    inputs = {"q": q, "k": k, "v": v, "g": g.to(DEVICE), "beta": beta.to(case.beta).to(DEVICE)}
    inputs["state"] = None if case.state is None else state.to(case.state).to(DEVICE)
    dys = dy.to(case.dtype).to(DEVICE), dfinal.to(DEVICE)
    return inputs, dys if case.final else dys[0]


def formula(case: Case):
    """Return what takes the tensors, in any type: each document's recurrence by itself."""
    scale = case.K**-0.5 if case.scale is None else case.scale

    def call(q, k, v, g, beta, state):
        if case.ends is None:
            y, final = recurrence(q, k, v, g, beta, state, scale)
        else:
            ys, finals = [], []
            for i, (first, end) in enumerate(pairwise((0, *case.ends))):
                own = None if state is None else state[i : i + 1]
                y, final = recurrence(*(t[:, first:end] for t in (q, k, v, g, beta)), own, scale)
                ys.append(y)
                finals.append(final)
            y, final = torch.cat(ys, 1), torch.cat(finals)
        return (y, final) if case.final else y

    return call


def judge_case(module, case: Case, backend: str = "torch") -> BudgetReport:
    def call(q, k, v, g, beta, state):
        return module.gated_delta_rule(q, k, v, g, beta, initial_state=state, backend=backend, **options_of(case))

    return judge_call(call, partial(run, formula(case)), partial(draw, case), case.dtype)


# ---- the cases ----


def small_cases() -> list[Case]:
    plain = Case()
    documents = Case(B=1, S=150, ends=(1, 1, 65, 66, 150, 150), key_heads=1, H=2)
    return [
        plain,
        replace(plain, S=130, final=True, state=FP32),
        replace(plain, dtype=BF16, beta=BF16, state=BF16, S=64),
        replace(plain, dtype=FP16, key_heads=4, scale=0.7, layout="part"),
        replace(plain, B=1, S=1, final=True),
        documents,
        replace(documents, state=FP32, final=True),
        replace(documents, dtype=BF16, final=True, ends=(64, 128, 150)),
        replace(documents, ends=(150,), state=FP32, decay=0.01),
        replace(plain, decay=20.0, layout="heads first"),
        replace(plain, S=200, decay=1e-3, K=33, V=17),
    ]
