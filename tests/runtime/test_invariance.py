"""The checker of equal bits: it finds what depends on other rows, forward and backward, packed too, and nothing else."""

import pytest
import torch
from torch import nn

from onepass.testing import invariance
from onepass.testing.invariance import check_batches, check_packing, fingerprints

ROWS, HIDDEN = 24, 16


class Scaled(nn.Module):
    """Multiplies by a number of each row."""

    def forward(self, x):
        return x * x.square().sum(-1, keepdim=True).rsqrt()


class CentredForward(nn.Module):
    def forward(self, x):
        return x - 1e-6 * x.mean(0)


class _GradientOfTheBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 + 1e-6 * len(dy))


class CentredBackward(nn.Module):
    def forward(self, x):
        return _GradientOfTheBatch.apply(x)


class ByPlace(nn.Module):
    """Adds to each row a number of its place."""

    def forward(self, x):
        return x + torch.arange(len(x), dtype=x.dtype)[:, None]


class Flattened(nn.Module):
    """Routes tokens of sequences, as mixtures do."""

    def __init__(self, wrong):
        super().__init__()
        self.inner = CentredForward() if wrong else Scaled()

    def forward(self, x):
        return self.inner(x.flatten(0, 1)).view_as(x)


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape or (ROWS, HIDDEN), generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_depends_on_rows_alone_is_equal(dtype):
    report = check_batches(nn.Sequential(Scaled(), nn.GELU(), Scaled()), rows(dtype=dtype).requires_grad_())
    assert report and report.looked_at == ["0", "1", "2", ""] and not report.left_out
    assert str(report) == "The same bits in 50 parts, 4 modules."
    report.raise_if_different()


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (CentredForward, "forward"),
        (ByPlace, "forward"),
        (CentredBackward, "backward"),
    ],
    ids=str,
)
def test_the_first_module_that_differs_is_named(wrong, kind):
    report = check_batches(nn.Sequential(Scaled(), wrong(), nn.GELU()), rows(), splits=10)
    assert not report and {(each.kind, each.name) for each in report.differences} == {(kind, "1")}
    what = "result" if kind == "forward" else "input's gradient"
    assert str(report).startswith(f"1: its {what} differs in ") and "of 10 parts, 4 modules differ." in str(report)
    with pytest.raises(AssertionError, match=f"1: its {what} differs"):
        report.raise_if_different()


class WrongOf(nn.Module):
    """Is wrong in parts of so many rows."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        return x * (1 + 1e-6 * (len(x) == self.count))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 33, 64])
def test_few_rows_come_first(count):
    (difference,) = check_batches(WrongOf(count), rows(600, 4), splits=8).differences
    assert difference.of == count
    assert check_batches(WrongOf(count), rows(count + 1, 4), splits=8).differences


def test_without_backward_gradients_are_not_compared():
    assert check_batches(nn.Sequential(Scaled(), CentredBackward()), rows(), splits=3, backward=False)


@pytest.mark.parametrize("wrong", [False, True])
def test_sequences_of_tokens(wrong):
    report = check_batches(nn.Sequential(Flattened(wrong)), rows(6, 5, HIDDEN), splits=5)
    assert bool(report) != wrong and (not wrong or report.differences[0].name == "0.inner")


def test_named_arguments_and_what_has_no_rows():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.table = nn.Embedding(9, HIDDEN), Scaled()

        def forward(self, ids, scale, mask=None):
            return {"logits": self.words(ids) * scale * self.table(torch.ones(7, 3)).sum() * mask[:, None]}

    report = check_batches(Model(), torch.arange(ROWS) % 9, 2.0, mask=torch.ones(ROWS), splits=4)
    assert report and report.left_out == ["table"] and "; not looked at: table" in str(report)


def test_a_weight_that_is_an_argument_is_no_row():
    """One row divides any size."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, HIDDEN), Head()

        def forward(self, ids):
            return self.head(self.words(ids), self.words.weight)

    class Head(nn.Module):
        def forward(self, h, weight):
            return h * weight.sum(0)

    assert check_batches(Tied(), torch.arange(ROWS) % 9, splits=4)


