"""What notebooks show of results: tables whose text is escaped, without colours of their own."""

from html.parser import HTMLParser

import pytest
import torch
from profiling.made import launch_bound
from rich.markup import escape
from rich.table import Table

import onepass
from onepass.fusion.cost import LaunchCost
from onepass.fusion.report import FusedGroup, FusionReport, GraphReport, OperatorWork, UnfusedGroup
from onepass.runtime.notebook import html_report


class Read(HTMLParser):
    """The cells of each row, the lines outside of tables, and whether every tag is closed."""

    def __init__(self, html):
        super().__init__()
        self.open, self.rows, self.lines, self.caption = [], [], [], None
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in ("div", "table", "caption", "thead", "tbody", "tr", "th", "td")
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data
        elif self.open[-1] == "caption":
            self.caption = data
        else:
            self.lines.append(data)


def test_text_is_escaped_and_markup_goes():
    table = Table("<name>", title="a & b")
    table.add_column("us", justify="right")
    table.add_row(escape("x[0] <script>"), "[bold]1.0[/]")
    html = html_report("[dim]1 < 2[/]", table)
    assert "<script>" not in html
    read = Read(html)
    assert (read.caption, read.lines) == ("a & b", ["1 < 2"])
    assert read.rows == [["<name>", "us"], ["x[0] <script>", "1.0"]]
    assert html.count("text-align: right") == 2


def test_the_pages_own_colours_are_kept():
    table = Table("name", title="title")
    table.add_row("x")
    styles = html_report("line", table)
    assert "color" not in styles and "background" not in styles


def test_an_explanation():
    html = onepass.explain(onepass.rms_norm, torch.ones(4, dtype=torch.float64))._repr_html_()
    read = Read(html)
    assert read.caption == "rms_norm: torch (auto, because x is torch.float64)"
    assert read.rows[0] == ["backend", "this call"] and ["torch", "can run it"] in read.rows
    assert read.lines[0].startswith("runs: ")


@pytest.mark.parametrize("compared", (False, True))
def test_a_profile_and_two(compared):
    profile = launch_bound().profile()
    read = Read((onepass.compare(profile, profile) if compared else profile)._repr_html_())
    if compared:
        assert read.rows[0] == ["a step", "before", "after", "before / after"]
        assert next(row for row in read.rows if row[0] == "wall") == ["wall", "100 us", "100 us", "1.00 x"]
        return
    assert read.rows[0][:2] == ["operator, or kernel without one", "calls"]
    assert [row[0] for row in read.rows] == [read.rows[0][0], profile.rows[0].name, "all", *_advised(profile)]
    assert any(line.startswith("launch-bound: ") for line in read.lines)


def _advised(profile):
    return ["of onepass would apply", *(suggestion.call for suggestion in profile.suggestions)] if profile.suggestions else []


def test_what_fuse_has_found():
    report = FusionReport([])
    assert Read(report._repr_html_()).lines == ["onepass.fuse: nothing compiled yet. Call the function first."]
    work = OperatorWork(60, 1 << 10)
    found, refused = FusedGroup("tanh", 16, "stack[0]", 0), UnfusedGroup("mm", 2, "why[/x]")
    report.graphs.append(GraphReport([found], [refused], work, work, LaunchCost(1.0, 1.0), 0.5, backward=True))
    read = Read(report._repr_html_())
    assert read.rows[:2] == [["operator", "became one", "groups", "how", "copied"], ["tanh", "16", "1", "stack[0]", "nothing"]]
    assert read.rows[2:] == [["operator", "times", "why"], ["mm", "2", "why[/x]"]]
    assert read.lines[0].startswith("operators 60 -> 60, bytes")
    assert "why[/x]" in str(report) and "stack[0]" in str(report)


def test_what_apply_has_done():
    transformers = pytest.importorskip("transformers")
    from onepass.integrations import huggingface

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    applied = huggingface.apply(transformers.LlamaForCausalLM(config))
    read = Read(applied._repr_html_())
    assert read.caption == "onepass in LlamaForCausalLM"
    assert read.rows[0] == ["", "class", "part", "by", "left, because"]
    assert ["lm_head", "Linear", "loss", "linear_cross_entropy", ""] in read.rows


def test_names_in_brackets_are_no_markup():
    pytest.importorskip("transformers")
    from onepass.integrations.huggingface.applied import Applied
    from onepass.integrations.huggingface.patches import AppliedRow, Patches

    model = type("Model[bf16]", (torch.nn.Linear,), {})(1, 1)
    left = AppliedRow("layer[/x]", "MLP[bf16]", "mlp", None, "its forward is [/x]")
    applied = Applied(model, Patches(), [left, AppliedRow("norm", "MLP[bf16]", "norm", "norm[0]")])
    read = Read(applied._repr_html_())
    assert read.caption == "onepass in Model[bf16]"
    assert read.rows[1:] == [
        ["layer[/x]", "MLP[bf16]", "mlp", "", "its forward is [/x]"], ["norm", "MLP[bf16]", "norm", "norm[0]", ""],
    ]  # fmt: skip
    narrow = html_report(applied.table(narrow=True))
    for shown in (str(applied), narrow):
        assert all(text in shown for text in ("Model[bf16]", "layer[/x]", "MLP[bf16]", "norm[0]", "is [/x]"))
