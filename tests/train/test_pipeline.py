"""Training by pipeline schedules, on two ranks and on four, gives what one rank gives."""

import argparse
from functools import partial
from unittest import mock

import numpy
import pytest
import torch
from parallel.worlds import FOURS, PAIRS

import onepass
from onepass.gpt import Config, Model
from onepass.parallel import DeferredWgrad, MainGrads
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint, layout
from onepass.train.batches import Batches
from onepass.train.command import add_arguments
from onepass.train.flags import merge_settings, read_file
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.packing import Documents, PackedBatches
from onepass.train.setup import make
from onepass.train.stages import check, divided

WORLDS = [*PAIRS, *FOURS]
rank_context = partial(onepass.use_backend, "torch")
two_ranks = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
LENGTH, STEPS, END = 12, 2, 0
SHAPE = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 37,
    "max_position_embeddings": 16, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
OPTIONS = {"micro_batch_size": 2, "global_batch_size": 8, "seq_length": LENGTH, "seed": 5, "train_iters": STEPS}
GPT2 = {
    "add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False, "activation_func": "gelu",
}  # fmt: skip
LATER = {"defer_embedding_wgrad_compute": True}
EACH = {"num_layers_per_virtual_pipeline_stage": 1}
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
FIRST, LAST = ({f"num_layers_in_{which}_pipeline_stage": 1} for which in ("first", "last"))
LAST_OF_SIX = {"num_layers": 6, "num_layers_in_last_pipeline_stage": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
INTERLEAVED, ZERO_BUBBLE = {"pipeline_schedule": "interleaved"}, {"pipeline_schedule": "zero-bubble"}
PACKED = {"pack": True}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
# ranks -> case -> options of the model, and of its training
CASES = {
    2: {
        "1f1b": ({}, {}),
        "uneven": ({"num_layers": 3} | GPT2, {}),
        "seven microbatches": ({}, {"micro_batch_size": 1, "global_batch_size": 7}),
        "bf16": ({"params_dtype": "bf16"}, {}),
        "recomputed": ({"recompute_granularity": "full"}, {}),
        "experts": ({"num_moe_experts": 3, "moe_ffn_hidden_size": 8}, {}),
        "packed": (GPT2, PACKED),
        "packed, recomputed": ({"recompute_granularity": "full"}, PACKED),
        "packed, interleaved": (EACH, PACKED | INTERLEAVED),
        "packed, zero-bubble": (EACH, PACKED | ZERO_BUBBLE),
        "interleaved": (EACH, INTERLEAVED),
        "interleaved, three microbatches": (EACH, INTERLEAVED | {"global_batch_size": 6}),
        "interleaved, plain": (EACH | {"plain": True}, INTERLEAVED),
        "zero-bubble": (EACH, ZERO_BUBBLE),
        "zero-bubble, products again": (EACH | {"recompute_granularity": "selective"}, ZERO_BUBBLE),
        "zero-bubble, a stage each": (GPT2, ZERO_BUBBLE),
        "zero-bubble, three microbatches": (EACH, ZERO_BUBBLE | {"global_batch_size": 6}),
        "zero-bubble, plain": (EACH | {"plain": True}, ZERO_BUBBLE),
        "head later": (LATER, {}),
        "head later, one": (LATER | {"wgrad_deferral_limit": 1}, {}),
        "head later, interleaved": (LATER | EACH, INTERLEAVED),
        "head later, zero-bubble": (LATER | EACH, ZERO_BUBBLE),
        "less on the first": (FIRST | GPT2, {}),
        "less on the last": (LAST | LATER, {}),
        "less on the last, interleaved": (LAST_OF_SIX | VIRTUAL, INTERLEAVED),
        "less on the last, zero-bubble": (LAST_OF_SIX | VIRTUAL, ZERO_BUBBLE),
        "less on the last, zero-bubble, a stage each": (LAST, ZERO_BUBBLE),
        "less on the last, some recomputed": (LAST | {"recompute_granularity": "full", "recompute_num_layers": 2}, {}),
        "two tokens more": (MTP, {}),
        "two tokens more, bf16": (MTP | {"params_dtype": "bf16"}, {}),
        "two tokens more, packed": (MTP | GPT2, PACKED | {"release_main_grads": True}),
        "two tokens more, interleaved": (MTP | EACH, INTERLEAVED),
        "two tokens more, zero-bubble, one layer": (MTP | EACH | {"mtp_use_repeated_layer": True}, ZERO_BUBBLE),
        "two tokens more, head later": (MTP | LATER, {}),
        "two tokens more, plain": (MTP | GPT2 | {"plain": True}, {}),
    },
    4: {
        "four stages": ({}, {}),
        "four stages, zero-bubble": ({}, ZERO_BUBBLE | {"global_batch_size": 10}),
        "tensor, sequence": (SEQUENCE | LATER, {}),
        "tensor": ({"tensor_model_parallel_size": 2} | GPT2, {}),
        "tensor, sequence, zero-bubble": (SEQUENCE | EACH, ZERO_BUBBLE),
        "tensor, sequence, packed": (SEQUENCE, PACKED),
        "data, packed": ({}, PACKED),
        "data": ({}, {}),
        "data, sharded": (LATER, SHARDED),
        "data, sharded, interleaved": (EACH, SHARDED | INTERLEAVED),
        "data, sharded, zero-bubble": (EACH | LATER, SHARDED | ZERO_BUBBLE),
        "four stages, less on both": ({"num_layers": 6} | FIRST | LAST, {}),
        "four stages, less on the last, interleaved": (LAST_OF_SIX | VIRTUAL | {"num_layers": 14}, INTERLEAVED),
        "four stages, less on the last, zero-bubble": (LAST | {"num_layers": 7}, ZERO_BUBBLE),
        "data, sharded, less on the last, interleaved": (LAST_OF_SIX | VIRTUAL, SHARDED | INTERLEAVED),
        "tensor, sequence, less on the last": (SEQUENCE | LAST, {}),
        "two tokens more, four stages": (MTP, {}),
        "two tokens more, tensor, sequence": (MTP | GPT2 | SEQUENCE, {}),
        "two tokens more, data": (MTP, {}),
        "two tokens more, data, sharded": (MTP | GPT2, SHARDED),
    },
}


def settings(name, ranks):
    """Return a case's Config and Options, and whether it uses PyTorch's operators. One rank gets the undivided model."""
    model, training = next(cases[name] for cases in CASES.values() if name in cases)
    model, plain = SHAPE | model, model.get("plain", False)
    model.pop("plain", None)
    if ranks == 1:
        for key in [*SEQUENCE, *LATER, *EACH, *VIRTUAL, *FIRST, *LAST, "wgrad_deferral_limit"]:
            model.pop(key, None)
        training = {key: value for key, value in training.items() if key.endswith("batch_size") or key == "pack"}
    else:
        stages = 4 if "four stages" in name else 2
        model["pipeline_model_parallel_size"] = stages
    return Config(**model), Options(**(OPTIONS | training)), plain


def text():
    return numpy.random.default_rng(3).integers(0, SHAPE["vocab_size"], 400).astype(numpy.uint16)


def batches_of(options, divided):
    arguments = text(), options.global_batch_size, LENGTH, 5, divided.data.rank, divided.data.size, divided.device
    return PackedBatches(Documents(text(), END), *arguments) if options.pack else Batches(*arguments)


def trained(name, divided, steps=STEPS):
    """Train so many steps. Return losses, gradient norms, evaluation losses before and after, logits and parameter names."""
    config, options, plain = settings(name, divided.ranks)
    made = make(config, options, divided, plain and divided.ranks > 1)
    batches = batches_of(options, divided)
    before = divided.average(made.steps.loss(batches.of_step(7)))
    losses, norms = [], []
    for step in range(steps):
        loss, norm = made.steps.run(batches.of_step(step))
        made.update.step(3e-3)
        losses.append(divided.average(loss))
        norms.append(norm)
    made.model.eval()
    tokens = torch.from_numpy(text()[:20].astype(numpy.int64)).view(2, 10).to(divided.device)
    return {
        "losses": torch.stack(losses), "norms": torch.stack(norms), "before": before,
        "after": divided.average(made.steps.loss(batches.of_step(7))), "logits": made.steps.logits(tokens),
        "names": sorted(name for name, _ in made.model.named_parameters()),
    }  # fmt: skip


def watched(name, divided):
    """Train a case. Return its results, and what flush, dw_builder, finish and forward calls saw."""
    seen = {"flushed": [], "handed": [], "begun": [], "forwards": []}
    with (
        looked_at(DeferredWgrad, "flush", lambda deferred: seen["flushed"].append(len(deferred))),
        looked_at(DeferredWgrad, "dw_builder", lambda deferred: seen["handed"].append(len(deferred._kept))),
        looked_at(MainGrads, "finish", lambda grads: seen["begun"].append(grads._next)),
        looked_at(Model, "forward", lambda model: seen["forwards"].append(1)),
    ):
        return trained(name, divided) | seen


def looked_at(kind, name, look):
    """Patch a method to call `look` with the object before each call."""
    method = getattr(kind, name)

    def looked(self, *args, **options):
        look(self)
        return method(self, *args, **options)

    return mock.patch.object(kind, name, looked)


def train_case(group, name):
    """Train a case on the device that the backend has."""
    torch.set_default_device("cpu")  # batches are drawn there, as in a training run
    on_gpu = torch.distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return watched(name, layout._groups(settings(name, group.size())[0], device))


# ---- what it gives ----


@pytest.fixture(scope="module")
def found(world):
    """What each rank found, by case."""
    names = CASES[len(world)]
    by_rank = zip(*(world.run(train_case, name) for name in names), strict=True)
    return [dict(zip(names, of_rank, strict=True)) for of_rank in by_rank]


def test_ranks_do_what_one_does(found, world):
    """The device is that of one rank which does the same: on another kind weights start as other numbers."""
    device = torch.device("cuda", 0) if world.backend == "nccl" else torch.device("cpu")
    of_one = {}  # many cases are one run of an undivided model
    for name in CASES[len(world)]:
        case = repr(settings(name, 1)[:2])
        if case not in of_one:
            with onepass.use_backend("torch"):
                of_one[case] = trained(name, ParallelLayout(device))
        one = of_one[case]
        expected = {what: value.cpu() if isinstance(value, torch.Tensor) else value for what, value in one.items()}
        assert expected["before"] - expected["after"] > 1e-3
        near = 2e-2 if "bf16" in name else 1e-5
        for rank in found:
            for what in ("losses", "norms", "before", "after", "logits"):
                torch.testing.assert_close(rank[name][what], expected[what], rtol=near, atol=near, msg=f"{name}: {what}")
        assert sorted({each for rank in found for each in rank[name]["names"]}) == expected["names"], name


# each case trains one step from the previous case's checkpoint
HANDED_ON = {
    "1f1b": ("less on the last", "interleaved", "less on the last, zero-bubble, a stage each"),
    "two tokens more": ("two tokens more", "two tokens more, interleaved", "two tokens more, head later"),
}


def hand_on(group, folder, kind):
    """Train a step of each case of HANDED_ON[kind] and return their losses. The last checkpoint is left in the folder."""
    losses, found = [], None
    for step, name in enumerate(HANDED_ON[kind]):
        config, options, _ = settings(name, group.size())
        divided = layout._groups(config, torch.device("cpu"))
        made = make(config, options.replace(seed=OPTIONS["seed"] + step), divided)  # later cases load weights
        if found is not None:
            assert checkpoint.load(found, made, config, divided) == step
        loss, _ = made.steps.run(batches_of(options, divided).of_step(step))
        made.update.step(3e-3)
        losses.append(loss)
        checkpoint.save(folder / "checkpoints", step + 1, made, config, options, divided)
        found = checkpoint.find(folder)
    return torch.stack(losses)


@pytest.mark.parametrize("kind", HANDED_ON)
@pytest.mark.parametrize("world", PAIRS[:1], indirect=True, scope="module")
def test_a_run_goes_on_with_its_layers_divided_another_way(world, kind, tmp_path):
    losses = world.run(hand_on, tmp_path, kind)
    with onepass.use_backend("torch"):
        alone = ParallelLayout(torch.device("cpu"))
        expected = trained(kind, alone, len(HANDED_ON[kind]))
        config, options, _ = settings(kind, 1)
        made = make(config, options.replace(seed=9), alone)
        assert checkpoint.load(checkpoint.find(tmp_path), made, config, alone) == len(HANDED_ON[kind])
        after = made.steps.loss(batches_of(options, alone).of_step(7))
    for found in losses:
        torch.testing.assert_close(found, expected["losses"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, expected["after"], rtol=1e-5, atol=1e-5)


# ---- what happens on the way ----


@two_ranks
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("1f1b", [0, 1], [2, 3]),
        ("less on the first", [0], [1, 2, 3]),
        ("less on the last", [0, 1, 2], [3]),
        ("less on the last, interleaved", [0, 1, 3, 4], [2, 5]),
        ("less on the last, zero-bubble", [0, 1, 3, 4], [2, 5]),
    ],
)
def test_a_rank_has_the_layers_that_it_is_given(found, name, first, last):
    for rank, layers in zip(found, (first, last), strict=True):
        assert sorted({int(each.split(".")[1]) for each in rank[name]["names"] if each.startswith("layers.")}) == layers


