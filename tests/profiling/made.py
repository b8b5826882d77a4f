"""Hand-made traces in torch.profiler's format. Without a GPU they are the only traces that have kernels."""

import json

from onepass.profiling.record import Timing, described
from onepass.profiling.trace import STEP, WINDOW
from onepass.runtime.ceilings import Ceilings

CEILINGS = Ceilings(copy_gbs=1000.0, copy_bytes=1 << 30, matmul_tflops=100.0)


def tensor(*shape, dtype="float", strides=None):
    if strides is None:
        strides, step = [], 1
        for n in reversed(shape):
            strides.insert(0, step)
            step *= n
    return {"dims": list(shape), "type": dtype, "strides": list(strides), "value": ""}


def number(value):
    return {"dims": [], "type": "Scalar", "strides": [], "value": str(value)}


def numbers(text):
    return {"dims": [], "type": "ScalarList", "strides": [], "value": text}


NOTHING = {"dims": [], "type": "", "strides": [], "value": ""}


class Made:
    def __init__(self):
        self.events = []
        self._correlation = 0

    def _add(self, cat, name, start, us, pid, tid, **args):
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": us, "args": args})

    def op(self, name, start, us, *inputs, thread=1):
        named = {"Input Dims": "dims", "Input type": "type", "Input Strides": "strides", "Concrete Inputs": "value"}
        args = {key: [given[short] for given in inputs] for key, short in named.items()}
        self._add("cpu_op", name, start, us, 100, thread, **args)

    def mark(self, name, start, us):
        self._add("user_annotation", name, start, us, 100, 1)

    def call(self, name, at, us=2.0, thread=1, cat="cuda_runtime", correlation=0):
        self._add(cat, name, at, us, 100, thread, correlation=correlation)

    def kernel(self, name, at, start, us, *, launch="cudaLaunchKernel", thread=1, stream=7, device=0, cat="kernel", **args):
        """Add a kernel and its launch at `at`. A launch of None adds no launch, as for further kernels of a CUDA graph."""
        if launch is not None:
            self._correlation += 1
            driver = "cuda_driver" if launch.startswith("cu") and not launch.startswith("cuda") else "cuda_runtime"
            self.call(launch, at, thread=thread, cat=driver, correlation=self._correlation)
        self._add(cat, name, start, us, device, stream, device=device, stream=stream, correlation=self._correlation, **args)

    def copy(self, name, at, start, us, count):
        self.kernel(name, at, start, us, launch="cudaMemcpyAsync", cat="gpu_memcpy", bytes=count)

    def steps(self, *starts_and_us):
        first, last = starts_and_us[0], starts_and_us[-1]
        self.mark(WINDOW, first[0] - 1, last[0] + last[1] - first[0] + 2)
        for start, us in starts_and_us:
            self.mark(STEP, start, us)

    def data(self):
        return {"deviceProperties": [{"id": 0, "name": "Some GPU"}], "traceEvents": self.events}

    def profile(self, wall=100.0, host=90.0, ceilings=CEILINGS, peak=None, ignored=0.0):
        """Return the profile of the trace. `wall` and `host` are the times without the profiler."""
        return described(json.dumps(self.data()).encode(), Timing((wall,), (host,), peak), ceilings, ignored)


def launch_bound(steps=2, kernels=10):
    """Return a trace of kernels of 1 us, one every 10 us."""
    made = Made()
    made.steps(*((1000.0 * i, 10.0 * kernels) for i in range(steps)))
    for i in range(steps):
        for j in range(kernels):
            at = 1000.0 * i + 10 * j
            made.op("aten::tanh", at, 8, tensor(16, 16))
            made.kernel("void at::native::vectorized_elementwise_kernel<4, tanh_kernel_cuda>(int)", at + 2, at + 6, 1.0)
    return made


def matrix_products(dtype="c10::BFloat16", us=1000.0):
    """Return a trace of two products of 1024 x 1024 x 1024 back to back: 2.147 GFLOP each, 21.5 us at 100 TFLOP/s."""
    made = Made()
    made.steps((0.0, 50.0))
    for i in range(2):
        made.op("aten::mm", 20.0 * i, 10, tensor(1024, 1024, dtype=dtype), tensor(1024, 1024, dtype=dtype))
        made.kernel("nvjet_tst_128x256", 20.0 * i + 2, 30 + us * i, us)
    return made
