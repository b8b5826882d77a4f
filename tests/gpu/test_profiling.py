"""What only a GPU shows of onepass.profile: kernels and their launches, streams, graphs, waits, ceilings."""

import json

import pytest
import torch
from gpu.calls import captured, memory_goes_back  # noqa: F401
from torch import nn
from torch.nn import functional as F

import onepass
from onepass import cli
from onepass.profiling.record import gpu_in_use
from onepass.runtime.ceilings import measure_ceilings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def ceilings():
    return measure_ceilings(torch.device("cuda"))


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def row(found, name):
    return next(row for row in found.rows if row.name == name)


def test_a_large_addition_is_bandwidth_bound(ceilings):
    x, y = randn(8192, 16384), randn(8192, 16384)
    found = onepass.profile(lambda: x + y, ceilings=ceilings)
    add = row(found, "aten::add")
    assert gpu_in_use()
    assert found.on_gpu
    assert found.device == torch.cuda.get_device_name()
    assert found.verdict == "bandwidth-bound"
    assert add.bytes == 3 * 2 * 8192 * 16384
    assert 0.7 < add.of_copy < 1.2
    assert (add.calls, sum(add.kernels.values())) == (1, 1)
    assert found.kernels == found.launches == 1
    assert found.busy_us == pytest.approx(found.wall_us, rel=0.15)
    assert found.peak_bytes >= 2 * 8192 * 16384  # the result


def test_a_large_product_is_compute_bound(ceilings):
    a, b = randn(8192, 8192), randn(8192, 8192)
    found = onepass.profile(torch.mm, a, b, ceilings=ceilings)
    product = row(found, "aten::mm")
    assert found.verdict == "compute-bound"
    assert product.flops == 2 * 8192**3
    assert 0.7 < product.of_peak < 1.2


def test_small_operators_are_launch_bound_and_a_graph_is_suggested(ceilings):
    x = randn(64, 64)

    def step():
        y = x
        for _ in range(50):
            y = torch.tanh(y + 1)
        return y

    found = onepass.profile(step, ceilings=ceilings)
    assert found.verdict == "launch-bound"
    assert found.kernels == found.launches == 100
    assert found.same_steps
    assert found.waits == 0
    assert found.idle_share > 0.3
    assert found.gap_count > 50
    assert 0.5 < found.launch_us < 100
    assert found.suggestions[0].call == "onepass.fuse(fn, cuda_graph=True)"

    _, graph = captured(step)
    replayed = onepass.profile(graph.replay, ceilings=ceilings)
    assert replayed.launches == replayed.graphs == 1
    assert replayed.kernels == 100
    assert "onepass.fuse(fn, cuda_graph=True)" not in [s.call for s in replayed.suggestions]
    comparison = onepass.compare(found, replayed)
    assert comparison.speedup > 1.2
    assert str(comparison)


def test_a_training_step_with_its_backward(ceilings):
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)).to("cuda", BF16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = randn(4096, 1024)

    def step():
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    found = onepass.profile(step, ceilings=ceilings)
    # Two products forward and three backward, whichever thread launches them.
    assert row(found, "aten::addmm").calls == 2
    assert row(found, "aten::mm").calls == 3
    assert row(found, "aten::mm").flops == 3 * 2 * 4096 * 1024 * 4096
    assert row(found, "aten::native_layer_norm_backward").bytes is not None
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert found.rows_us >= found.busy_us * 0.99
    assert {"onepass.layer_norm(x, weight, ...)", 'onepass.bias_activation(x, bias, "gelu")'} <= {
        s.call for s in found.suggestions
    }


def test_the_loss_of_a_large_vocabulary(ceilings):
    hidden, weight = randn(2048, 1024).requires_grad_(), randn(32000, 1024).requires_grad_()
    labels = torch.randint(0, 32000, (2048,), device="cuda")
    found = onepass.profile(lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels).backward(), ceilings=ceilings)
    calls = [suggestion.call for suggestion in found.suggestions]
    assert "onepass.linear_cross_entropy(hidden, weight, labels)" in calls
    # From the second call on the weight's gradient is added.
    assert any(call.startswith("onepass.linear(x, weight) with weight.main_grad") for call in calls)


