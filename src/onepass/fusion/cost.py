"""Whether a fusion pays: launches saved against bytes copied, at the measured speed of this machine."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onepass.runtime.ceilings import clock_for, copy_bandwidth

_COPIED = 64 << 20  # bytes of the measured copy. A GPU's caches hold less
_SMALL = 4  # times launch_us. Longer operators gain nothing from a kernel of many parts, and may lose


@dataclass(frozen=True)
class LaunchCost:
    """Measured costs. `bytes_per_us`: bytes that a copy reads and writes. `launch_us`: time to start a small operator."""

    bytes_per_us: float
    launch_us: float

    def pays(self, launches_saved: int, bytes_copied: int) -> bool:
        return bytes_copied == 0 or self.copy_us(bytes_copied) < launches_saved * self.launch_us

    def small(self, moved: int) -> bool:
        """Whether the launch, not the bytes, dominates the time of an operator that moves this many bytes."""
        return moved / self.bytes_per_us < _SMALL * self.launch_us

    def copy_us(self, copied: int) -> float:
        """Return the time of a copy. It reads and writes each byte, and is a launch itself."""
        return 2 * copied / self.bytes_per_us + self.launch_us

    def predicted_us(self, launches: int, moved: int) -> float:
        """Return the time of operators one after another: the longer of all launches and all bytes."""
        return max(launches * self.launch_us, moved / self.bytes_per_us)


@functools.cache
def machine_of(device: torch.device) -> LaunchCost:
    """Measure a device, once per process, in some tens of milliseconds."""
    with unset_fake_temporarily(), torch.no_grad():
        clock = clock_for(device)
        small = torch.zeros(16, device=device)
        launch_us = clock.host_us(lambda: small.add_(1.0))
        return LaunchCost(copy_bandwidth(clock, _COPIED) * 1e3, launch_us)
