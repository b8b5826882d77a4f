"""The figures of traces made by hand: busy, idle, gaps, launches, rows, with the numbers known beforehand."""

import pytest
from profiling.made import NOTHING, Made, launch_bound, matrix_products, number, numbers, tensor

from onepass.profiling.timeline import short_name


def test_idle_gaps_and_launches_of_a_launch_bound_step():
    found = launch_bound(steps=2, kernels=10).profile(wall=100.0, host=95.0)
    assert found.on_gpu
    assert found.steps == 2
    assert found.device == "Some GPU"
    assert found.busy_us == 10.0
    assert found.idle_us == 90.0
    assert found.idle_share == pytest.approx(0.9)
    assert found.kernels == found.launches == 10
    assert found.launch_us == 2.0
    assert found.host_us == 95.0
    # Nine of 9 us a step, and one between the steps.
    assert found.gap_count == (2 * 9 + 1) / 2
    assert found.gap_us == pytest.approx((2 * 81 + 909) / 2)
    gap = found.gaps[0]
    assert gap.before == gap.after == "vectorized_elementwise_kernel<tanh_kernel_cuda>"
    assert (gap.count, gap.longest_us) == (9.5, 909)


def test_streams_at_the_same_time_are_busy_once():
    made = Made()
    made.steps((0, 100))
    made.kernel("a", 1, 10, 20, stream=7)
    made.kernel("b", 2, 15, 30, stream=8)
    made.kernel("c", 3, 50, 5, stream=7)
    found = made.profile(wall=100)
    assert found.busy_us == 40  # 10 to 45 and 50 to 55
    assert found.idle_us == 60
    assert [(gap.before, gap.after, gap.us) for gap in found.gaps] == [("b", "c", 5)]
    assert found.rows_us == 55


def test_kernels_that_follow_each_other_as_queued_ones_do_leave_no_gap():
    made = Made()
    made.steps((0, 100))
    for i in range(5):
        made.kernel("a", i, 10 + 10 * i, 9.5)
    assert made.profile().gap_count == 0


def test_two_gpus_are_not_added():
    made = Made()
    made.steps((0, 100))
    made.kernel("a", 1, 10, 60, device=0)
    made.kernel("b", 2, 30, 50, device=1)
    assert made.profile(wall=100).busy_us == 60


def test_a_cuda_graph_is_one_launch_and_its_kernels_belong_to_no_operator():
    made = Made()
    made.steps((0, 100))
    made.op("aten::add", 0, 20, tensor(4), tensor(4), number(1))
    made.kernel("first", 5, 10, 3, launch="cudaGraphLaunch")
    made.kernel("second", 5, 14, 3, launch=None)
    made.kernel("first", 5, 18, 3, launch=None)
    found = made.profile(wall=30)
    assert (found.kernels, found.launches, found.graphs) == (3, 1, 1)
    assert {row.name: (row.calls, row.us, row.bytes) for row in found.rows} == {"first": (2, 6, None), "second": (1, 3, None)}


@pytest.mark.parametrize(
    "launch", ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"]
)
def test_all_ways_to_launch_count(launch):
    made = Made()
    made.kernel("a", 1, 10, 60, launch=launch)
    made.call("cudaEventRecord", 3)
    assert made.profile().launches == 1


def test_a_launch_inside_a_launch_is_one():
    made = Made()
    made.steps((0, 100))
    made.call("cudaLaunchKernelExC", 1, 10)
    made.kernel("a", 2, 20, 5, launch="cuLaunchKernelEx")
    found = made.profile()
    assert (found.launches, found.launch_us) == (1, 10)


def test_an_operators_kernels_are_one_row_and_its_bytes_are_over_their_time():
    made = Made()
    made.steps((0, 100))
    shapes = [tensor(1024, 1000), tensor(1024, 1000), numbers("[1000]"), tensor(1024, 1), tensor(1024, 1)]
    made.op("NativeLayerNormBackward0", 0, 40)
    made.op("aten::native_layer_norm_backward", 1, 38, *shapes, tensor(1000), tensor(1000), numbers("[True, True, True]"))
    made.op("aten::empty", 2, 1)
    made.kernel("rows", 5, 50, 20)
    made.kernel("columns", 10, 70, 4)
    (row,) = made.profile().rows
    assert row.name == "aten::native_layer_norm_backward"
    assert (row.calls, row.us, row.kernels) == (1, 24, {"rows": 1, "columns": 1})
    assert row.bytes == 4 * (3 * 1024 * 1000 + 2 * 1024 + 4 * 1000)
    assert row.gbs == pytest.approx(row.bytes / 24e3)
    assert row.of_copy == pytest.approx(row.gbs / 1000)
    assert row.near == "bandwidth"


def test_a_product_is_measured_against_the_peak_of_its_type():
    found = matrix_products(us=30.0).profile(wall=60)
    (row,) = found.rows
    assert row.flops == 2 * 2 * 1024**3
    assert row.tflops == pytest.approx(2 * 1024**3 / 30e6)
    assert row.of_peak == pytest.approx(0.716, abs=1e-3)
    assert row.near == "compute"
    (row,) = matrix_products("float", us=30.0).profile(wall=60).rows
    assert row.of_peak is None  # nobody measured that type
    assert row.tflops is not None