@two_ranks
@pytest.mark.parametrize(
    ("name", "kept"),
    [("1f1b", None), ("head later", 4), ("head later, one", 1), ("head later, interleaved", 4), ("head later, zero-bubble", 4)],
)
def test_the_heads_gradients_wait_for_the_flush(found, name, kept):
    others, last = (rank[name]["flushed"] for rank in found)
    assert others == [] and last == ([] if kept is None else [kept] * STEPS)


@two_ranks
def test_weights_wait_for_the_zero_bubble_schedule(found):
    for rank in found:
        assert len(rank["zero-bubble"]["handed"]) == STEPS * 2 * 4  # of stages and microbatches
        assert all(rank["zero-bubble"]["handed"]) and not any(rank["zero-bubble, plain"]["handed"])
        assert rank["interleaved"]["handed"] == []


def test_reductions_begin_in_the_last_backward_of_a_ranks_only_stage(found):
    one, several = {
        2: (("1f1b", "seven microbatches"), ("interleaved", "zero-bubble")),
        4: (("data", "four stages"), ("data, sharded, zero-bubble",)),
    }[len(found)]
    for rank in found:
        assert all(rank[name]["begun"] == [1] * STEPS for name in one)
        assert all(rank[name]["begun"] == [0] * STEPS for name in several)


