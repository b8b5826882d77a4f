"""Buffers of `MainGrads(release=True)` with everything in them that large models have."""

from contextlib import contextmanager
from unittest.mock import patch

from onepass.gradients import main_grads as module
from onepass.gradients import releasable_storage as released


@contextmanager
def poisoned(large=64, buffer=4096):
    """Gradients of so many bytes count as large, buffers have about so many, and what nobody has written yet is NaN."""
    fill = released.ReleasableBuffer._fill

    def filled(self):
        fill(self)
        for unwritten in self._unwritten.values():
            unwritten.fill_(float("nan"))

    with (
        patch.object(released.ReleasableBuffer, "_fill", filled),
        patch.object(released, "_LARGE", large),
        patch.object(module, "_RELEASED_BYTES", buffer),
    ):
        yield


def have_memory(main_grads):
    """Whether each of its buffers has."""
    return [bool(buffer.untyped_storage().nbytes()) for buffer in main_grads.buffers]
