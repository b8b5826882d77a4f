"""TRL's trainers with its fused head replaced, beside TRL as it is."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

pytest.importorskip("trl", minversion="1.14", reason="needs trl")
pytest.importorskip("datasets", reason="needs datasets")
pytest.importorskip("accelerate", reason="needs accelerate")

import trl.trainer.utils as trl_utils
from accelerate.state import AcceleratorState
from integrations.trl_runs import TRAINERS, new_model, new_trainer, train

import onepass
from onepass.integrations import huggingface
from onepass.integrations import trl as onepass_trl
from onepass.integrations.huggingface import linears
from onepass.integrations.seams import SeamError
from onepass.runtime.batch_invariance import invariant

pytestmark = pytest.mark.filterwarnings("default")  # TRL's, transformers' and accelerate's own

every_trainer = pytest.mark.skipif(
    not hasattr(trl_utils, "add_fused_lm_head"), reason="TRL before 1.15 makes logits here, without Liger"
)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


LogProbs = onepass_trl.LogProbFunction(None)


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process


@contextmanager
def installed(**options):
    seams = onepass_trl.install(**options)
    try:
        yield seams
    finally:
        seams.undo()


@pytest.fixture
def calls(monkeypatch):
    """What the function in place of TRL's was asked for."""
    asked = []
    apply = onepass_trl.LogProbFunction.apply

    def counted(self, *args, **options):
        asked.append(args[-1])
        return apply(self, *args, **options)

    monkeypatch.setattr(onepass_trl.LogProbFunction, "apply", counted)
    return asked


def run(name, out, family="llama", peft=None, **options):
    model = new_model(family)
    return train(new_trainer(name, model, out, reference=new_model(family), peft=peft, **options))


def assert_alike(found, expected):
    assert len(found) == len(expected) == 3
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=2e-5)


@every_trainer
@pytest.mark.parametrize("name", TRAINERS)
def test_three_steps(name, tmp_path, calls):
    before = run(name, tmp_path)
    assert not calls
    with installed():
        assert_alike(run(name, tmp_path), before)
    assert len(calls) >= 3
    assert_alike(run(name, tmp_path), before)


@every_trainer
def test_mean_logits_under_a_softcap(tmp_path, calls):
    """DPO on Gemma 2 logs them."""
    before = run("DPO", tmp_path, "gemma2")
    with installed():
        assert_alike(run("DPO", tmp_path, "gemma2"), before)
    assert all("mean_logits" in asked for asked in calls[::2])


@every_trainer
def test_log_sum_sq_probs(tmp_path, calls):
    """WPO weighs by them."""
    before = run("DPO", tmp_path, use_weighting=True)
    with installed():
        assert_alike(run("DPO", tmp_path, use_weighting=True), before)
    assert any("log_sum_sq_probs" in asked for asked in calls)


@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("lora", (False, True))
@pytest.mark.parametrize(("name", "when"), (("SFT", "before"), ("GRPO", "after")))
def test_with_huggingface_apply(name, bf16, lora, when, tmp_path):
    peft = pytest.importorskip("peft").LoraConfig(**LORA) if lora else None
    before = run(name, tmp_path, peft=peft, bf16=bf16)
    model = new_model()
    applied = huggingface.apply(model) if when == "before" else None
    trainer = new_trainer(name, model, tmp_path, peft=peft, bf16=bf16)
    applied = applied or huggingface.apply(trainer.model)
    with installed():
        found = train(trainer)
    if bf16:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(before), rtol=2e-2, atol=2e-2)
    else:
        assert_alike(found, before)
    applied.undo()
    assert not [name for name, module in trainer.model.named_modules() if "_onepass" in vars(module)]
    assert len(train(trainer)) >= 3  # TRL's wrapper is still there


@pytest.mark.parametrize(("name", "options"), [("SFT", {}), ("DPO", {}), ("GRPO", {"beta": 0.1})])
@pytest.mark.parametrize("when", ("before", "after"))
def test_adapters_of_all_layers(name, options, when, tmp_path, monkeypatch):
    """A reference's log-probabilities are those of the model with its adapters disabled."""
    peft = pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    before, adapters = run(name, tmp_path, peft=peft, **options), []
    stock = linears.norm_linear
    monkeypatch.setattr(linears, "norm_linear", lambda *args, lora, **kw: adapters.append(lora) or stock(*args, lora=lora, **kw))
    model = new_model()
    applied = huggingface.apply(model) if when == "before" else None
    trainer = new_trainer(name, model, tmp_path, peft=peft, **options)
    applied = applied or huggingface.apply(trainer.model)
    with installed():
        assert_alike(train(trainer), before)
    assert {len(lora or ()) for lora in adapters} == ({2, 3} if name == "SFT" else {0, 2, 3})
    assert not [row for row in applied.left if row.part != "loss"]