@two_ranks
def test_no_forward_is_run_to_learn_shapes(found):
    looks = 4 + 4 + 1  # two losses and the logits
    for name, stages in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
        assert all(len(rank[name]["forwards"]) == stages * (STEPS * 4 + looks) for rank in found)


# ---- what can't be ----


@pytest.mark.parametrize(
    ("layers", "stages", "each", "sizes"),
    [(4, 2, None, [2, 2]), (5, 2, None, [3, 2]), (7, 4, None, [2, 2, 2, 1]), (8, 2, 2, [2, 2, 2, 2]), (3, 3, 1, [1, 1, 1])],
)
def test_layers_are_divided_evenly_and_the_head_has_no_more(layers, stages, each, sizes):
    shape = SHAPE | {"num_layers": layers, "pipeline_model_parallel_size": stages}
    ranges = divided(Config(**shape, num_layers_per_virtual_pipeline_stage=each))
    assert [len(blocks) for blocks in ranges] == sizes
    assert [n for blocks in ranges for n in blocks] == [*range(layers)]


@pytest.mark.parametrize(
    ("layers", "ranks", "first", "last", "virtual", "sizes"),
    [
        (16, 2, None, 6, None, [10, 6]),
        (16, 2, 7, None, None, [7, 9]),
        (16, 2, 10, 6, None, [10, 6]),
        (13, 4, None, 1, None, [4, 4, 4, 1]),
        (13, 4, 4, None, None, [4, 3, 3, 3]),
        (9, 4, 2, 1, None, [2, 3, 3, 1]),
        (16, 2, None, 6, 2, [5, 3, 5, 3]),
        (18, 4, 4, 2, 2, [2, 3, 3, 1, 2, 3, 3, 1]),
        (16, 2, None, None, 4, [2] * 8),
    ],
)
def test_the_first_and_the_last_rank_have_as_many_layers_as_they_are_given(layers, ranks, first, last, virtual, sizes):
    shape = SHAPE | {"num_layers": layers, "pipeline_model_parallel_size": ranks}
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    ranges = divided(Config(**shape, **ends, virtual_pipeline_model_parallel_size=virtual))
    assert [len(blocks) for blocks in ranges] == sizes
    assert [n for blocks in ranges for n in blocks] == [*range(layers)]


