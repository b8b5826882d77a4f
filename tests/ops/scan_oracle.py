"""The oracle of mamba_chunk_scan (see `oracle`): its recurrence, token by token and document by document."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, NamedCase, heads_laid_out, judge_call, normals
from torch.nn import functional as F

from onepass.testing.budget import BudgetReport, run

VECTORS = "dt_bias", "D"


def recurrence(x, dt, A, B, C, state):
    """Return y and the state after the last token."""
    serves = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(serves, 2) for t in (B, C))
    if state is None:
        state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3])
    ys = [torch.zeros_like(x[:, :0])]
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * A).exp()[..., None, None]
        state = state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        ys.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t])[:, None])
    return torch.cat(ys, 1), state


@dataclass(frozen=True)
class Case(NamedCase):
    B: int = 2
    S: int = 70
    G: int = 2
    H: int = 4
    P: int = 5
    N: int = 8
    dtype: torch.dtype = FP32
    dt: torch.dtype = FP32
    vectors: tuple[str, ...] = VECTORS
    softplus: bool = True
    limit: tuple[float, float] = (0.0, float("inf"))
    ends: tuple[int, ...] | None = None
    state: torch.dtype | None = None
    final: bool = False
    decay: float = 1.0  # the size of -A
    layout: str = "contiguous"


def options_of(case: Case):
    cu_seqlens = None if case.ends is None else torch.tensor((0, *case.ends), dtype=torch.int32, device=DEVICE)
    options = {"dt_softplus": case.softplus, "dt_limit": case.limit, "return_final_states": case.final}
    return options | {"cu_seqlens": cu_seqlens}


def draw(case: Case, seed: int = 0):
    """Return the tensors, with a state or None, and incoming gradients. Drawn on the CPU: every machine gets the same values."""
    randn, rows = normals(seed), (case.B, case.S)
    x, dy = (randn(*rows, case.H, case.P) for _ in range(2))
    B, C = (case.N**-0.5 * randn(*rows, case.G, case.N) for _ in range(2))
    dt, A = randn(*rows, case.H), -case.decay * (0.2 + randn(case.H).abs())
    dt = dt - 1 if case.softplus else dt.abs()
    bias, D = randn(case.H), randn(case.H)
    shape = (case.B if case.ends is None else len(case.ends), case.H, case.P, case.N)
    state, dfinal = randn(*shape), randn(*shape)
    x, B, C = (heads_laid_out(t.to(case.dtype).to(DEVICE), case.layout) for t in (x, B, C))
    inputs = {"x": x, "dt": dt.to(case.dt).to(DEVICE), "A": A.to(DEVICE), "B": B, "C": C}
    inputs |= {
        "D": D.to(DEVICE) if "D" in case.vectors else None,
        "dt_bias": bias.to(DEVICE) if "dt_bias" in case.vectors else None,
    }
    inputs["state"] = None if case.state is None else state.to(case.state).to(DEVICE)
    dys = dy.to(case.dtype).to(DEVICE), dfinal.to(DEVICE)
    return inputs, dys if case.final else dys[0]


def formula(case: Case):
    """Return what takes the tensors, in any type: each document's recurrence by itself."""

    def call(x, dt, A, B, C, D, dt_bias, state):
        if dt_bias is not None:
            dt = dt + dt_bias
        if case.softplus:
            dt = F.softplus(dt, threshold=40)
        dt = dt.clamp(*case.limit)
        if case.ends is None:
            y, final = recurrence(x, dt, A, B, C, state)
        else:
            ys, finals = [], []
            for i, (first, end) in enumerate(pairwise((0, *case.ends))):
                own = None if state is None else state[i : i + 1]
                rows = [t[:, first:end] for t in (x, dt, B, C)]
                y, final = recurrence(*rows[:2], A, *rows[2:], own)
                ys.append(y)
                finals.append(final)
            y, final = torch.cat(ys, 1), torch.cat(finals)
        if D is not None:
            y = y + D[:, None] * x
        return (y, final) if case.final else y

    return call


def judge_case(module, case: Case, backend: str = "torch") -> BudgetReport:
    def call(x, dt, A, B, C, D, dt_bias, state):
        given = {"D": D, "dt_bias": dt_bias, "initial_states": state, "backend": backend}
        return module.mamba_chunk_scan(x, dt, A, B, C, **given, **options_of(case))

    return judge_call(call, partial(run, formula(case)), partial(draw, case), case.dtype, few=True)


# ---- the cases ----


def small_cases() -> list[Case]:
    plain = Case()
    documents = Case(B=1, S=150, ends=(1, 1, 65, 66, 150, 150), G=1, H=2)
    return [
        plain,
        replace(plain, S=130, final=True, state=FP32),
        replace(plain, dtype=BF16, dt=BF16, state=BF16, S=64),
        replace(plain, dtype=FP16, G=4, layout="part"),
        replace(plain, B=1, S=1, final=True, vectors=()),
        documents,
        replace(documents, state=FP32, final=True),
        replace(documents, dtype=BF16, final=True, ends=(64, 128, 150), vectors=("D",)),
        replace(documents, ends=(150,), state=FP32, decay=0.01, vectors=("dt_bias",)),
        replace(plain, decay=20.0, layout="heads first"),
        replace(plain, S=200, decay=1e-2, P=17, N=33, softplus=False, vectors=()),
        replace(plain, limit=(0.2, 0.6)),
    ]