@every_trainer
@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("lora", (False, True))
@pytest.mark.parametrize("when", ("before", "after"))
def test_the_report_says_whose_head_runs(bf16, lora, when, tmp_path):
    peft = pytest.importorskip("peft").LoraConfig(**LORA) if lora else None
    model = new_model()
    applied = huggingface.apply(model) if when == "before" else None
    trainer = new_trainer("SFT", model, tmp_path, peft=peft, bf16=bf16)
    applied = applied or huggingface.apply(trainer.model)
    train(trainer)  # accelerate wraps the forward once more
    assert "trl.install() replaces" in reason(applied)
    assert [row.name.rpartition(".")[2] for row in applied.left if row.part == "loss"] == ["lm_head"]
    with installed():
        assert reason(applied) == "TRL's trainers run its fused head, by linear_cross_entropy too"
    assert "trl.install() replaces" in reason(applied)


def reason(applied):
    (row,) = [row for row in applied.rows if row.part == "loss" and row.by != "embedding"]
    return row.why


def test_the_report_of_a_model_that_trl_has_not(tmp_path):
    with installed():
        assert reason(huggingface.apply(new_model())) is None


# ---- the function ----


def oracle(hidden, weight, bias, targets, temperature, softcap, scale):
    """In fp64, by logits."""
    z = (hidden @ weight.T + (0 if bias is None else bias)) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(-1)
    return (
        log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1), (2 * log_p).logsumexp(-1),
        z.mean(-1), z.argmax(-1) == targets,
    )  # fmt: skip


def operands(dtype=torch.float32, rows=29):
    hidden, weight, bias = (torch.randn(*size) for size in ((rows, 16), (67, 16), (67,)))
    return *(t.to(dtype).requires_grad_() for t in (hidden, weight, bias)), torch.randint(67, (rows,))


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize(("temperature", "softcap", "scale"), [(1.0, None, 1.0), (0.7, 3.0, 1.0), (1.3, 5.0, 0.5)])
@pytest.mark.parametrize("with_bias", (False, True))
def test_the_function_is_the_formula(backend, temperature, softcap, scale, with_bias):
    if backend == "triton":
        pytest.importorskip("triton")
    hidden, weight, bias, targets = operands()
    bias = bias if with_bias else None
    given = [t for t in (hidden, weight, bias) if t is not None]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    with onepass.use_backend(backend):
        found = LogProbs.apply(hidden, weight, bias, targets, temperature, 32, softcap, scale)
        (2 * found[0] + 0.5 * found[1]).sum().backward()
    expected = oracle(*wide, targets, temperature, softcap, scale)
    (2 * expected[0] + 0.5 * expected[1]).sum().backward()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)
    assert found[4].dtype is torch.bool and not any(found[at].requires_grad for at in (2, 3, 4))
    for mine, theirs in zip(given, [t for t in wide if t is not None], strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for():
    hidden, weight, _, targets = operands()
    assert [value is not None for value in LogProbs.apply(hidden, weight, None, targets, 1.0, 32, None, 1.0, ("is_top1",))] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert LogProbs.apply(hidden[:0], weight, None, targets[:0], 1.0, 32)[1].shape == (0,)


def test_products_have_hiddens_type():
    hidden, weight, bias, targets = operands()
    found = LogProbs.apply(hidden.bfloat16(), weight, bias, targets, 1.0, 32)
    expected = LogProbs.apply(*(t.bfloat16() for t in (hidden, weight, bias)), targets, 1.0, 32)
    assert torch.equal(found[0], expected[0])
    found[0].sum().backward()
    assert weight.grad.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(LogProbs.apply(hidden, weight, bias, targets, 1.0, 32)[0], expected[0])


def test_the_gradient_is_added_to_main_grad():
    hidden, weight, _, targets = operands()
    LogProbs.apply(hidden, weight, None, targets, 1.0, 32)[0].sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones_like(weight)
    LogProbs.apply(hidden, weight, None, targets, 1.0, 32)[0].sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + expected)


class Stock:
    """TRL 1.14's function, or a later one's, as far as ours looks at it."""

    @staticmethod
    def apply(*args):
        return args


class Pair(Stock):
    @staticmethod
    def forward(ctx, last_hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0):
        """Return log-probabilities and entropies."""


class Many(Stock):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs):
        """Return what `outputs` names."""


def test_trl_1_14_takes_a_pair():
    hidden, weight, _, targets = operands()
    pair = onepass_trl.LogProbFunction(Pair).apply(hidden, weight, None, targets, 0.7, 32, 3.0, 2.0)
    assert len(pair) == 2
    for mine, theirs in zip(pair, LogProbs.apply(hidden, weight, None, targets, 0.7, 32, 3.0, 2.0)[:2], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("stock", "more"), [(Pair, ()), (Many, (("entropy",),))])
def test_weights_of_zero_3_are_trls(stock, more):
    hidden, weight, _, targets = operands()
    weight.ds_id = 0
    given = hidden, weight, None, targets, 0.7, 32, 3.0, 2.0, *more
    assert onepass_trl.LogProbFunction(stock).apply(*given) == given


