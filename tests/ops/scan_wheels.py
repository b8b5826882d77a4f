"""Stand-ins for the functions of wheels that mamba_chunk_scan calls. They compute the formula, and check how they are called."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from unittest.mock import patch

import torch
from torch.nn import functional as F

from onepass.ops.scan.chunks import ScanInputs, ScanOptions, chunked_scan

CHUNKS = {"mamba_ssm": 256, "fla": 64}
SCALE = 2.0  # of FLA's sums, in place of 1 / log(2)
_deterministic_override = None


def set_deterministic_mode(value):
    global _deterministic_override
    _deterministic_override = value


def _differentiated(function, tensors, grads):
    """The gradients of `tensors`, None for None."""

    def gradients():
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        ys = function(*leaves)
        grad = [torch.zeros_like(y) if g is None else g.to(y.dtype) for y, g in zip(ys, grads, strict=True)]
        found = iter(torch.autograd.grad(ys, [t for t in leaves if t is not None], grad, allow_unused=True))
        return [None if t is None else next(found) for t in leaves]

    with ThreadPoolExecutor(1) as thread:  # where the dispatcher has not turned autograd off
        return thread.submit(gradients).result()


def _scan(x, dt, A, B, C, D, dt_bias, initial_states, *, seq_idx, dt_softplus, dt_limit, chunk_size):
    assert chunk_size == CHUNKS["mamba_ssm"] and A.dtype is torch.float32 and _deterministic_override is True
    assert initial_states is None or initial_states.dtype is torch.float32
    cu_seqlens = None
    if seq_idx is not None:
        assert seq_idx.shape == x.shape[:2] and seq_idx.dtype is torch.int32 and initial_states is None
        counts = F.one_hot(seq_idx[0].long()).sum(0)
        cu_seqlens = F.pad(counts.cumsum(0), (1, 0)).int()
    inputs = ScanInputs(x, dt, A, B, C, D, dt_bias, initial_states, cu_seqlens)
    y, final = chunked_scan(inputs, ScanOptions(dt_softplus, *dt_limit, True))
    return y.clone(), final


class Wheels:
    """Both wheels' functions, and whose were called."""

    def __init__(self):
        self.called = []

    def mamba_forward(self, x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, **options):
        self.called.append("mamba_ssm")
        with torch.no_grad():
            y, final = _scan(x, dt, A, B, C, D, dt_bias, initial_states, chunk_size=chunk_size, **options)
        return y, None, None, None, None, final

    def mamba_backward(self, x, dt, A, B, C, D, dt_bias, initial_states, *, dout, out, dfinal_states, dx, ddt, dB, dC, **options):
        assert out.shape == x.shape and dout.is_contiguous() and all(t.is_contiguous() for t in (dx, ddt, dB, dC))
        self.called.append("mamba_ssm")
        tensors = x, dt, A, B, C, D, dt_bias, initial_states
        found = _differentiated(lambda *leaves: _scan(*leaves, **options), tensors, (dout, dfinal_states))
        for given, grad in zip((dx, ddt, dB, dC), (found[0], found[1], found[3], found[4]), strict=True):
            given.copy_(grad)
        vectors = [None if t is None else t.float() for t in (found[2], *found[5:])]
        return dx, ddt, vectors[0], dB, dC, vectors[1], None, vectors[2], vectors[3]

    def fla_forward(self, *, output_final_state, **given):
        self.called.append("fla")
        with torch.no_grad():
            y, final = self._attention(**given)
        return y.clone(), final if output_final_state else None

    def fla_backward(self, *, q, k, v, g, initial_state, do, dht, **given):
        self.called.append("fla")
        assert do.is_contiguous() and (dht is None or dht.is_contiguous())

        def attend(q, k, v, g, initial_state):
            return self._attention(q=q, k=k, v=v, g=g, initial_state=initial_state, **given)

        dq, dk, dv, dg, dstate = _differentiated(attend, (q, k, v, g, initial_state), (do, dht))
        return dq, dk, dv, SCALE * dg, dstate  # of the sums before they were scaled

    def _attention(self, *, q, k, v, g, g_gamma, scale, initial_state, cu_seqlens, chunk_size, chunk_indices):
        """The scan whose steps are 1: A of each token is what g's own sums say."""
        assert g_gamma is None and scale == 1.0 and q.shape[2] == v.shape[2] and g.dtype is torch.float64
        assert all(t is None or t.is_contiguous() for t in (q, k, v, g, initial_state))
        assert chunk_size == CHUNKS["fla"] and (chunk_indices is None) == (cu_seqlens is None)
        ends = range(0) if cu_seqlens is None else cu_seqlens.tolist()
        spans = list(pairwise(ends)) or [(0, q.shape[1])]
        ys, finals = [], []
        for i, (first, end) in enumerate(spans):
            own = initial_state if cu_seqlens is None or initial_state is None else initial_state[i : i + 1]
            y, final = self._attend(*(t[:, first:end] for t in (q, k, v, g / SCALE)), own)
            ys.append(y)
            finals.append(final)
        return torch.cat(ys, 1), torch.cat(finals)

    def _attend(self, q, k, v, g, state):
        """g: sums within each chunk."""
        q, k, wide = q.double(), k.double(), v.double()
        state = wide.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state.double()
        ys = []
        for first in range(0, v.shape[1], CHUNKS["fla"]):
            qs, ks, vs, gs = (t[:, first : first + CHUNKS["fla"]].transpose(1, 2) for t in (q, k, wide, g))
            decay = (gs[..., None] - gs[..., None, :]).tril().exp().tril()
            ys.append(gs.exp()[..., None] * qs @ state + (qs @ ks.mT * decay) @ vs)
            state = gs[..., -1:, None].exp() * state + ((gs[..., -1:] - gs).exp()[..., None] * ks).mT @ vs
        y = torch.cat(ys, 2).transpose(1, 2).contiguous() if ys else wide
        return y.to(v.dtype), state.float()

    def sums(self, *, g, chunk_size, cu_seqlens, chunk_indices, scale=1.0, reverse=False):
        """In fp64, so that what is judged is how they are called."""
        assert chunk_size == CHUNKS["fla"] and g.dtype is (torch.float64 if reverse else torch.float32)
        ends = [0, g.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        pieces, g = [g[:, :0].double()], g.double()
        for first, end in pairwise(ends):
            for start in range(first, end, chunk_size):
                piece = g[:, start : min(start + chunk_size, end)]
                pieces.append(piece.flip(1).cumsum(1).flip(1) if reverse else piece.cumsum(1))
        return scale * torch.cat(pieces, 1)

    def chunks(self, *, cu_seqlens, chunk_size):
        assert chunk_size == CHUNKS["fla"]
        return cu_seqlens + 1


@contextlib.contextmanager
def stand_in(names=None, wheel=""):
    """Let by_wheels, whose globals are `names`, find stand-ins on any device: both, or `wheel` alone."""
    if names is None:
        from onepass.ops.scan import by_wheels

        names = vars(by_wheels)
    wheels = Wheels()
    functions = {
        "mamba_functions": lambda: (wheels.mamba_forward, wheels.mamba_backward, set_deterministic_mode),
        "fla_functions": lambda: (wheels.fla_forward, wheels.fla_backward, wheels.sums, wheels.chunks, SCALE),
    }
    if wheel:
        functions["fla_functions" if wheel == "mamba_ssm" else "mamba_functions"] = lambda: "it is not installed"
    changes = {"refused_operands": lambda **operands: None, "refused_gradients": lambda device, instead: None}
    any_heads = {"fla": lambda inputs, final, grads: names["_why_no_fla"]()}
    with patch.dict(names, functions | changes), patch.dict(names["REFUSALS"], any_heads):
        yield wheels
    assert _deterministic_override is None
