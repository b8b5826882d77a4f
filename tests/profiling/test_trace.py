"""A trace read: which events, whose they are, and the time that they cover."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling.made import Made, tensor

from onepass.profiling.trace import TraceEvent, length, read, union, waits

moments = st.integers(0, 60)
intervals = st.lists(st.tuples(moments, st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12)


def covered(pairs):
    """The unit intervals in them, one by one."""
    return {at for start, end in pairs for at in range(start, end)}


@given(intervals)
def test_a_union_covers_each_moment_once(pairs):
    found = union(pairs)
    assert covered(found) == covered(pairs)
    assert length(found) == len(covered(pairs))
    assert all(first[1] < second[0] for first, second in pairwise(found))


@given(intervals.filter(len))
def test_waits_are_what_the_union_leaves_out(pairs):
    events = [TraceEvent("gpu", str(i), start, end, (0, 7)) for i, (start, end) in enumerate(pairs)]
    found = waits(events)
    last = max(end for _, end in pairs)
    first = min(start for start, _ in pairs)
    assert sum(us for _, _, us in found) == last - first - len(covered(pairs))
    for before, after, us in found:
        assert after.start - before.end == us > 0
        assert not covered(pairs) & set(range(before.end, after.start))


def test_a_kernel_belongs_to_the_operator_around_its_launch_in_whatever_thread():
    made = Made()
    made.op("aten::linear", 0, 50)
    made.op("aten::addmm", 10, 30)
    made.kernel("gemm", 20, 100, 5)
    made.op("MulBackward0", 15, 30, thread=2)  # at the same time, elsewhere
    made.op("aten::mul", 16, 20, thread=2)
    made.kernel("multiply", 18, 110, 5, thread=2, launch="cuLaunchKernelEx")
    gemm, multiply = read(made.data()).gpu
    assert [event.name for event in gemm.parents()] == ["gemm", "cudaLaunchKernel", "aten::addmm", "aten::linear"]
    assert [event.name for event in multiply.parents()] == ["multiply", "cuLaunchKernelEx", "aten::mul", "MulBackward0"]
    assert [event.is_operator for event in multiply.parents()] == [False, False, True, False]


def test_what_follows_is_no_child():
    made = Made()
    made.op("aten::a", 0, 10)
    made.op("aten::b", 10, 10)
    made.op("aten::c", 12, 2)
    trace = read(made.data())
    assert [op.parent and op.parent.name for op in trace.ops] == [None, None, "aten::b"]
    assert [op.inner for op in trace.ops] == [0, 2, 0]


def test_only_what_was_launched_between_the_marks_counts():
    made = Made()
    made.kernel("before", -20, -10, 25)  # still runs when the window begins
    made.steps((0, 50))
    made.kernel("inside", 40, 200, 5)  # runs when it is over
    made.op("aten::after", 300, 5)
    made.kernel("after", 301, 310, 5)
    trace = read(made.data())
    assert [event.name for event in trace.gpu] == ["inside"]
    assert not trace.ops


def test_without_marks_all_from_the_first_kernels_launch_counts():
    made = Made()
    made.op("aten::read_a_file", 0, 1000)
    made.op("aten::mm", 5000, 20)
    made.kernel("gemm", 5005, 5100, 50)
    trace = read(made.data())
    assert (trace.windows[0].start, trace.windows[0].end) == (5005, 5150)


@pytest.mark.parametrize("cat", ["gpu_user_annotation", "ac2g", "overhead", "fwdbwd", "python_function"])
def test_what_is_no_work_is_left_out(cat):
    made = Made()
    made.kernel("gemm", 0, 10, 5)
    made._add(cat, "step", 0, 1000, 0, 7, stream=7)
    assert [event.name for event in read(made.data()).gpu] == ["gemm"]


def test_an_empty_trace():
    trace = read({"traceEvents": []})
    assert not trace.windows
    assert not trace.gpu


def test_inputs_have_shapes_types_and_strides():
    made = Made()
    made.op(
        "aten::add",
        0,
        1,
        tensor(2, 3, dtype="c10::BFloat16"),
        tensor(3, strides=(0,)),
        {**tensor(), "type": "Scalar", "value": "1"},
    )
    first, second, third = read(made.data()).ops[0].inputs()
    assert (first.shape, first.dtype, first.strides) == ((2, 3), "c10::BFloat16", (3, 1))
    assert second.strides == (0,)
    assert (third.shape, third.value) == (None, "1")
