"""Moments in eight bits: their codes, steps by them, and their states."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from parallel.adamw_oracle import BF16, FP32, adamw_reference
from parallel.test_sharded_adamw import BACKENDS, give
from torch import nn

import onepass
from onepass.gradients import adamw_formula, adamw_kernels, eight_bit_kernels, eight_bits, sharded_adamw
from onepass.gradients.adamw_formula import joined_master
from onepass.gradients.eight_bits import BLOCK, CUT, decode, decode_sq, draws_of, encode, encode_sq
from onepass.parallel import ShardedAdamW
from onepass.testing.mutants import mutate

SHAPES = ((8, 256), (3, 5, 512), (70, 256), (5, 13), (300,))  # the last two stay in fp32


@pytest.fixture(params=BACKENDS)
def backend(request):
    with onepass.use_backend(request.param):
        yield request.param


def numbers(rows=6, seed=0):
    """Rows of very different magnitudes, within a row too, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, BLOCK, generator=generator) * torch.exp(2 * torch.randn(rows, BLOCK, generator=generator))
    x *= 10.0 ** torch.linspace(-9, 9, rows)[:, None]
    return x.masked_fill(torch.rand(rows, BLOCK, generator=generator) < 0.1, 0.0).flatten()


def coded(x, draws=None):
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x) // BLOCK)
    encode(x, codes, scale, draws)
    return codes, scale


def coded_sq(x, draws=None):
    codes, scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x) // BLOCK)
    encode_sq(x, codes, scale, draws)
    return codes, scale


def position(x, most, base):
    """Where numbers lie between the codes, in codes."""
    rows = x.double().abs().view(-1, BLOCK)
    largest = rows.amax(1, keepdim=True)
    number = torch.where(largest > 0, rows / largest, 0.0) * most + eight_bits.number_at(base)
    exponent = number.log2().floor()
    return 8 * (exponent - math.log2(eight_bits.number_at(base)) + number / exponent.exp2() - 1)


FIRST, SECOND = (eight_bits.MOST, eight_bits.BASE), (eight_bits.MOST_SQ, eight_bits.BASE_SQ)


# ---- codes ----


def test_each_number_is_within_half_a_code():
    x = numbers()
    back = decode(*coded(x))
    assert torch.equal(back.sign(), torch.where(back == 0, 0, x.sign()))
    assert ((position(back, *FIRST) - position(x, *FIRST)).abs() <= 0.5 + 1e-4).all()
    square = x.square()
    off = (position(decode_sq(*coded_sq(square)), *SECOND) - position(square, *SECOND)).abs()
    small = position(square, *SECOND) < 1.0  # never 0
    assert (off[~small] <= 0.5 + 1e-4).all() and (off <= 1).all()
    drawn = decode_sq(*coded_sq(square, torch.randint(1 << CUT, square.shape, dtype=torch.int32)))
    assert ((position(drawn, *SECOND) - position(square, *SECOND)).abs() <= 1 + 1e-4).all()


def test_steps_from_code_to_code_are_an_eighth_at_most_but_for_small_numbers():
    for base, count, smallest in ((eight_bits.BASE, 127, 2.2e-6), (eight_bits.BASE_SQ, 256, 3.2e-11)):
        found = torch.tensor([eight_bits.number(code, base) for code in range(count)], dtype=torch.float64)
        assert found[0] == 0 and found[1] < smallest * found[-1]
        steps = found.diff() / found[1:]
        assert (steps[found[1:] > 20 * smallest * found[-1]] < 0.15).all() and (steps[-32:] < 0.1112).all()


def test_zeros_stay_zeros_and_other_second_moments_are_not():
    x = numbers()
    square = x.square()
    for back, source in ((decode(*coded(x)), x), (decode_sq(*coded_sq(square)), square)):
        assert (back[source == 0] == 0).all()
    tiny = square.clone()
    tiny[0] = 1e-30
    assert (decode_sq(*coded_sq(tiny, torch.zeros(tiny.shape, dtype=torch.int32)))[tiny != 0] > 0).all()
    none = torch.zeros(BLOCK)
    assert not decode(*coded(none)).any() and not decode_sq(*coded_sq(none)).any()