def test_an_fp32_head():
    """The log-probabilities are those of bf16 operands multiplied in fp64."""
    hidden, weight, bias, targets = operands(torch.bfloat16)
    given = hidden, weight, bias, targets, 0.7, 32
    expected = oracle(*(t.double() for t in (hidden, weight, bias)), targets, 0.7, None, 1.0)
    errors = []
    for fp32_head in (False, True):
        with installed(fp32_head=fp32_head):
            found = trl_utils._ChunkedLogProbFunction.apply(*given)
        errors.append((found[0] - expected[0]).abs().max().item())
    assert errors[1] < 1e-5 and errors[0] > 1e-3
    weight.ds_id = 0
    with installed(fp32_head=True), pytest.raises(ValueError, match=r"fp32_head must be False under DeepSpeed ZeRO-3"):
        trl_utils._ChunkedLogProbFunction.apply(*given)


# ---- equal bits ----


def completions():
    """Rows of several lengths, padded on both sides: input_ids, attention_mask, and how many columns a completion has."""
    ids = torch.randint(3, 64, (5, 11), generator=torch.Generator().manual_seed(3))
    prompts, answers = torch.tensor([[5, 2, 4, 1, 3], [6, 3, 1, 6, 4]])
    columns = torch.arange(11)
    mask = (columns >= 5 - prompts[:, None]) & (columns < 5 + answers[:, None])
    return torch.where(mask, ids, 0), mask.long(), 6


@every_trainer
@pytest.mark.parametrize("lora", (False, True))
def test_log_probabilities_do_not_depend_on_the_microbatch(lora, tmp_path):
    """Of the policy, and of its reference: a copy, or the model with its adapters disabled."""
    peft = pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    trainer = new_trainer("GRPO", new_model(), tmp_path, peft=peft)
    reference = trainer.model if lora else new_model().eval()
    if not lora:
        trl_utils.add_fused_lm_head(reference, outputs=("log_probs", "entropy"))
    applied = [
        huggingface.apply(model, batch_invariant=True) for model in {id(m): m for m in (trainer.model, reference)}.values()
    ]

    def computed(model, size):
        return trainer._get_per_token_logps_and_entropies(model, *completions(), batch_size=size, compute_entropy=True)[:2]

    try:
        with installed(batch_invariant=True), torch.no_grad():
            for model in (trainer.model.train(), trainer.model.eval(), reference):
                with model.disable_adapter() if lora and model is reference else nullcontext():
                    whole = computed(model, 5)
                    for size in (1, 2, 3):
                        assert all(map(torch.equal, computed(model, size), whole))
    finally:
        for each in applied:
            each.undo()
    assert not invariant()


@every_trainer
def test_a_run_by_the_switch(tmp_path):
    before = run("SFT", tmp_path)
    with installed(batch_invariant=True) as seams:
        assert invariant() and "onepass.batch_invariant(): on, of the process" in str(seams)
        assert_alike(run("SFT", tmp_path), before)
    assert not invariant()


def test_zero_3_has_no_equal_bits():
    hidden, weight, _, targets = operands()
    weight.ds_id = 0
    with installed(batch_invariant=True), pytest.raises(RuntimeError, match="the head under DeepSpeed ZeRO-3 can't run under"):
        trl_utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 0.7, 32)


# ---- install and undo ----


def test_the_report():
    with installed() as seams:
        said = str(seams)
    assert "trainer.utils._ChunkedLogProbFunction: onepass.integrations.trl.LogProbFunction" in said and "ZeRO-3" in said


def test_install_twice_and_undo_twice():
    stock = trl_utils._ChunkedLogProbFunction
    seams = onepass_trl.install()
    ours = trl_utils._ChunkedLogProbFunction
    with pytest.raises(SeamError, match=r"_ChunkedLogProbFunction of trl 1.* is onepass's already.*undo\(\)"):
        onepass_trl.install()
    assert trl_utils._ChunkedLogProbFunction is ours
    seams.undo()
    assert trl_utils._ChunkedLogProbFunction is stock
    with pytest.raises(SeamError, match="undone already"):
        seams.undo()


def test_undo_in_another_order(monkeypatch):
    with installed() as seams, monkeypatch.context() as other:
        other.setattr(trl_utils, "_ChunkedLogProbFunction", Many)
        with pytest.raises(SeamError, match=r"_ChunkedLogProbFunction of trl 1.* to .*Many: undo that first"):
            seams.undo()


def test_a_name_that_moved(monkeypatch):
    monkeypatch.delattr(trl_utils, "_ChunkedLogProbFunction")
    with pytest.raises(SeamError, match=r"trl 1.* has no trl\.trainer\.utils\._ChunkedLogProbFunction"):
        onepass_trl.install()


def test_other_arguments(monkeypatch):
    """As before TRL 1.14."""

    class Older(Stock):
        @staticmethod
        def forward(ctx, last_hidden, weight, targets, temperature, chunk_size):
            """Return log-probabilities and entropies."""

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Older)
    with pytest.raises(SeamError, match=r"takes \(weight, targets, temperature, chunk_size\) after the hidden states.*1\.14"):
        onepass_trl.install()
    assert trl_utils._ChunkedLogProbFunction is Older