def test_kernels_of_ours_are_seen(ceilings):
    x, weight = randn(4096, 4096).requires_grad_(), torch.ones(4096, device="cuda", requires_grad=True)
    found = onepass.profile(lambda: onepass.rms_norm(x, weight).sum().backward(), ceilings=ceilings)
    assert {"_short_kernel", "_long_kernel"} & set(found.kernel_names())  # forward's, short rows or long ones
    assert "onepass.rms_norm(x, weight, ...)" not in [s.call for s in found.suggestions]


def test_streams_at_the_same_time(ceilings):
    a, b = randn(2048, 2048), randn(2048, 2048)
    side = torch.cuda.Stream()

    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.mm(a, b)
        torch.mm(a, b)
        torch.cuda.current_stream().wait_stream(side)

    found = onepass.profile(step, ceilings=ceilings)
    assert len({bar.lane for bar in found.bars if bar.lane.startswith("GPU")}) == 2
    assert found.busy_us <= found.rows_us * 1.001


def test_waiting_for_the_gpu_is_seen(ceilings):
    x = randn(64, 64)

    def step():
        for _ in range(20):
            torch.tanh(x).sum().item()

    found = onepass.profile(step, ceilings=ceilings)
    assert found.waits >= 20
    assert "onepass.fuse(fn, cuda_graph=True)" not in [s.call for s in found.suggestions]
    assert any(row.name.startswith("Memcpy DtoH") for row in found.rows)


def test_a_compiled_function(ceilings):
    x = randn(4096, 4096)
    found = onepass.profile(torch.compile(lambda x: torch.tanh(x + 1) * 2), x, ceilings=ceilings)
    assert found.kernels == found.launches == 1
    assert any(name.startswith("triton_") for name in found.kernel_names())


def test_copies_to_the_gpu(ceilings):
    x = torch.randn(1 << 22).pin_memory()
    found = onepass.profile(lambda: x.to("cuda", non_blocking=True), ceilings=ceilings)
    copy = next(row for row in found.rows if row.name.startswith("Memcpy HtoD"))
    assert copy.bytes == 4 << 22
    assert copy.of_copy is None


def test_ceilings_are_measured_and_memory_goes_back():
    a = randn(1024, 1024)
    before = torch.cuda.memory_allocated()
    found = onepass.profile(torch.mm, a, a, steps=2)
    assert found.limits.copy_gbs > 100
    assert found.limits.tflops["bfloat16"] > 10
    del found
    assert torch.cuda.memory_allocated() - before <= 64 << 20  # cuBLAS's workspaces


def test_picture_and_trace(tmp_path, ceilings):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(50))).to("cuda")
    found = onepass.profile(lambda: model(randn(64, 256, dtype=torch.float32)).sum().backward(), ceilings=ceilings)
    found.picture(tmp_path / "a.png")
    found.trace(tmp_path / "a.json")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert any(event.get("cat") == "kernel" for event in json.loads((tmp_path / "a.json").read_text())["traceEvents"])


def test_a_script(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("""
import torch
weight = torch.randn(512, 512, device="cuda", requires_grad=True)
def train_step(x):
    (x @ weight).square().mean().backward()
for _ in range(40):
    train_step(torch.randn(256, 512, device="cuda"))
""")
    assert cli.main(["profile", "--function", "train_step", "--json", str(tmp_path / "a.json"), str(path)]) == 0
    out = capsys.readouterr().out
    assert "GPU busy" in out
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["on_gpu"]
    assert next(row for row in values["rows"] if row["name"] == "aten::mm")["calls"] == 2
    assert cli.main(["profile", str(path)]) == 0
    assert "one recorded" in capsys.readouterr().out
