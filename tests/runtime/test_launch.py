"""A plan chosen wrongly reads misaligned memory and kills the process: plans differ wherever Triton compiles differently."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from onepass.kernels import launch
from onepass.ops.activation import kernels as module
from onepass.ops.activation.formula import ActivationOptions

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bound(*fixed, num_warps=4):
    return module._forward_kernel.bind(*fixed, num_warps=num_warps)


def test_kinds_differ_where_triton_compiles_differently():
    flat, half = torch.zeros(64), torch.zeros(64, dtype=torch.float16)

    def kind(x, bias, M):
        return module._forward_kernel.kind(-1, (x, bias, None, x, None, None, None, None, M, None))[0]

    kinds = [
        kind(flat, flat, 2),
        kind(flat[1:], flat, 2),
        kind(flat, flat[1:], 2),
        kind(flat[1:], flat[1:], 2),
        kind(flat, None, 2),
    ]
    kinds += [kind(half, flat, 2), kind(flat, half, 2), kind(half[4:], flat, 2), kind(flat, flat, 1 << 32)]
    assert len(set(kinds)) == len(kinds)
    assert kind(flat, flat, 3) == kind(flat, flat, 2**31 - 1) == kinds[0] == kind(flat[4:], flat[8:], 16)
    on_another_device = module._forward_kernel.kind(0, (flat, flat, None, flat, None, None, None, None, 2, None))[0]
    assert on_another_device != kinds[0]


def test_arguments_come_back_with_addresses():
    x = torch.zeros(16)
    _, addresses = module._forward_kernel.kind(-1, (x, None, None, x[4:], None, None, None, None, 7, None))
    assert addresses == (x.data_ptr(), None, None, x.data_ptr() + 16, None, None, None, None, 7, None)


@pytest.mark.parametrize(("tensors", "sizes"), [(1, 0), (1, 1), (12, 2)])
def test_kinds_of_any_number_of_arguments(tensors, sizes):
    x = torch.zeros(16)
    kind, addresses = launch._kind_of(tensors, sizes)(0, (x,) * tensors + (5,) * sizes)
    assert kind == (0, *[torch.float32] * tensors, *[False] * sizes)
    assert addresses == (x.data_ptr(),) * tensors + (5,) * sizes


def test_each_binding_has_plans_of_its_own():
    assert bound(8, 8, None, None).plans is not bound(8, 8, None, None).plans


@pytest.mark.parametrize("down", [1, 7, 65535, 65536, 200000])
def test_a_grid_holds_every_block(down):
    across, first, second = launch.grid_of(3, down)
    assert across == 3 and first <= 65535 and second <= 65535
    assert first * second >= down and (second - 1) * 65535 < down


def test_arguments_in_the_wrong_order_are_refused():
    with pytest.raises(AssertionError, match="tensors first"):

        @launch.kernel
        def wrong(x_ptr, H, M):
            pass


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_a_plan_is_kept_and_a_new_size_needs_none():
    act, options = module.find_activation("relu"), ActivationOptions("relu", None, None)
    for M in (5, 17, 33):
        x = torch.randn(M, 48, device=DEVICE)
        assert torch.equal(module.activation_forward(x, None, None, None, None, options, x.dtype), x.relu())
    plans = [len(module._forward_plan(act, M, 48, 48, None, False, options)[1].plans) for M in (5, 17, 33)]
    assert len(set(plans)) == 1 and plans[0] > 0  # other tests' types and alignments have plans here too


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_threads_that_compile_a_kernel_at_the_same_time_can_launch_it_again():
    act, options, together = module.find_activation("relu"), ActivationOptions("relu", None, None), Barrier(4)
    x = torch.randn(7, 776, device=DEVICE)

    def call(number):
        together.wait()
        return module.activation_forward(x, None, None, None, None, options, x.dtype)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(torch.equal(y, x.relu()) for y in pool.map(call, range(4)))
            gc.collect()
    assert module._forward_plan(act, 7, 776, 776, None, False, options)[1].plans


def test_a_kernel_is_held_for_as_long_as_its_plan(monkeypatch):
    """Triton drops the first of two that threads compiled at the same time, and from 3.9 on unloads what nobody holds."""

    class Compiled:
        pass

    compiled = Compiled()
    held, one = weakref.ref(compiled), bound(8, 8, None, None)
    monkeypatch.setattr(launch.Bound, "_by_triton", lambda self, grid, args: held())
    monkeypatch.setattr(launch, "_quick_launch", lambda compiled, device: (print, ()))
    one.first(("a kind",), (1, 1, 1), (torch.zeros(1),))
    del compiled
    gc.collect()
    assert held() is not None and one.plans == {("a kind",): (print, ())}
    del one
    gc.collect()
    assert held() is None


def launched_by_triton(monkeypatch, scratch):
    """Triton's launch of a compiled kernel, whose last call keeps its arguments in a list, and that list."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())  # there is no GPU to ask for one
    run, seen = driver.CudaLauncher.__new__(driver.CudaLauncher), []
    vars(run).update(
        launch=lambda *args: seen.append(args), launch_cooperative_grid=True, launch_pdl=False, num_ctas=1, gsan_enabled=False,
        global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        arg_annotations="annotations", kernel_signature=b"signature",
    )  # fmt: skip
    return SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 0)), seen


def test_a_quick_launch_hands_on_what_tritons_own_does(monkeypatch):
    compiled, seen = launched_by_triton(monkeypatch, 0)
    quick, middle = launch._quick_launch(compiled, torch.device("cpu"))
    args = 1024, None, 5, 64
    quick(3, 2, 1, 7, *middle, *args)
    compiled.run(3, 2, 1, 7, compiled.function, compiled.packed_metadata, None, None, None, *args)
    assert seen[0] == seen[1]


def test_a_quick_launch_has_memory_for_each_programs_descriptors(monkeypatch):
    compiled, seen = launched_by_triton(monkeypatch, 128)
    plan = launch._quick_launch(compiled, torch.device("cpu"))
    if launch.VERSION < (3, 6):
        assert plan is None
        return
    plan[0](3, 2, 1, 7, *plan[1], 1024)
    (memory,) = (each for each in seen[0] if isinstance(each, torch.Tensor))
    assert memory.numel() == 3 * 2 * 128 and memory.dtype is torch.int8


def test_an_untried_triton_launches_by_itself(monkeypatch):
    compiled, _ = launched_by_triton(monkeypatch, 0)
    monkeypatch.setattr(launch, "VERSION", (3, 10))
    assert launch._quick_launch(compiled, torch.device("cpu")) is None
