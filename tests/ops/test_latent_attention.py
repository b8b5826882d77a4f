"""What latent_attention is, and how it behaves where attention's own tests don't say so."""

import importlib

import pytest
import torch
from ops.calls import backends, equal, gradients, needs_triton
from ops.latent_oracle import Case, computed, draw, judge_case, packed, real_cases, small_cases
from ops.oracle import BF16, DEVICE
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.ops.attention import by_cudnn
from onepass.testing.poison import saved_tensors

module = importlib.import_module("onepass.ops.attention.latent_attention")


def tensors(B=2, S=19, heads=3, nope=24, rope=8, V=16):
    shapes = (heads, nope + rope), (heads, nope + V), (rope,)
    made = [torch.randn(B, S, *shape, device=DEVICE).to(BF16).requires_grad_() for shape in shapes]
    angles = torch.randn(S, rope // 2, device=DEVICE)
    return made, {"cos": angles.cos(), "sin": angles.sin()}


@backends
@pytest.mark.parametrize("case", small_cases() + real_cases(), ids=str)
def test_within_the_budget(case, backend):
    report = judge_case(module, case, backend)
    assert report, report


def test_pairs_in_and_halves_out_give_the_same():
    """As DeepSeek's own code has it: it reorders the elements of q and of k alike."""
    (q, kv, k_rope), tables = tensors()
    q, kv, k_rope = (x.double() for x in (q, kv, k_rope))
    halves = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)]).to(DEVICE)
    reordered = torch.cat([q[..., :24], q[..., 24:][..., halves]], -1), kv, k_rope[..., halves]
    one = module.latent_attention_reference(q, kv, k_rope, **tables, interleaved=True)
    torch.testing.assert_close(one, module.latent_attention_reference(*reordered, **tables), rtol=1e-12, atol=1e-12)


@needs_triton
@pytest.mark.parametrize("interleaved", (False, True))
def test_a_document_has_the_bits_that_it_has_alone(interleaved):
    lengths = (17, 0, 1, 40, 6)
    case = packed(lengths, interleaved=interleaved, small=False)
    drawn, tables, dy = draw(case)
    whole, first = computed(module, case, drawn, tables, dy), 0
    for length in filter(None, lengths):
        mine = slice(first, first + length)
        alone = Case(B=1, S=length, interleaved=interleaved, small=False)
        of_it = {name: table[:length] for name, table in tables.items()}
        found = computed(module, alone, [x[:, mine] for x in drawn], of_it, dy[:, mine])
        assert equal(found, [x[:, mine] for x in whole])
        first += length


@needs_triton
def test_wrong_boundaries_give_nan():
    (q, kv, k_rope), tables = tensors(B=1)
    wrong = torch.tensor([0, 12, 7, 19], dtype=torch.int32, device=DEVICE)
    parts = module._forward(
        q.detach(), kv.detach(), k_rope.detach(), *tables.values(), wrong, module.LatentOptions(8, False, 0.2, True)
    )
    assert parts[0].isnan().all()
    with pytest.raises(ValueError, match="must not fall"):
        onepass.latent_attention(q, kv, k_rope, **tables, cu_seqlens=wrong.cpu())


@needs_triton
@pytest.mark.parametrize("asked", ((0,), (1,), (2,), (0, 2), (1, 2)))
def test_a_frozen_tensor_costs_its_gradient_only(asked):
    made, tables = tensors()
    everything = gradients(lambda *ts: onepass.latent_attention(*ts, **tables, backend="triton"), made)
    some = [t.detach().requires_grad_(i in asked) for i, t in enumerate(made)]
    found = gradients(lambda *ts: onepass.latent_attention(*ts, **tables, backend="triton"), some)
    assert equal(found, [everything[0], *(everything[1 + i] for i in asked)])


@needs_triton
def test_backward_keeps_heads_and_no_projection():
    made, tables = tensors()
    with saved_tensors() as kept:
        y = onepass.latent_attention(*made, **tables, backend="triton")
    addresses = {t.data_ptr() for t in kept}
    assert y.data_ptr() in addresses and not addresses & {t.data_ptr() for t in made}
    B, S, H, width = made[0].shape
    assert sum(t.numel() for t in kept if t.dtype == BF16) == B * S * H * (2 * width + 2 * 16)


