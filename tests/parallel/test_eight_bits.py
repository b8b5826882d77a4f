"""Moments in eight bits: their codes, steps by them, and their states."""

import copy

import pytest
import torch
from parallel.adamw_oracle import BF16, FP32, adamw_reference
from parallel.test_sharded_adamw import BACKENDS, give
from torch import nn

import onepass
from onepass.gradients import adamw_formula, adamw_kernels, eight_bit_kernels, eight_bits, sharded_adamw
from onepass.gradients.adamw_formula import joined_master
from onepass.gradients.eight_bits import BLOCK, decode, decode_sq, encode, encode_sq
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


def coded(x):
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x) // BLOCK)
    encode(x, codes, scale)
    return codes, scale


def coded_sq(x, draws=None):
    codes, scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x) // BLOCK)
    encode_sq(x, codes, scale, draws)
    return codes, scale


def root(x, power):
    rows = x.double().abs().view(-1, BLOCK)
    return (rows / rows.amax(1, keepdim=True)) ** (1 / power)


# ---- codes ----


def test_each_number_is_within_half_a_code_of_its_blocks_root():
    x = numbers()
    back = decode(*coded(x))
    assert torch.equal(back.sign(), torch.where(back == 0, 0, x.sign()))
    assert ((root(back, 4) - root(x, 4)).abs() <= (0.5 + 1e-4) / 127).all()
    square = x.square()
    back = decode_sq(*coded_sq(square))
    off = (root(back, 8) - root(square, 8)).abs()
    small = root(square, 8) < 1.5 / 255  # never 0
    assert (off[~small] <= (0.5 + 1e-3) / 255).all()
    drawn = decode_sq(*coded_sq(square, torch.rand(square.shape)))
    assert ((root(drawn, 8) - root(square, 8)).abs()[~small] <= (1 + 1e-3) / 255).all()


def test_zeros_stay_zeros_and_other_second_moments_are_not():
    x = numbers()
    square = x.square()
    for back, source in ((decode(*coded(x)), x), (decode_sq(*coded_sq(square)), square)):
        assert (back[source == 0] == 0).all()
    tiny = square.clone()
    tiny[0] = 1e-30
    assert (decode_sq(*coded_sq(tiny, torch.zeros_like(tiny)))[tiny != 0] > 0).all()
    none = torch.zeros(BLOCK)
    assert not decode(*coded(none)).any() and not decode_sq(*coded_sq(none)).any()


def test_what_was_decoded_has_its_codes_again():
    codes = torch.arange(-127, 128).repeat(1, 2)[0, : 2 * BLOCK - 2].to(torch.int8)
    codes = torch.cat([codes, torch.tensor([127, -127, 0, 1], dtype=torch.int8)])[: 2 * BLOCK]
    codes_sq = torch.arange(256, dtype=torch.uint8).repeat(2)
    for size in (1e-20, 3.7e-5, 1.0, 8e9):
        scale = torch.full((2,), size)
        for mine, back in ((codes, coded(decode(codes, scale))), (codes_sq, coded_sq(decode_sq(codes_sq, scale)))):
            assert torch.equal(mine, back[0]) and torch.equal(scale, back[1]), size


def test_a_huge_number_spoils_its_block_alone_and_nan_itself():
    x = numbers()
    calm = decode(*coded(x))
    x[5] = 1e30
    back = decode(*coded(x))
    assert torch.equal(back[BLOCK:], calm[BLOCK:]) and back[5] == torch.tensor(1e30)
    x[5], x[7] = torch.nan, torch.inf
    back = decode(*coded(x))
    assert back[5].isnan() and back[7].isnan() and back.isnan().sum() == 2
    assert decode_sq(*coded_sq(torch.full((BLOCK,), torch.inf))).isfinite().all()


def test_draws_have_the_numbers_as_their_mean():
    square = numbers(2).square()
    mean = torch.zeros_like(square)
    places = torch.arange(len(square))
    for step in range(400):
        mean += decode_sq(*coded_sq(square, eight_bits.draws_of(places, 3, torch.tensor(float(step)))[1])) / 400
    large = (root(square, 8) > 20 / 255).flatten()
    assert large.sum() > 300
    off = (mean / square - 1)[large].abs()
    assert off.mean() < 0.01 and off.max() < 0.15


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
    """Both in fp64, and the roots' largest error that codes may have, or None."""
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
            for name, found, exact, power, most in (
                ("exp_avg", now[0], right[1], 4, 1.02 / 127),
                ("exp_avg_sq", now[1], right[2], 8, 1.02 / 255),
            ):
                if (root(found, power) - root(exact, power)).abs().max() > most:
                    return f"step {step}, {name} of {place}"
    return ""


def test_steps_are_the_formulas_but_for_codes(backend):
    assert not wrong_step(made)
    weights, optimizer = made()
    names = [sorted(optimizer.state[w]) for w in weights]
    assert names[:3] == [["exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale", "low", "step"]] * 3
    assert names[3:] == [["exp_avg", "exp_avg_sq", "low", "step"]] * 2
    assert optimizer.state[weights[1]]["exp_avg_scale"].shape == (3, 5, 2)


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
    "another root": (eight_bit_kernels, "encode", "draw, 4, 127", "draw, 8, 127", "triton"),
    "the scale of one row": (adamw_kernels, kernel, first + second, first + "0 * " + second, "triton"),
    "the sign is lost": (eight_bit_kernels, "decode", "root * tl.abs(root)", "root * root", "triton"),
    "the other scale": (adamw_kernels, kernel, "tl.load(scale_sq_ptr", "tl.load(scale_ptr", "triton"),
    "always the lower code": (eight_bit_kernels, "encode_sq", "draw, 8, 255", "1.0, 8, 255", "triton"),
    "always the lower code of exp_avg": (eight_bit_kernels, "encode", "draw, 4, 127", "1.0, 4, 127", "triton"),
    "the nearer code of exp_avg": (eight_bit_kernels, "encode", "draw, 4, 127", "0.5, 4, 127", "triton"),
    "one draw for all steps": (eight_bit_kernels, "draws", "step.to(tl.uint32) *", "0 *", "triton"),
    "one draw for all places": (adamw_kernels, kernel, "tl.int32) + at", "tl.int32) + 0 * at", "triton"),
    "torch: another block's scale": (adamw_formula, "AdamWSlice.part", "slice(start // BLOCK,", "slice(0,", "torch"),
    "torch: a power less": (eight_bits, "decode_sq", ".pow_(8)", ".pow_(7)", "torch"),
    "torch: the sign is lost": (eight_bits, "decode", " * root.sign()", "", "torch"),
    "torch: to nearest": (adamw_formula, "AdamWSlice.put_moments", "self.scale_sq, draws[1]", "self.scale_sq, None", "torch"),
    "torch: exp_avg to nearest": (adamw_formula, "AdamWSlice.put_moments", "self.scale, draws[0]", "self.scale, None", "torch"),
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
            found = wrong_step(of_the_mutant) or drift(mutant.ShardedAdamW) > 0.12
        except RuntimeError:  # of sizes
            return
    assert found
