"""One of two ranks that share a mixer's heads: onepass's, without and with sequence parallelism, beside Megatron's own, whole."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"


def main(rank: int, store: str, kind: str) -> None:
    from integrations.megatron.test_megatron import config_of
    from integrations.megatron.test_mixers import KINDS_OF_MIXERS
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import RowParallelLinear, random

    import onepass
    from onepass.integrations import megatron

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    random.get_cuda_rng_tracker().fork = lambda name="": torch.random.fork_rng(devices=[])
    group = parallel_state.get_tensor_model_parallel_group()
    shared = ProcessGroupCollection.use_mpu_process_groups()
    alone = copy.copy(shared)
    alone.tp = [dist.new_group([each]) for each in range(2)][rank]
    options, stand_ins, layer, theirs, sections = KINDS_OF_MIXERS[kind]
    stand_ins(pytest.MonkeyPatch())

    def mixer(stock, **parallel):
        config = config_of(**options, **parallel)
        spec = layer(megatron.hybrid_stack_spec(config))
        submodules = copy.copy(spec.submodules)
        if stock:
            submodules.out_proj = RowParallelLinear
        torch.manual_seed(0)
        made = {"d_model": 32} if kind == "mamba" else {}
        built = theirs() if stock else spec.module
        return built(config, submodules, **made, layer_number=1, pg_collection=alone if stock else shared)

    def part(name, whole):
        """This rank's part of a parameter of all heads."""
        if name.endswith("layer_norm_weight") or name == "out_norm.weight":
            return whole
        if name == "out_proj.weight":
            return whole.chunk(2, 1)[rank]
        pieces = sections(name)
        return torch.cat([each.chunk(2)[rank] for each in (whole.split(pieces) if pieces else [whole])])

    x, dy = (torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))

    def run(module, x, dy):
        given = (None,) if kind == "delta" else ()
        leaf = x.clone().requires_grad_()
        y, _ = module(leaf, *given)
        y.backward(dy)
        return y.detach(), leaf.grad

    whole = mixer(stock=True)
    generator = torch.Generator().manual_seed(3)
    for parameter in whole.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    with onepass.use_backend("torch"):
        expected = run(whole, x, dy)
        for sequence in (False, True):
            ours = mixer(stock=False, tensor_model_parallel_size=2, sequence_parallel=sequence)
            assert ours.why_left() is None, ours.why_left()
            of_whole = dict(whole.named_parameters())
            for name, parameter in ours.named_parameters():
                parameter.data.copy_(part(name, of_whole[name].detach()))
            given = [each.chunk(2)[rank] if sequence else each for each in (x, dy)]
            for found, each in zip(run(ours, *given), expected, strict=True):
                torch.testing.assert_close(found, each.chunk(2)[rank] if sequence else each, rtol=1e-4, atol=2e-5)
            for name, parameter in ours.named_parameters():
                if name == "out_norm.weight" or getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad, group=group)
                wanted = part(name, of_whole[name].grad)
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=5e-5, msg=lambda why, name=name: name + why)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