@backends
def test_checkpointing_and_compiling_change_nothing(backend):
    made, tables = tensors()

    def call(*ts):
        return onepass.latent_attention(*ts, **tables, interleaved=True, backend=backend)

    plain = gradients(call, made)
    assert equal(gradients(lambda *ts: checkpoint(call, *ts, use_reentrant=False), made), plain)
    compiled = gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), made)
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_slices_of_one_product_are_read_where_they_lie(monkeypatch):
    pytest.importorskip("triton")
    made, tables = tensors()
    whole = torch.randn(2, 19, 96 + 40, device=DEVICE).to(BF16)
    q, k_rope, seen = whole[..., :96].unflatten(-1, (3, 32)), whole[..., 128:], []
    kernels = importlib.import_module("onepass.ops.attention.latent_kernels")
    real = kernels._bind
    monkeypatch.setattr(kernels, "_bind", lambda sizes, rows, back: seen.append(rows) or real(sizes, rows, back))
    found = onepass.latent_attention(q, made[1], k_rope, **tables, backend="triton")
    assert seen == [(136, 136)]
    assert found.equal(onepass.latent_attention(q.contiguous(), made[1], k_rope.contiguous(), **tables, backend="triton"))


# ---- what is refused, and what is said ----


def test_pytorchs_attention_gets_addresses_that_it_can_read(monkeypatch):
    """On a GPU it reads 16 bytes at a time wherever a tensor begins, and such an access ends the process's use of the GPU."""

    def unaligned(t):
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)

    def step():
        y = onepass.latent_attention(*leaves, **tables, backend="torch")
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def attend(parts, *rest):
        y = stock(parts, *rest)
        y.register_hook(read.append)
        read.extend(parts)
        return y

    tensors, tables, dy = draw(Case(nope=6, rope=10, V=32))  # values begin 12 bytes after a head of kv
    leaves, dy, read, stock = [unaligned(t).requires_grad_() for t in tensors], unaligned(dy), [], module.attention_by_pytorch
    expected = step()
    monkeypatch.setattr(module, "is_read_by_address", lambda _: True)
    monkeypatch.setattr(module, "attention_by_pytorch", attend)
    assert equal(step(), expected)
    assert len(read) == 4
    assert all(t.data_ptr() % 16 == 0 and not any(stride % 8 for stride in t.stride()[:-1]) for t in read)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"q": torch.ones(2, 19, 96)}, r"q must have shape \[B, S, heads, nope \+ rope\]"),
        ({"kv": torch.ones(2, 19, 2, 40)}, r"kv must have shape \[2, 19, 3, 24 \+ V\]"),
        ({"kv": torch.ones(2, 19, 3, 24)}, r"kv must have shape"),
        ({"k_rope": torch.ones(2, 19, 7)}, r"k_rope must have shape \[2, 19, rope\], rope even and less than 32"),
        ({"k_rope": torch.ones(2, 18, 8)}, r"k_rope must have shape"),
        ({"k_rope": torch.ones(2, 19, 32)}, r"k_rope must have shape"),
        ({"sin": None}, "sin must be given where cos is"),
        ({"cos": torch.ones(19, 3), "sin": torch.ones(19, 3)}, "cos must have 4 numbers a token"),
        ({"cos": torch.ones(18, 4), "sin": torch.ones(18, 4)}, "cos must have shape"),
        ({"scale": 0.0}, "scale must be finite and above 0"),
    ),
)
def test_wrong_arguments_are_named(change, words):
    (q, kv, k_rope), tables = tensors()
    given = {"q": q, "kv": kv, "k_rope": k_rope, **tables} | {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()
    }
    with pytest.raises(ValueError, match=words):
        onepass.latent_attention(**given)


@pytest.mark.parametrize(
    ("gpu", "S", "width", "V"), [(9, 64, 192, 128), (9, 64, 256, 256), (9, 64, 192, 512), (9, 1, 192, 128), (10, 64, 192, 128)]
)
def test_cudnn_is_asked_for_what_it_takes(gpu, S, width, V, monkeypatch):
    """Its operators look at nothing: values of 512, one token, or a GPU after Hopper fail in there, at the latest in backward."""
    monkeypatch.setattr(by_cudnn, "has_cudnn", lambda x, newest: gpu <= newest)
    q = torch.empty(1, S, 2, width, dtype=BF16, device="meta")
    takes = gpu == 9 and S > 1 and V < 512
    assert module._by_cudnn(q, V, module.LatentOptions(64, False, 1.0, False), None) is takes
    assert not module._by_cudnn(q, V, module.LatentOptions(64, False, 1.0, True), None)


def test_explain_names_the_kernels():
    made, tables = tensors(heads=4)
    said = str(onepass.explain(onepass.latent_attention, *made, **tables))
    if "triton:" in said and "latent_attention: triton" in said:
        assert "heads arranged by a kernel each way" in said and "attention of 32/16" in said
    odd, tables = tensors(nope=20)
    said = onepass.explain(onepass.latent_attention, *odd, **tables)
    assert said.backend == "torch" and "q's heads of 28 are none of" in str(said)
