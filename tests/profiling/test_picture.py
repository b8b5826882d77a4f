"""Timelines: that they are drawn, legible and in reasonable time, from no kernel to thousands."""

import importlib.util
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling.made import Made, launch_bound, matrix_products, tensor

import onepass
from onepass.profiling import picture
from onepass.profiling.timeline import PictureBar


def size(path):
    """Width and height of a PNG, from its header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def many(count):
    made = Made()
    made.steps((0, 10.0 * count))
    for i in range(count):
        made.op("aten::tanh", 10 * i, 8, tensor(16))
        made.kernel("tanh", 10 * i + 2, 10 * i + 9, 6, stream=7 + i % 2)
    made.copy("Memcpy DtoH (Device -> Pinned)", 10 * count - 1, 10 * count + 5, 50, 100)
    return made


def texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts] + [text.get_text() for text in figure.texts]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    from matplotlib.figure import Figure

    found = []
    kept = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (found.append(self), kept(self, *args, **kw))[1])
    return found


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_a_picture(count, tmp_path):
    path = tmp_path / "new" / "a.png"
    profile = many(count).profile() if count else Made().profile()
    start = time.process_time()
    profile.picture(path)
    assert time.process_time() - start < 20
    width, height = size(path)
    assert width == 1690
    assert 150 < height < 600


def test_lanes_cpu_above_gpu(tmp_path, figures):
    many(5).profile().picture(tmp_path / "a.png")
    (axis,) = figures[0].axes
    lanes = [label.get_text() for label in axis.get_yticklabels()]
    assert lanes == ["CPU thread 1", "CPU thread 1 launches", "GPU 0 stream 7", "GPU 0 stream 8"]
    assert "tanh" in texts(figures[0])
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == ["operator", "launch", "other kernel", "copy or fill", "nobody works"]


def test_gaps_are_shaded_and_named(tmp_path, figures):
    launch_bound(kernels=3).profile().picture(tmp_path / "a.png")
    assert texts(figures[0]).count("9 us") == 2


def test_matrix_products_have_a_colour_of_their_own(tmp_path, figures):
    matrix_products().profile().picture(tmp_path / "a.png")
    assert "matrix product" in [text.get_text() for text in figures[0].legends[0].get_texts()]


def test_only_the_last_step_is_drawn():
    bars = launch_bound(steps=3, kernels=4).profile().bars
    shown = picture._last_step(bars)
    assert {bar.step for bar in shown} == {2}
    assert len([bar for bar in shown if bar.kind == "kernel"]) == 4
    assert min(bar.start for bar in shown) == 0


def test_two_on_one_axis(tmp_path, figures):
    comparison = onepass.compare(many(100).profile(), many(10).profile())
    comparison.picture(tmp_path / "a.png")
    first, second = figures[0].axes
    assert first.get_xlim() == second.get_xlim() == (0, 1055)
    assert first.get_position().y0 > second.get_position().y1
    assert any(text.startswith("before: ") for text in texts(figures[0]))
    assert size(tmp_path / "a.png")[1] > 400


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)).map(lambda p: (p[0], p[0] + p[1])), max_size=40))
def test_thin_bars_are_as_dense_as_the_time_they_cover(pairs):
    parts = picture.density(pairs, 8.0)
    covered = {at for start, end in pairs for at in range(start, end)}
    assert sum(parts.values()) * 8 == pytest.approx(len(covered))
    for i, part in parts.items():
        assert part == pytest.approx(len(covered & set(range(8 * i, 8 * i + 8))) / 8)


def test_long_names_are_cut_to_their_bar(tmp_path, figures):
    bars = [PictureBar("GPU 0 stream 7", "a_name_that_is_much_longer_than_its_bar" * 3, 0, 100, "kernel", 0)]
    bars += [PictureBar("GPU 0 stream 7", "next", 100, 1000, "kernel", 0)]
    from dataclasses import replace

    replace(launch_bound().profile(), bars=tuple(bars)).picture(tmp_path / "a.png")
    cut = next(text for text in texts(figures[0]) if text.startswith("a_name"))
    assert cut.endswith("…")
    assert len(cut) <= 100 / 1000 * picture._PIXELS / picture._LETTER


def test_a_wrong_suffix():
    with pytest.raises(ValueError, match=r"path must end in .png, .svg or .pdf, but is 'a.gif'"):
        launch_bound().profile().picture("a.gif")


def test_without_matplotlib(monkeypatch, tmp_path):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else known(name))
    with pytest.raises(ImportError, match=r"pip install '.\[bench\]'"):
        launch_bound().profile().picture(tmp_path / "a.png")
