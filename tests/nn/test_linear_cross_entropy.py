"""nn.LinearCrossEntropy on one rank: torch.nn's parameters, start and loss, every option given to the op, logits, errors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.nn import LinearCrossEntropy, sharded_state_dict
from onepass.parallel import DeferredWgrad, MainGrads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "reduction": "sum",
    "ignore_index": 3,
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
    "softcap": 2.0,
    "logit_scale": 0.5,
    "temperature": 0.8,
    "logits_dtype": torch.float32,
    "chunk_bytes": 4096,
}


def seeded(make, seed=5):
    torch.manual_seed(seed)
    return make()


def given(dtype=torch.float32, rows=77):
    hidden = torch.randn(3, 5, 12, device=DEVICE).to(dtype).requires_grad_()
    labels = torch.randint(rows, (3, 5), device=DEVICE)
    labels[0, 1] = -100
    return hidden, labels


@pytest.mark.parametrize("bias", (True, False))
def test_it_is_torchs_head_and_loss(bias):
    ours = seeded(lambda: LinearCrossEntropy(12, 77, bias=bias, device=DEVICE))
    theirs = seeded(lambda: nn.Linear(12, 77, bias=bias, device=DEVICE))
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(ours.state_dict()[name], t) for name, t in state.items())
    hidden, labels = given()
    mine = hidden.detach().clone().requires_grad_()
    loss, expected = ours(mine, labels), F.cross_entropy(theirs(hidden).flatten(0, 1), labels.flatten())
    loss.backward()
    expected.backward()
    torch.testing.assert_close([loss, mine.grad], [expected, hidden.grad])
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)
    torch.testing.assert_close(ours.logits(hidden), theirs(hidden))


def test_checkpoints_of_heads_are_exchanged():
    ours, theirs = LinearCrossEntropy(12, 77, bias=True, dtype=torch.bfloat16), nn.Linear(12, 77, dtype=torch.bfloat16)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    seeded(ours.reset_parameters)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    state = sharded_state_dict(ours, prefix="lm_head.")
    assert list(state) == ["lm_head.weight", "lm_head.bias"] and type(state["lm_head.weight"]) is torch.Tensor
    assert state["lm_head.weight"].data_ptr() == ours.weight.data_ptr()


def test_the_op_gets_every_option(monkeypatch):
    seen = []
    monkeypatch.setattr("onepass.nn.linear_cross_entropy.linear_cross_entropy", lambda *args, **more: seen.append((args, more)))
    classes = torch.rand(77)
    head, (hidden, labels) = LinearCrossEntropy(12, 77, bias=True, class_weight=classes, **OPTIONS), given()
    head.deferred, token_weight, other = DeferredWgrad(), torch.rand(3, 5), torch.randn(77, 12)
    mask = torch.ones(77, dtype=torch.bool)
    rows, lora = onepass.kept_rows(labels, 3), onepass.LoRA(other[:2], other[:, :2])
    called = {
        "token_weight": token_weight, "grad_scale": 2.0, "return_stats": True, "rows": rows, "vocab_mask": mask, "lora": lora,
    }  # fmt: skip
    head(hidden, labels, weight=other, **called)
    head(hidden, labels)
    options = OPTIONS | {"bias": head.bias, "deferred": head.deferred, "class_weight": classes, "sequence_parallel": False}
    plain = dict.fromkeys(called) | {"return_stats": False}
    (args, more), (args_again, more_again) = seen
    assert args[0] is hidden and args[1] is other and args[2] is labels and args[3:] == (None,) and more == options | called
    assert args_again[1] is head.weight and args_again[3:] == (None,) and more_again == options | plain


def test_class_weights_and_probabilities_are_torchs():
    weight = torch.rand(77, device=DEVICE)
    head, (hidden, labels) = LinearCrossEntropy(12, 77, class_weight=weight, label_smoothing=0.1, device=DEVICE), given()
    theirs, logits = nn.CrossEntropyLoss(weight, label_smoothing=0.1), head.logits(hidden).flatten(0, 1)
    torch.testing.assert_close(head(hidden, labels), theirs(logits, labels.flatten()))
    mixed = torch.randn(3, 5, 77, device=DEVICE).softmax(-1)
    torch.testing.assert_close(head(hidden, mixed), theirs(logits, mixed.flatten(0, 1)))
    assert list(head.state_dict()) == ["weight"] and head.to(torch.bfloat16).class_weight.dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"class_weight must have shape \(77,\)"):
        LinearCrossEntropy(12, 77, class_weight=weight[1:])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_logits_are_what_the_loss_is_of(dtype):
    hidden, labels = given(dtype)
    for options in ({}, {"softcap": 2.0}, {"logit_scale": 3.0}, {"softcap": 2.0, "logit_scale": 3.0}):
        head = LinearCrossEntropy(12, 77, bias=True, dtype=dtype, device=DEVICE, **options)
        logits = head.logits(hidden)
        assert logits.shape == (3, 5, 77) and logits.dtype is dtype
        exact = F.linear(*(t.detach().double() for t in (hidden, head.weight, head.bias)))
        exact = options.get("logit_scale", 1.0) * exact
        exact = 2 * torch.tanh(exact / 2) if "softcap" in options else exact
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-2)
        close = {"rtol": 1e-6, "atol": 0} if dtype is torch.float32 or not options else {"rtol": 1e-3, "atol": 0}
        expected = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        torch.testing.assert_close(head(hidden, labels), expected, **close)
        logits.float().square().sum().backward()
        assert head.weight.grad.any() and head.bias.grad.any()


def test_another_modules_weight_has_its_shape():
    head, (hidden, labels) = LinearCrossEntropy(12, 77, skip_weight_param_allocation=True), given()
    for call in (lambda **more: head(hidden, labels, **more), lambda **more: head.logits(hidden, **more)):
        with pytest.raises(ValueError, match="weight must be given with the call, as skip_weight_param_allocation"):
            call()
        with pytest.raises(ValueError, match=r"weight must have shape \(77, 12\), a row a token, but has \(12, 77\)"):
            call(weight=torch.ones(12, 77))
    head.weight = nn.Parameter(torch.ones(78, 12))
    with pytest.raises(ValueError, match=r"weight must have shape \(77, 12\), a row a token, but has \(78, 12\)"):
        head(hidden, labels)


def test_gradients_go_into_main_grad_and_wait_where_they_are_deferred():
    head, (hidden, labels) = LinearCrossEntropy(12, 77, device=DEVICE), given()
    head(hidden, labels).backward()
    exact, head.weight.grad = head.weight.grad, None
    main_grads = MainGrads(head)
    with main_grads.accumulate():
        head(hidden, labels).backward()
    head(hidden, labels, grad_scale=1.0).backward()
    main_grads.finish()
    torch.testing.assert_close(head.weight.main_grad, 2 * exact)
    main_grads.zero_()
    head.deferred = DeferredWgrad()
    head(hidden, labels).backward()
    assert not head.weight.main_grad.any()
    head.deferred.flush()
    torch.testing.assert_close(head.weight.main_grad, exact)


def test_an_init_method_makes_the_weight_and_the_bias_is_zeros():
    head = LinearCrossEntropy(8, 6, bias=True, init_method=lambda weight: weight.fill_(3.0))
    assert (head.weight == 3).all() and not head.bias.any()


def test_marks_and_the_meta_device():
    whole = seeded(lambda: LinearCrossEntropy(8, 6, bias=True))
    late = LinearCrossEntropy(8, 6, bias=True, device="meta").to_empty(device="cpu")
    seeded(late.reset_parameters)
    for head in (whole, late, copy.deepcopy(late)):
        assert all(torch.equal(head.state_dict()[name], t) for name, t in whole.state_dict().items())
        for parameter in head.parameters():
            assert (parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride) == (True, 0, 1)


def test_one_rank_alone_has_the_whole_sequence():
    head, (hidden, labels) = LinearCrossEntropy(12, 77, sequence_parallel=True, device=DEVICE), given()
    assert head.sequence_parallel is False and head.vocab_range == (0, 77)
    assert head(hidden, labels).isfinite() and head.logits(hidden).shape == (3, 5, 77)


def test_it_compiles_without_a_break():
    head, (hidden, labels) = LinearCrossEntropy(12, 77, bias=True, softcap=3.0, device=DEVICE), given()
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden, labels), head(hidden, labels))


def test_reprs():
    assert repr(LinearCrossEntropy(8, 6)) == "LinearCrossEntropy(8, 6, bias=False)"
    said = repr(LinearCrossEntropy(8, 6, bias=True, softcap=30.0, reduction="none", sequence_parallel=True))
    assert said == "LinearCrossEntropy(8, 6, bias=True, reduction='none', softcap=30.0)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinearCrossEntropy(0, 6), "hidden_size must be a size of at least 1, but is 0"),
        (lambda: LinearCrossEntropy(8, 6.0), r"vocab_size must be a size of at least 1, but is 6\.0"),
        (lambda: LinearCrossEntropy(8, 6, reduction="max"), "reduction must be one of none, mean, sum, but is 'max'"),
        (lambda: LinearCrossEntropy(8, 6, label_smoothing=2.0), "label_smoothing must be from 0 to 1, but is 2"),
        (lambda: LinearCrossEntropy(8, 6, softcap=-1.0), "softcap must be finite and above 0, or None, but is -1"),
        (lambda: LinearCrossEntropy(8, 6, ignore_index=None), "ignore_index must be an integer, but is None"),
        (lambda: LinearCrossEntropy(8, 6, init_method="normal"), "init_method must be a function of the weight or None"),
        (lambda: LinearCrossEntropy(8, 6, tp_group=-100), "tp_group must be None or a torch.distributed.ProcessGroup"),
        (
            lambda: LinearCrossEntropy(8, 6)(torch.ones(2, 5), torch.ones(2).long()),
            r"hidden's last dimension must be 8, hidden_size, but hidden has shape \(2, 5\)",
        ),
        (lambda: LinearCrossEntropy(8, 6).logits(torch.ones(())), r"hidden's last dimension must be 8, .* shape \(\)"),
        (lambda: LinearCrossEntropy(8, 6)([1.0], None), "hidden must be a tensor, but is a list"),
        (lambda: LinearCrossEntropy(8, 6)(torch.ones(2, 8), torch.ones(2)), "labels of torch.float32 are probabilities"),
        (lambda: LinearCrossEntropy(8, 6)(torch.ones(2, 8), [1]), "labels must be an int32 or int64 tensor"),
        (lambda: LinearCrossEntropy(8, 6)(torch.ones(2, 8), torch.tensor([1, 6])), "labels must be from 0 to 5"),
        (lambda: LinearCrossEntropy(8, 6).double()(torch.ones(2, 8), torch.tensor([1, 5])), "weight must have hidden's type"),
        (
            lambda: LinearCrossEntropy(8, 6, logits_dtype=torch.float16)(torch.ones(2, 8), torch.tensor([1, 5])),
            "logits_dtype must be torch.float32",
        ),
    ],
)
def test_errors_say_what_to_do(make, words):
    with onepass.validate(), pytest.raises((ValueError, TypeError, IndexError), match=words):
        make()
