"""Stand-ins for the functions of wheels that gated_delta_rule calls. They compute the formula, and check how they are called."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch

from onepass.ops.delta.chunks import chunked_delta_rule

CHUNK = 64


def _rule(q, k, v, g, beta, scale, initial_state, cu_seqlens):
    given = (q, k, v, g, beta, initial_state, cu_seqlens)
    assert all(t is None or t.is_contiguous() for t in given)
    assert not any(t.data_ptr() % 16 for t in given[:6] if t is not None)  # FlashQLA's tensor maps
    assert g.dtype is torch.float32 and q.dtype is k.dtype is v.dtype and isinstance(scale, float)
    assert initial_state is None or initial_state.dtype is torch.float32
    return chunked_delta_rule(*given, scale)


def _forward(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    with torch.no_grad():
        y, final = _rule(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    system = q.new_full((*v.shape[:3], CHUNK), 3.0)
    return 2 * g, y.clone(), system, final if output_final_state else None  # sums: not g itself


def _backward(q, k, v, g, beta, A, scale, initial_state, do, dht, cu_seqlens):
    assert (A == 3).all() and A.shape == (*v.shape[:3], CHUNK) and do.is_contiguous()
    assert not any(t.data_ptr() % 16 for t in (A, do, g, *([] if dht is None else [dht])))
    assert dht is None or dht.dtype is torch.float32

    def gradients():
        leaves = [t if t is None else t.detach().requires_grad_() for t in (q, k, v, g / 2, beta, initial_state)]
        ys = _rule(*leaves[:5], scale, leaves[5], cu_seqlens)
        dys = (do, torch.zeros_like(ys[1]) if dht is None else dht)
        found = torch.autograd.grad(ys, [t for t in leaves if t is not None], dys)
        return [t.contiguous() for t in found]

    with ThreadPoolExecutor(1) as thread:  # where the dispatcher has not turned autograd off
        dq, dk, dv, dg, dbeta, *dstate = thread.submit(gradients).result()
    return dq, dk, dv, dbeta, dg, dstate[0] if dstate else None


class Wheels:
    """Both wheels' functions, and whose were called."""

    def __init__(self):
        self.called = []

    def fla_forward(self, *, chunk_indices, chunk_size, **given):
        self._fla(chunk_indices, chunk_size, given)
        sums, y, system, final = _forward(**given)
        return sums, y, system, final, given["initial_state"], None

    def fla_backward(self, *, chunk_indices, chunk_size, **given):
        self._fla(chunk_indices, chunk_size, given)
        return *_backward(**given), None, None

    def chunks(self, *, cu_seqlens, chunk_size):
        assert chunk_size == CHUNK
        return cu_seqlens + 1

    def _fla(self, chunk_indices, chunk_size, given):
        ends = given["cu_seqlens"]
        assert chunk_size == CHUNK
        assert chunk_indices is None if ends is None else torch.equal(chunk_indices, ends + 1)
        self.called.append("fla")

    def qla_forward(self, *, auto_cp, is_train, **given):
        assert not auto_cp and is_train
        self._qla(given)
        sums, y, system, final = _forward(**given)
        return sums, system, y, None, final, None

    def qla_backward(self, *, auto_cp, **given):
        assert not auto_cp
        self._qla(given)
        return _backward(**given)

    def _qla(self, given):
        ends = given["cu_seqlens"]
        assert ends is None or (ends.is_contiguous() and (ends.diff() > 0).all())  # FlashQLA is wrong where one has no tokens
        self.called.append("flash_qla")


@contextlib.contextmanager
def stand_in(names=None, wheel=""):
    """Let by_wheels, whose globals are `names`, find stand-ins on any device: both, or `wheel` alone."""
    if names is None:
        from onepass.ops.delta import by_wheels

        names = vars(by_wheels)
    wheels = Wheels()
    functions = {
        "fla_functions": lambda: (wheels.fla_forward, wheels.fla_backward, wheels.chunks),
        "qla_functions": lambda: (wheels.qla_forward, wheels.qla_backward),
    }
    if wheel:
        functions["qla_functions" if wheel == "fla" else "fla_functions"] = lambda: "it is not installed"
    changes = {"refused_operands": lambda **operands: None, "refused_gradients": lambda device, instead: None}
    changes["compute_capability"] = lambda device: (9, 0)
    any_heads = {"flash_qla": lambda inputs, grads: names["_why_no_qla"]()}
    with patch.dict(names, functions | changes), patch.dict(names["REFUSALS"], any_heads):
        yield wheels
