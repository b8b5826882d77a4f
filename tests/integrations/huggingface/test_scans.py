"""Mamba 2's scan in models, by `onepass.mamba_chunk_scan`: the same numbers, documents apart, and what is left."""

import copy
import pickle
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import VOCABULARY, assert_alike, assert_documents_are_apart, batch, made, mutant_of, step
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.integrations.huggingface import mixers, scans
from onepass.integrations.huggingface.scans import SCAN, WHOLE_MIXER, declines, is_scan, scan_of

if not hasattr(modeling, SCAN):
    pytest.skip(f"transformers' models have no {SCAN}", allow_module_level=True)
stock = getattr(modeling, SCAN).__wrapped__
HYBRIDS = ("NemotronH", "GraniteMoeHybrid", "FalconH1", "Mamba2", "Bamba", "Zamba2")
BOTH = "causal_conv1d, mamba_chunk_scan"
LENGTHS = (7, 5, 1, 70)
MAMBA_ONLY = {"layer_types": ["mamba", "mamba"]}  # its attention gets no documents


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def _changed(**changes):
    return lambda *a, **given: stock(*a, **given | {name: change(given.get(name)) for name, change in changes.items()})


NEARLY = {
    "no decay": lambda x, dt, A, *a, **given: stock(x, dt, 0 * A, *a, **given),
    "B for C": lambda x, dt, A, B, C, **given: stock(x, dt, A, C, B, **given),
    "groups in turn": lambda x, dt, A, B, C, **given: stock(x, dt, A, B.repeat(1, 1, 2, 1), C.repeat(1, 1, 2, 1), **given),
    "no D": _changed(D=lambda _: None),
    "no bias": _changed(dt_bias=lambda _: None),
    "no softplus": _changed(dt_softplus=lambda _: False),
    "softplus always": _changed(dt_softplus=lambda _: True),
    "no limits": _changed(dt_limit=lambda _: (0.0, float("inf"))),
    "no states": _changed(initial_states=lambda _: None),
    "final states always": _changed(return_final_states=lambda _: True),
    "never final states": _changed(return_final_states=lambda _: False),
    "states transposed": lambda *a, **k: y if isinstance(y := stock(*a, **k), torch.Tensor) else (y[0], y[1].mT),
    "other arguments": lambda x, dt, A, B, C, chunk_size: stock(x, dt, A, B, C, chunk_size),
}


def test_what_is_the_scan():
    assert is_scan(stock)


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_the_scan(name):
    assert not is_scan(NEARLY[name])


def test_a_function_that_is_another_is_the_models_own(monkeypatch):
    monkeypatch.setattr(modeling, SCAN, NEARLY["no decay"])
    rows = [row for row in huggingface.apply(made("GraniteMoeHybrid")).rows if row.kind.endswith("MambaLayer")]
    assert {row.why or row.by for row in rows} == {f"its {SCAN} computes something else", "causal_conv1d"}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_calls_it(family, monkeypatch):
    calls, ours = [], scans.mamba_chunk_scan
    monkeypatch.setattr(scans, "mamba_chunk_scan", lambda *a, **k: calls.append(1) or ours(*a, **k))
    model = made(family)
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    rows = [row for row in applied.rows if row.by == BOTH]
    calls.clear()  # of trials
    for given in (batch(), batch(masked=True)):
        assert_alike(step(model, **given), step(before, **given))
    assert len(calls) == 2 * len(rows) and rows
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(step(other, **batch()), step(before, **batch()))
    calls.clear()
    applied.undo()
    step(model, **batch())
    assert not calls


@pytest.mark.parametrize("family", HYBRIDS[:1])
def test_compiled_as_one_graph(family):
    model = made(family)
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    given = batch() | {"use_cache": False}
    torch.compiler.reset()
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **given), step(before, **given))


@pytest.mark.parametrize("family", ("GraniteMoeHybrid", "NemotronH", "FalconH1"))
def test_in_bf16_by_kernels_it_is_as_near(family, monkeypatch):
    by_formula = partial(scans.mamba_chunk_scan, backend="torch")  # whose kernels are wheels', and want a GPU
    monkeypatch.setattr(scans, "mamba_chunk_scan", by_formula)
    model = made(family)
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    given = batch() | {"use_cache": False}
    exact = step(before, **given)
    with onepass.use_backend("triton"):
        found = step(model.bfloat16(), **given)
    plain = step(before.bfloat16(), **given)

    def error(result):
        return sum((result[1][name].float() - grad).square().sum() for name, grad in exact[1].items()).sqrt()

    assert error(found) < 1.25 * error(plain)


# ---- documents, and states ----


