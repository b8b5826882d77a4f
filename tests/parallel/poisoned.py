"""Make buffers of `MainGrads(release=True)` behave in small tests as in large models."""

from contextlib import contextmanager
from unittest.mock import patch

from onepass.gradients import main_grads as module
from onepass.gradients import releasable_storage as released


@contextmanager
def poisoned(large=64, buffer=4096):
    """Lower the sizes of large gradients and of buffers to these bytes, and fill unwritten memory with NaN."""
    fill = released.ReleasableBuffer._fill

    def filled(self):
        fill(self)
        for unwritten in self._unwritten.values():
            unwritten.fill_(float("nan"))

    with (
        patch.object(released.ReleasableBuffer, "_fill", filled),
        patch.object(released, "_LARGE", large),
        patch.object(module, "RELEASED_BYTES", buffer),
    ):
        yield


def have_memory(main_grads):
    """Return for each buffer whether it has memory."""
    return [bool(buffer.untyped_storage().nbytes()) for buffer in main_grads.buffers]
