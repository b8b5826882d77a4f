"""One of two ranks: stock under tensor parallelism, then onepass, without and with sequence parallelism. Prints what differs."""

import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"


def main(rank: int, store: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from test_megatron import KINDS, config_of, local_spec, model_of

    import onepass
    from onepass.integrations import megatron

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    random.get_cuda_rng_tracker().fork = lambda name="": torch.random.fork_rng(devices=[])
    group = parallel_state.get_tensor_model_parallel_group()

    def step(model):
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        positions = torch.arange(16)[None].expand(2, -1)
        loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        squares = []
        for name, parameter in model.named_parameters():
            of_heads = ".q_layernorm." in name or ".k_layernorm." in name  # each rank has some of the heads
            if of_heads or getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=group)
            squares.append(parameter.grad.double().square().sum())
        return float(loss.detach()), float(sum(squares) ** 0.5)

    kind = {
        "rms": KINDS["RMSNorm, swiglu"], "layer": KINDS["LayerNorm, gelu"], "heads": KINDS["RMS qk norm, GQA"],
        "few": KINDS["RMSNorm, swiglu"] | {"num_query_groups": 1}, "foretold": KINDS["RMSNorm, swiglu"] | {"mtp_num_layers": 2},
    }[sys.argv[3]]  # fmt: skip
    config = config_of(**kind, tensor_model_parallel_size=2)
    stock = step(model_of(config, local_spec(config)))
    installed = megatron.install()
    with onepass.use_backend("torch"):
        for sequence in (False, True):
            config = config_of(**kind, tensor_model_parallel_size=2, sequence_parallel=sequence)
            for spec, head in ((local_spec, False), (megatron.gpt_layer_spec, True)):
                model = model_of(config, spec(config))
                if head:
                    said = str(megatron.apply(model))
                    few = sys.argv[3] == "few"
                    assert ("num_query_groups is 1 for 2 tensor-parallel ranks" if few else "rotation in it") in said, said
                ours = step(model)
                off = [abs(a - b) / abs(b) for a, b in zip(ours, stock, strict=True)]
                print(f"sequence={sequence} head={head} stock={stock} ours={ours}", flush=True)
                assert off[0] < 2e-6 and off[1] < 1e-6, off
    x, dy = (torch.randn(3, 4, 2, n, generator=torch.Generator().manual_seed(7 + n)) for n in (8, 6))  # 3 microbatches
    expected = torch.einsum("msbo,msbi->oi", dy, x)
    weight = torch.nn.Parameter(torch.zeros(6, 8))
    weight.main_grad = torch.zeros(6, 8)
    from megatron.core.pipeline_parallel import schedules

    given = [each.chunk(2)[rank] for each in x], [*dy]  # this rank's rows of x, and all of dy
    schedules.drain_embedding_wgrad_compute(config, *given, weight, group)  # with sequence parallelism
    torch.testing.assert_close(weight.main_grad, expected)
    installed.undo()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
