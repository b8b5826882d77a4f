"""use_backend() and validate(): plain calls are the process's, blocks their thread's, also under the compiler and in backward."""

import sys
import threading

import pytest
import torch

import onepass
from onepass.runtime.backend import _choice, current_backend
from onepass.runtime.process_setting import validating


def found():
    return current_backend(), validating()


def in_thread(call):
    values = []
    thread = threading.Thread(target=lambda: values.append(call()))
    thread.start()
    thread.join()
    return values[0]


@pytest.mark.parametrize("first_ends_first", (False, True))
def test_blocks_of_two_threads_that_overlap_leave_nothing_behind(first_ends_first):
    before, seen = found(), []
    entered, ended = threading.Barrier(2, timeout=30), threading.Event()

    def run(backend, check, ends_first):
        with onepass.use_backend(backend), onepass.validate(check):
            entered.wait()
            seen.append(found() == (backend, check))
            if not ends_first:
                ended.wait(30)
        if ends_first:
            ended.set()

    choices = (("torch", True, first_ends_first), ("triton", False, not first_ends_first))
    threads = [threading.Thread(target=run, args=choice) for choice in choices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True] and found() == before


def test_a_block_is_its_threads_and_a_plain_call_the_processes():
    outside = found()
    with onepass.use_backend("torch"), onepass.validate():
        assert found() == ("torch", True) and in_thread(found) == outside
    try:
        onepass.use_backend("torch")
        onepass.validate()
        assert found() == ("torch", True) and in_thread(found) == ("torch", True)
        with onepass.use_backend("triton"):
            assert in_thread(lambda: onepass.use_backend("auto") and found()) == ("auto", True)
            assert found() == ("triton", True)
        assert found() == ("auto", True)
    finally:
        onepass.use_backend("auto")
        onepass.validate(False)


@pytest.mark.parametrize("first_ends_first", (False, True))
def test_undone_in_any_order_changes_leave_nothing_behind(first_ends_first):
    before = found()
    changes = [onepass.validate(), onepass.validate(), onepass.use_backend("torch")]
    for change in changes if first_ends_first else changes[::-1]:
        assert validating() or change is changes[-1]
        change.undo()
        change.undo()
    assert found() == before


def test_a_block_takes_its_own_call_back_and_no_later_one():
    first = onepass.use_backend("torch")
    onepass.use_backend("triton")
    with first:
        assert current_backend() == "torch" and in_thread(current_backend) == "triton"
    assert current_backend() == "triton"
    third, fourth = onepass.use_backend("torch"), onepass.use_backend("auto")
    with third, fourth:
        assert in_thread(current_backend) == "triton"
    assert current_backend() == "triton"
    onepass.use_backend("auto")


def test_pytorch_has_given_back_no_more_references_to_a_blocks_values_than_it_took():
    with onepass.use_backend("torch"):
        values = _choice.blocks.values
    with onepass.use_backend("triton"):
        pass
    assert sys.getrefcount(values) == 2  # the name's, and the call's


def test_blocks_of_coroutines_that_take_turns_in_one_thread():
    def block(name):
        with onepass.use_backend(name):
            yield current_backend()

    one, two = block("torch"), block("triton")
    assert [next(one), next(two)] == ["torch", "triton"]
    assert next(one, None) is None and current_backend() == "triton"
    assert next(two, None) is None and current_backend() == "auto"


class _Nested(torch.autograd.Function):
    """Runs a backward in its backward, `depth` times. After 60 of them PyTorch takes another thread."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.seen.append((threading.get_ident(), found()))
        if ctx.depth:
            with torch.enable_grad():
                _Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.seen).backward()
        return dy, None, None


def test_backward_in_another_thread_is_in_its_callers_block():
    seen, outside = [], found()
    with onepass.use_backend("torch"), onepass.validate():
        _Nested.apply(torch.ones(1, requires_grad=True), 130, seen).backward()
    assert len({thread for thread, _ in seen}) > 1
    assert {values for _, values in seen} == {("torch", True)}
    seen.clear()
    _Nested.apply(torch.ones(1, requires_grad=True), 70, seen).backward()
    assert {values for _, values in seen} == {outside}


def test_compiled_code_follows_its_threads_block_and_its_own():
    torch._dynamo.reset()

    def chosen(x):
        with onepass.use_backend("torch"):
            inside = 10 if current_backend() == "torch" else 0
        return x + inside + (1 if current_backend() == "torch" else 0)

    compiled, x = torch.compile(chosen, backend="eager", fullgraph=True), torch.zeros(1)
    assert compiled(x) == 10
    with onepass.use_backend("torch"):
        assert compiled(x) == 11 and in_thread(lambda: compiled(x)) == 10
        with onepass.use_backend("triton"):
            assert compiled(x) == 10
    onepass.use_backend("torch")
    assert compiled(x) == 11
    onepass.use_backend("auto")
    assert compiled(x) == 10 and found() == ("auto", False)