def test_what_was_decoded_has_its_codes_again():
    codes = torch.cat([torch.arange(-127, -1), torch.arange(127)]).to(torch.int8)  # -1 and 127 are NaN
    codes = torch.cat([codes, codes, torch.tensor([126, -2, 0, 1, 5, 9], dtype=torch.int8)])
    codes_sq = torch.arange(256, dtype=torch.uint8).repeat(2)
    for size in (1e-20, 3.7e-5, 1.0, 8e9):
        calm = torch.tensor([1.0, 1.7])[:, None].expand(2, BLOCK) * size
        for mine, coded_as, decoded in ((codes, coded, decode), (codes_sq, coded_sq, decode_sq)):
            scale = coded_as(calm.flatten())[1]
            back = coded_as(decoded(mine, scale))
            assert torch.equal(mine, back[0]) and torch.equal(scale, back[1]), size


@pytest.mark.parametrize("draw", [0, 3, 20, (1 << eight_bits.CUT) - 1])
def test_so_has_what_was_drawn(draw):
    """A small draw gives the largest number of a block the last code but one."""
    x = numbers(40)
    for values, code_of, decoded, dtype in (
        (x, encode, decode, torch.int8), (x.square(), encode_sq, decode_sq, torch.uint8),
    ):  # fmt: skip
        codes, scale = torch.empty(x.shape, dtype=dtype), torch.empty(len(x) // BLOCK)
        code_of(values, codes, scale, torch.full_like(x, draw, dtype=torch.int32))
        back, again = torch.empty_like(codes), torch.empty_like(scale)
        code_of(decoded(codes, scale), back, again)
        assert torch.equal(codes, back) and torch.equal(scale, again)
    assert draw or int(codes.max()) == 254


def test_a_huge_number_spoils_its_block_alone_and_nan_itself():
    x = numbers()
    calm = decode(*coded(x))
    x[5] = 1e30
    back = decode(*coded(x))
    assert torch.equal(back[BLOCK:], calm[BLOCK:]) and abs(back[5] / 1e30 - 1) < 1e-6
    x[5], x[7] = torch.nan, torch.inf
    back = decode(*coded(x))
    assert back[5].isnan() and back[7].isnan() and back.isnan().sum() == 2
    assert decode_sq(*coded_sq(torch.full((BLOCK,), torch.inf))).isfinite().all()


def test_no_draw_makes_nan_of_a_number():
    """The largest is next to NaN's code."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 12, BLOCK, generator=generator) * 10.0 ** torch.linspace(-25, 30, 1 << 12)[:, None]
    for draw in (0, (1 << CUT) - 1):
        draws = torch.full((x.numel(),), draw, dtype=torch.int32)
        back = decode(*coded(x.flatten(), draws)).view_as(x)
        assert back.isfinite().all() and (back.abs().amax(1) / x.abs().amax(1) - 1).abs().max() < (1e-6 if draw else 0.08)
        square = x.abs().clamp(max=1e19).square()
        back = decode_sq(*coded_sq(square.flatten(), draws)).view_as(x)
        assert (back.amax(1) / square.amax(1) - 1).abs()[square.amax(1) > 1e-27].max() < (1e-6 if draw else 0.08)


@pytest.mark.parametrize("part", [1.0, 0.77, 3e-3, 1.3e-5, 1e-6, 3e-9])
def test_the_mean_of_all_draws_is_the_number(part):
    """To 2^-20, by which the largest number is kept below its code."""
    draws = torch.arange(1 << CUT, dtype=torch.int32)
    x = torch.full((1 << CUT,), part)
    x.view(-1, BLOCK)[:, 7] = 1.0
    for back in (decode(*coded(x, draws)), decode_sq(*coded_sq(x, draws))):
        mean = back.view(-1, BLOCK).double()
        mean = (mean.sum() - mean[:, 7].sum()) / (mean.numel() - len(mean))
        assert abs(mean / x[0].double() - 1) < 2e-6 + 2e-11 / part  # fp32's own beside 2^-18 of the largest


def test_draws_are_even_and_know_nothing_of_each_other():
    """Over places, of a hash or not, both moments, rows and steps."""
    places = torch.arange(1 << 16)
    first, second = (torch.stack(each).double() / (1 << CUT) - 0.5 for each in zip(*drawn_over(places), strict=True))
    count = places.numel()
    for each in (first, second):
        assert (each.mean(1).abs() < 5 / (12 * count) ** 0.5).all()
        parts = torch.stack([torch.histc(x, 256, -0.5, 0.5) for x in each])
        assert (((parts - count / 256).square() / (count / 256)).sum(1) < 255 + 5 * 510**0.5).all()
        assert (torch.corrcoef(each) - torch.eye(len(each))).abs().max() < 5 / count**0.5
        for far in range(1, 20):
            assert (12 * (each[:, far:] * each[:, :-far]).mean(1).abs() < 5 / count**0.5).all(), far
            assert (12 * (first[:, far:] * second[:, :-far]).mean(1).abs() < 5 / count**0.5).all(), far
    assert (12 * (first * second).mean(1).abs() < 5 / count**0.5).all()


def drawn_over(places):
    return [draws_of(places, row, torch.tensor(float(step))) for row in (0, 1, 7) for step in (1, 2, 3, 1000)]


# ---- steps ----


def made(masters=True, moments="8bit", lr=1e-2):
    generator = torch.Generator().manual_seed(3)
    device = torch.get_default_device()
    drawn = (torch.randn(shape, generator=generator, device="cpu") * 0.02 for shape in SHAPES)
    weights = [nn.Parameter(each.to(device, BF16)) for each in drawn]
    return weights, ShardedAdamW(weights, lr=lr, weight_decay=0.1, betas=(0.9, 0.99), moments=moments, masters=masters)


def gradients(step):
    generator = torch.Generator().manual_seed(10 + step)
    drawn = [[torch.randn(shape, generator=generator, device="cpu") for _ in range(2)] for shape in SHAPES]
    return [(a * b.exp()).to(torch.get_default_device()) for a, b in drawn]


def kept_master(optimizer, weight):
    return joined_master(weight.detach(), optimizer.state[weight]["low"]).double()


def moments_of(optimizer, weight):
    """Both in fp64, and whether they are codes."""
    state = optimizer.state[weight]
    if "exp_avg_code" not in state:
        return state["exp_avg"].double().flatten(), state["exp_avg_sq"].double().flatten(), False
    first = decode(state["exp_avg_code"].flatten(), state["exp_avg_scale"].flatten())
    second = decode_sq(state["exp_avg_sq_code"].flatten(), state["exp_avg_sq_scale"].flatten())
    return first.double(), second.double(), True


def wrong_step(optimizer_of, steps=3):
    """Step, and compare each with the formula from the state before it. Return what is wrong."""
    weights, optimizer = optimizer_of()
    for step in range(1, steps + 1):
        give(weights, gradients(step))
        before = [(kept_master(optimizer, w).flatten(), *moments_of(optimizer, w)) for w in weights]
        optimizer.step()
        for place, (weight, (master, first, second, _)) in enumerate(zip(weights, before, strict=True)):
            grad = weight.grad.double().flatten()
            right = adamw_reference(master, grad, first, second, step, 1e-2, (0.9, 0.99), 1e-8, 0.1)
            off = (kept_master(optimizer, weight).flatten() - right[0]).abs()
            if not (off <= 2e-5 * right[0].abs() + 2e-5 * 1e-2 * 30).all():
                return f"step {step}, weight {place} is off by {off.max():.3g}"
            now = moments_of(optimizer, weight)
            if not now[2]:
                continue
            for name, found, exact, kind in (("exp_avg", now[0], right[1], FIRST), ("exp_avg_sq", now[1], right[2], SECOND)):
                if (position(found, *kind) - position(exact, *kind)).abs().max() > 1.02:
                    return f"step {step}, {name} of {place}"
    return ""


def test_steps_are_the_formulas_but_for_codes(backend):
    assert not wrong_step(made)
    weights, optimizer = made()
    names = [sorted(optimizer.state[w]) for w in weights]
    assert names[:3] == [["exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale", "low", "step"]] * 3
    assert names[3:] == [["exp_avg", "exp_avg_sq", "low", "step"]] * 2
    assert optimizer.state[weights[1]]["exp_avg_scale"].shape == (3, 5, 2)


def unlike(optimizer_of):
    """Return the largest part of codes that are others than the formula's, by PyTorch's operators, after two steps."""
    found = []
    for make, chosen in ((optimizer_of, nullcontext()), (made, onepass.use_backend("torch"))):
        weights, optimizer = make()
        with chosen:
            for step in range(2):
                give(weights, gradients(step))
                optimizer.step()
        found.append([optimizer.state[w][name].cpu() for w in weights[:3] for name in ("exp_avg_code", "exp_avg_sq_code")])
    return max(float((ours != theirs).double().mean()) for ours, theirs in zip(*found, strict=True))


def test_kernels_have_the_formulas_codes(backend):
    assert unlike(made) < 1e-3


def drift(kind):
    """Let half of a block's gradients shrink, and a part end. Return how far moments are from where they should be, or how far
    weights without a gradient have gone."""
    weight = nn.Parameter(torch.zeros(2, BLOCK))
    optimizer = kind([weight], lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, moments="8bit")
    for step in range(500):
        weight.grad = torch.ones(2, BLOCK)
        if step > 100:
            weight.grad[:, ::2], weight.grad[:, ::32] = 0.1, 0.0
        optimizer.step()
        if step == 100:
            begun = weight.detach().clone()
    first, second = (each.view(2, BLOCK) for each in moments_of(optimizer, weight)[:2])
    shrunk = 0.01 + 0.98**399 * 0.99
    gone = (weight.detach() - begun)[:, ::32].abs().max()  # by about the sum of .9^k
    if len(second[:, 2::32].unique()) < 3:  # equal numbers have draws of their own
        return 1.0
    return max(
        abs(float(second[:, 1::2].mean()) - 1), abs(float(second[:, 2::32].mean()) / shrunk - 1), float(gone) - 0.05,
        abs(float(first[:, 1::2].mean()) - 1), abs(float(first[:, 2::32].mean()) / 0.1 - 1),
    )  # fmt: skip


def test_moments_follow_gradients_that_shrink_and_end(backend):
    """Rounded to nearest they would stay: betas move them by less than a code a step."""
    assert drift(ShardedAdamW) < 0.12


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_poison_stays_where_it_is(poison, backend):
    weights, optimizer = made()
    give(weights, gradients(0))
    weights[0].grad[2, 3] = poison
    optimizer.step()
    give(weights, gradients(1))
    optimizer.step()
    bad = ~weights[0].isfinite()
    assert bad.sum() == (poison != 1e30) and (poison == 1e30 or bad[2, 3])
    assert all(weight.isfinite().all() for weight in weights[1:])


# ---- states ----


def go_on(weights, optimizer, steps):
    for step in steps:
        give(weights, gradients(step))
        optimizer.step()
    return [each for weight in weights for each in (weight, *optimizer.state[weight].values())]


def resumed(weights, optimizer, **options):
    others, other = made(**options)
    with torch.no_grad():
        for mine, theirs in zip(weights, others, strict=True):
            theirs.copy_(mine)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return others, other


def test_a_state_goes_on_bit_for_bit(backend):
    weights, optimizer = made()
    go_on(weights, optimizer, range(2))
    again = resumed(weights, optimizer)
    for mine, theirs in zip(go_on(weights, optimizer, range(2, 5)), go_on(*again, range(2, 5)), strict=True):
        assert torch.equal(mine, theirs)


def test_states_of_fp32_become_codes_and_back(backend):
    weights, optimizer = made(moments="fp32")
    go_on(weights, optimizer, range(3))
    others, coarse = resumed(weights, optimizer)
    assert coarse.state[others[0]]["exp_avg_code"].dtype is torch.int8
    back_weights, back = resumed(others, coarse, moments="fp32")
    assert back.state[back_weights[0]]["exp_avg"].dtype is FP32
    for mine, other, last in zip(weights, others, back_weights, strict=True):
        exact, codes, again = (moments_of(each, w) for each, w in ((optimizer, mine), (coarse, other), (back, last)))
        for at in (0, 1):
            assert torch.equal(codes[at].float(), again[at].float())
            assert (codes[at] - exact[at]).norm() <= 0.03 * exact[at].norm()
        assert torch.equal(kept_master(optimizer, mine), kept_master(back, last))


def test_a_group_has_its_own_kind():
    embedding, weight = nn.Parameter(torch.ones(4, 256)), nn.Parameter(torch.ones(4, 256))
    optimizer = ShardedAdamW([{"params": [embedding], "moments": "fp32"}, {"params": [weight]}], moments="8bit")
    assert "exp_avg" in optimizer.state[embedding] and "exp_avg_code" in optimizer.state[weight]
    with pytest.raises(ValueError, match="moments must be fp32, bf16, 8bit or None, but is '4bit'"):
        ShardedAdamW([{"params": [weight], "moments": "4bit"}])


# ---- mutants ----

kernel, first, second = "_adamw_kernel", "(state_at + start) // SCALED + ", "tl.arange(0, BLOCK // SCALED)"
MUTANTS = {
    "the scale of one row": (adamw_kernels, kernel, first + second, first + "0 * " + second, "triton"),
    "the sign is lost": (eight_bit_kernels, "decode", "(word & _SIGN_BIT)", "(word & 0)", "triton"),
    "the other scale": (adamw_kernels, kernel, "tl.load(scale_sq_ptr", "tl.load(scale_ptr", "triton"),
    "the other beta": (adamw_kernels, kernel, "beta2 * tl.load", "beta1 * tl.load", "triton"),
    "F(0) is left out": (eight_bit_kernels, "encode_sq", ", _ZERO_SQ)", ", 0.0)", "triton"),
    "always the lower code": (eight_bit_kernels, "encode_sq", "bits + draw", "bits", "triton"),
    "always the lower code of exp_avg": (eight_bit_kernels, "encode", "bits + draw", "bits", "triton"),
    "the nearer code of exp_avg": (eight_bit_kernels, "encode", "bits + draw", "bits + 0x80000", "triton"),
    "one draw for all steps": (eight_bit_kernels, "draws", "step.to(tl.uint32) *", "0 *", "triton"),
    "one draw for a hash": (eight_bit_kernels, "draws", "at & 1 != 0", "at < 0", "triton"),
    "one draw for all chunks": (eight_bit_kernels, "draws", "first // _TOGETHER + ", "", "triton"),
    "torch: another block's scale": (adamw_formula, "AdamWSlice.part", "slice(start // BLOCK,", "slice(0,", "torch"),
    "torch: a bit less": (eight_bits, "_scaled", "code << CUT", "code << CUT - 1", "torch"),
    "torch: the sign is lost": (eight_bits, "decode", "-values, values", "values, values", "torch"),
    "torch: to nearest": (adamw_formula, "AdamWSlice.put_moments", "exp_avg_sq, draws[1]", "exp_avg_sq, None", "torch"),
    "torch: exp_avg to nearest": (adamw_formula, "AdamWSlice.put_moments", "exp_avg, draws[0]", "exp_avg, None", "torch"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    *change, backend = MUTANTS[name]
    mutant = mutate(*change, entry=sharded_adamw)
    used = mutant.AdamWStepper.run.__globals__
    used["step_formula"].__globals__["_A_THREADS"] = 1 << 10  # several blocks

    def of_the_mutant():
        weights, _ = made()
        return weights, mutant.ShardedAdamW(weights, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), moments="8bit", masters=True)

    with used["backend"].use_backend(backend):
        try:
            found = wrong_step(of_the_mutant) or unlike(of_the_mutant) > 1e-3 or drift(mutant.ShardedAdamW) > 0.12
        except RuntimeError:  # of sizes
            return
    assert found