@pytest.mark.parametrize(
    ("family", "options"),
    [("FalconH1", {}), ("NemotronH", {}), ("Bamba", {}), ("GraniteMoeHybrid", MAMBA_ONLY)],
)
def test_documents_are_apart(family, options):
    assert_documents_are_apart(family, LENGTHS, 1e-4, **options)


@pytest.mark.parametrize("family", ("GraniteMoeHybrid", "FalconH1", "Mamba2"))
def test_a_prompt_s_states_are_the_model_s(family):
    model = made(family).eval()
    ids = torch.randint(3, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    huggingface.apply(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_a_cache_continues_the_last_document():
    x, dt, A, B, D = torch.randn(1, 9, 4, 3), torch.randn(1, 9, 4).abs(), -torch.ones(4), torch.randn(1, 9, 2, 5), torch.ones(4)
    boundaries = torch.tensor([0, 4, 9])
    scan = scan_of(stock)
    y, states = scan(x, dt, A, B, B, 256, D=D, cu_seq_lens_q=boundaries, return_final_states=True)
    alone = scan(*(t[:, 4:] for t in (x, dt)), A, *[B[:, 4:]] * 2, 256, D=D, return_final_states=True)
    assert torch.equal(y[:, 4:], alone[0]) and torch.equal(states, alone[1])


@pytest.mark.parametrize(
    "others",
    [
        {"z": torch.ones(1, 4, 4, 3)},
        {"seq_idx": torch.zeros(1, 4)},
        {"cu_seq_lens_q": torch.tensor([0, 4]), "initial_states": torch.zeros(1, 4, 3, 5)},
        {"cu_seq_lens_q": torch.tensor([0, 4]), "return_final_states": True},
    ],
    ids=" and ".join,
)
def test_what_onepass_has_not_is_the_models_own(others):
    """A gate within, marks of documents, documents that continue a state, and states of documents in several rows."""

    def own(*operands, **given):
        return given

    rows = 2 if "return_final_states" in others else 1
    x, dt, B = torch.randn(rows, 4, 4, 3), torch.ones(rows, 4, 4), torch.ones(rows, 4, 1, 5)
    given = others | {"dt_softplus": True}
    assert scan_of(own)(x, dt, -torch.ones(4), B, B, 32, **given) == given | {"chunk_size": 32}


# ---- the function that takes a whole mixer ----


def test_a_function_for_the_whole_mixer_declines(monkeypatch):
    """mamba-ssm's would pass layers by."""

    def taken(*given, **options):
        raise AssertionError("it was called")

    taken.__wrapped__ = getattr(modeling, WHOLE_MIXER).__wrapped__
    monkeypatch.setattr(modeling, WHOLE_MIXER, taken)
    model = made("GraniteMoeHybrid")
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    found = step(model, **batch() | {"use_cache": False})
    monkeypatch.undo()
    assert_alike(found, step(before, **batch()))


def test_one_that_computes_something_is_the_models_own():
    assert declines(lambda *given: None)
    assert not declines(lambda *given: torch.ones(1)) and not declines(lambda: None)


def all_is_right(applied):
    assert_documents_are_apart("GraniteMoeHybrid", LENGTHS, 1e-4, applied.apply, **MAMBA_ONLY)
    test_a_cache_continues_the_last_document()
    model = made("GraniteMoeHybrid")
    before = copy.deepcopy(model)
    assert BOTH in {row.by for row in applied.apply(model).rows}
    assert_alike(step(model, **batch()), step(before, **batch()))
    for name in ("no states", "states transposed", "no decay", "no limits"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(modeling, SCAN, NEARLY[name])
            assert BOTH not in {row.by for row in applied.apply(made("GraniteMoeHybrid")).rows}


MUTANTS = {
    "documents see each other": (scans, "scan_of", "cu_seqlens=documents.int()", "cu_seqlens=None"),
    "no bias": (scans, "scan_of", "for name in _OPTIONS if", "for name in _OPTIONS if name != 'dt_bias' and"),
    "any function": (scans, "is_scan", "not all(close(y, e, 1e-4)", "not all(y is not None"),
    "not tried with states": (scans, "is_scan", '| {"initial_states": states, "return_final_states": True}', ""),
    "not tried with limits": (scans, "is_scan", '"dt_limit": (0.3, 1.0)', '"dt_limit": (0.0, float("inf"))'),
    "a scan is not known": (mixers, "replace_mixers", "if right[stock])", "if right[stock] and each[0] == 'c')"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    mutant = mutant_of(monkeypatch, *MUTANTS[name])
    with pytest.raises((AssertionError, RuntimeError, UserWarning, ValueError, pytest.fail.Exception)):
        all_is_right(mutant)


def test_nothing_is_found_without_a_mutant():
    all_is_right(applied_module)