def test_the_bytes_of_a_row_are_known_only_if_all_are():
    made = Made()
    made.op("aten::add", 0, 5, tensor(1000), tensor(1000), number(1))
    made.kernel("add", 1, 10, 5)
    made.op("aten::add", 10, 5, tensor(1000, dtype="Undefined"), tensor(1000), number(1))
    made.kernel("add", 11, 20, 5)
    (row,) = made.profile().rows
    assert row.calls == 2
    assert row.bytes is row.gbs is row.of_copy is row.near is None


def test_copies_have_the_bytes_that_the_trace_says():
    made = Made()
    made.op("aten::copy_", 0, 50, tensor(1000), tensor(1000), number(False))
    made.copy("Memcpy DtoD (Device -> Device)", 1, 10, 4, 4000)
    made.copy("Memcpy HtoD (Pinned -> Device)", 20, 30, 4, 4000)
    made.kernel("Memset (Device)", 40, 50, 2, launch="cudaMemsetAsync", cat="gpu_memset", bytes=1000)
    found = made.profile()
    rows = {row.name.split(" (")[0]: row for row in found.rows}
    assert [rows[name].bytes for name in ("Memcpy DtoD", "Memcpy HtoD", "Memset")] == [8000, 4000, 1000]
    assert rows["Memcpy DtoD"].of_copy == pytest.approx(0.002)
    assert rows["Memset"].of_copy is not None
    assert rows["Memcpy HtoD"].gbs == pytest.approx(1.0)
    assert rows["Memcpy HtoD"].of_copy is None  # a bus, not the memory
    assert (found.kernels, found.launches) == (0, 0)


def test_waiting_for_the_gpu_counts_inside_steps_only():
    made = launch_bound(steps=2)
    made.call("cudaStreamSynchronize", 50, 5)
    made.call("cudaDeviceSynchronize", 1100.5, 0.2)  # the profile's own, after the last step
    made.call("cudaMemcpyAsync", 60, 5)
    assert made.profile().waits == 0.5


def test_steps_are_the_same_if_operators_and_shapes_are():
    assert launch_bound(steps=3).profile().same_steps
    assert not launch_bound(steps=1).profile().same_steps
    made = launch_bound(steps=2)
    made.op("aten::tanh", 1000 + 98, 2, tensor(32, 16))
    made.kernel("tanh", 1000 + 98.5, 1000 + 200, 1)
    assert not made.profile().same_steps


def test_on_a_cpu_an_operator_has_its_own_time_and_a_known_one_that_of_its_parts():
    made = Made()
    made.steps((0, 1000))
    made.op("aten::linear", 10, 100, tensor(8, 16), tensor(4, 16), NOTHING)
    made.op("aten::t", 12, 8, tensor(4, 16))
    made.op("aten::mm", 30, 70, tensor(8, 16), tensor(16, 4))
    made.op("aten::resolve_conj", 90, 5, tensor(8, 4))
    made.op("autograd::engine::evaluate_function: MmBackward0", 300, 50)
    made.op("MmBackward0", 310, 30)
    made.op("aten::mm", 312, 20, tensor(16, 8), tensor(8, 4))
    found = made.profile(wall=500)
    assert not found.on_gpu
    rows = {row.name: (row.calls, row.us) for row in found.rows}
    assert rows == {
        "aten::mm": (2, 90),
        "aten::linear": (1, 22),
        "aten::t": (1, 8),
        "autograd engine": (1, 20),
        "MmBackward0": (1, 10),
    }
    assert found.busy_us == 150
    assert found.idle_us == pytest.approx(500 * (1 - 150 / 1002))
    assert [(gap.before, gap.after, gap.us) for gap in found.gaps] == [("aten::linear", "autograd engine", 190)]
    assert found.launches == 4  # operators, not ranges


def test_the_peak_of_a_cpu_is_that_of_the_steps_allocations():
    made = Made()
    made.steps((0, 100))
    for at, size in ((-50, 1 << 30), (10, 1000), (20, 500), (30, -1000), (40, 700)):
        made.events.append({"ph": "i", "name": "[memory]", "ts": at, "args": {"Device Type": 0, "Bytes": size}})
    made.events.append({"ph": "i", "name": "[memory]", "ts": 15, "args": {"Device Type": 1, "Bytes": 1 << 20}})
    assert made.profile().peak_bytes == 1500
    assert made.profile(peak=77).peak_bytes == 77  # what a GPU's allocator says


NAMES = {
    "aten::mm": "aten::mm",
    "_rms_forward": "_rms_forward",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
    "autograd::engine::evaluate_function: MulBackward0": "autograd engine",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, "
    "at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)": "vectorized_elementwise_kernel<CUDAFunctor_add>",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float, float const*)":
    "vectorized_layer_norm_kernel",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
    "at::native::GeluType)::{lambda()#1}::operator()() const::{lambda(float)#2}, std::array<char*, 2ul> >(int)":
    "vectorized_elementwise_kernel<GeluCUDAKernelImpl>",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >(int)":
    "reduce_kernel<MeanOps>",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_nn_align8>(Params)":
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_nn_align8",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: NAMES[name][:40])
def test_names_are_short(name):
    assert short_name(name) == NAMES[name]