def test_a_table_is_no_row():
    class Table(nn.Module):
        def forward(self, words):
            return words.sum(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.table = nn.Embedding(2 * ROWS, HIDDEN), Table()

        def forward(self, ids):
            return self.words(ids) * self.table(self.words.weight.detach().view(ROWS, 2, HIDDEN).expand(3, -1, -1, -1)).sum()

    assert check_batches(Model(), torch.arange(ROWS), splits=4)


def test_weights_have_no_gradients_left():
    layer = nn.Linear(HIDDEN, 3)
    check_batches(layer, rows(), splits=2)
    assert layer.weight.grad is None and not layer._forward_hooks and not layer._forward_pre_hooks


class Documents(nn.Module):
    """A model of sums over a document's tokens so far, or of all of a row's."""

    def __init__(self, leaks):
        super().__init__()
        self.words, self.sums, self.leaks = nn.Embedding(32, HIDDEN), Scaled(), leaks

    def forward(self, input_ids, position_ids, use_cache):
        x = self.words(input_ids)
        begins = position_ids[0].eq(0).nonzero().flatten().tolist()
        parts = [x] if self.leaks else x.tensor_split(begins[1:], 1)
        return {"logits": self.sums(torch.cat([part.cumsum(1) for part in parts], 1))}


@pytest.mark.parametrize("leaks", [False, True])
def test_documents_packed_and_alone(leaks):
    report = check_packing(Documents(leaks), [torch.arange(length) % 31 for length in (5, 1, 9)])
    assert report.parts == 3 and report.looked_at == ["words", "sums", ""] and bool(report) != leaks
    assert not leaks or [each.part for each in report.differences] == ["document 2 of 3 alone", "document 3 of 3 alone"]
    assert not leaks or report.differences[0].name == "sums"


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=32, **sizes)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    ids = torch.arange(24).view(4, 6) % 31
    for report in (check_packing(model, [*ids]), check_batches(model, splits=3, input_ids=ids)):
        assert {"model.layers.0.self_attn.q_proj", "lm_head", ""} <= {*report.looked_at}
        for each in report.differences:  # products of a CPU may depend on the number of rows
            assert each.rows <= each.of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn], ids=str)
def test_a_fingerprint_has_all_bits_of_a_row(dtype):
    x = rows(3, 33).to(dtype)
    prints = fingerprints(x)
    assert len(set(prints.tolist())) == 3 and torch.equal(prints[1:], fingerprints(x[1:]))
    bits = x.view(invariance._BITS[dtype.itemsize])
    for place in (0, 7, 32):
        for bit in range(8 * dtype.itemsize - 1):
            bits[1, place] ^= 1 << bit
            changed = fingerprints(x)
            assert changed[1] != prints[1] and changed[0] == prints[0] and changed[2] == prints[2]
            bits[1, place] ^= 1 << bit
    swapped = x[:, torch.randperm(33, generator=torch.Generator().manual_seed(1))]
    assert (fingerprints(swapped) != prints).all()


def test_what_it_refuses():
    with pytest.raises(ValueError, match="must have a tensor with at least one row"):
        check_batches(Scaled(), 3)
    with pytest.raises(ValueError, match=r"the result must have 24 rows, but has the shape \(\)"):
        check_batches(Summed(), rows())
    with pytest.raises(ValueError, match=r"at least one token each, but their lengths are \[0\]"):
        check_packing(Scaled(), [torch.zeros(0)])


class Summed(nn.Module):
    def forward(self, x):
        return x.sum()


class Counted(nn.Module):
    """Returns counts of eight kinds before its rows, as mixtures do: with one row they look like a row's."""

    def forward(self, x):
        return x.new_full((8,), len(x)), 2 * x


def test_what_has_no_rows_does_not_change_what_is_compared():
    report = check_batches(nn.Sequential(Counted(), Last()), rows(), splits=6)
    assert report and report.left_out == ["0"]


class Both(nn.Module):
    """Returns what depends on other rows, and then what doesn't."""

    def forward(self, x):
        return CentredForward()(x), x


def test_each_of_several_results_is_compared():
    assert check_batches(nn.Sequential(Both(), Last()), rows(), splits=6).differences[0].name == "0"


class Last(nn.Module):
    def forward(self, results):
        return results[-1]


def test_modules_may_be_left_out():
    model = nn.Sequential(ByPlace(), CentredForward())
    assert check_batches(model, rows(), splits=6).differences[0].name == "0"
    report = check_batches(model, rows(), splits=6, leave_out=("0",))
    assert report.differences[0].name == "1" and report.left_out == ["0"]