def test_flags_and_files_say_how_layers_are_divided(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("num_layers: 8\npipeline_model_parallel_size: 3\nnum_layers_in_last_pipeline_stage: 2\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--config", str(file), "--decoder-first-pipeline-num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
    written = read_file(file, pipe=False)
    config, _ = merge_settings(None, written, vars(parser.parse_args(given)), False)
    assert [len(blocks) for blocks in divided(config)] == [2, 1, 1, 2, 1, 1]
    last = parser.parse_args([*given, "--decoder-last-pipeline-num-layers", "4"])
    with pytest.raises(CommandError, match="num_layers_in_last_pipeline_stage 4 must leave"):
        merge_settings(None, written, vars(last), False)


ONE_STAGE = {"virtual_pipeline_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("model", "training", "ranks", "said"),
    [
        ({}, {"pipeline_schedule": "zero-bubble"}, 1, "pipeline_schedule must be '1f1b' with pipeline_model_parallel_size 1.*'z"),
        (EACH, {}, 2, "num_layers_per_virtual_pipeline_stage must be None with pipeline_schedule '1f1b'.*but is 1"),
        (VIRTUAL, {}, 2, "virtual_pipeline_model_parallel_size must be None with pipeline_schedule '1f1b'.*but is 2"),
        (ONE_STAGE, {"pipeline_schedule": "interleaved"}, 2, "virtual_pipeline_model_parallel_size must be given.*but is 1"),
        ({}, {"pipeline_schedule": "interleaved"}, 2, "must be given with pipeline_schedule 'interleaved'.*but is None"),
        (
            {"num_layers_per_virtual_pipeline_stage": 2}, {"pipeline_schedule": "interleaved"}, 2,
            "several stages of num_layers 4, but is 2",
        ),
        ({}, {"use_fsdp": True}, 2, "use_fsdp must be false with pipeline_model_parallel_size 2"),
        ({}, {"cuda_graphs": True}, 2, "cuda_graphs must be false with pipeline_model_parallel_size 2"),
        ({}, {"global_batch_size": 2}, 2, "global_batch_size must have at least 2 microbatches.*but is 2: that is 1 of 2 "),
        ({}, {"global_batch_size": 6}, 4, "global_batch_size must have at least 4 microbatches.*but is 6: that is 3 of 2 "),
        (EACH, {"global_batch_size": 10, "pipeline_schedule": "interleaved"}, 2, "a multiple of 2 microbatches.*but is 10"),
        ({}, {"global_batch_size": 10, "pipeline_schedule": "zero-bubble"}, 2, "a multiple of 2 microbatches.*but is 10"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(model, training, ranks, said):
    config = Config(**SHAPE, **model, pipeline_model_parallel_size=ranks)
    with pytest.raises(CommandError, match=said):
        check(config, Options(**(OPTIONS | training)), 1)
    assert "\n" not in said


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_what_is_trained_here_is_not_refused(name):
    check(*settings(name, 2)[:2], data_ranks=1)


def test_one_rank_alone_is_not_refused():
    check(Config(**SHAPE), Options(global_batch_size=None), 3)
