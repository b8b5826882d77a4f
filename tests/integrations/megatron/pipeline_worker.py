"""One of two pipeline stages: stock, then onepass, plain and with deferred embedding gradients, at 1 and 3 microbatches."""

import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")


def on_cpu(make):
    def made(*args, **options):
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *_: None
torch.zeros, torch.empty, torch.tensor = map(on_cpu, (torch.zeros, torch.empty, torch.tensor))
torch.Tensor.cuda = lambda self, *args, **options: self


def main(rank: int, store: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import random
    from test_megatron import KINDS, config_of, local_spec

    import onepass
    from onepass.integrations import megatron

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    random.get_cuda_rng_tracker().fork = lambda name="": torch.random.fork_rng(devices=[])
    data = torch.randint(64, (3, 2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)

    def run(spec, head, microbatches, **options):
        """Return the losses' sum and the norm of this stage's gradients."""
        config = config_of(**KINDS["RMSNorm, swiglu"], pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, **options)
        config.finalize_model_grads_func = lambda *args, **options: None
        torch.manual_seed(0)
        model = GPTModel(
            config=config, transformer_layer_spec=spec(config), vocab_size=64, max_sequence_length=16, pre_process=rank == 0,
            post_process=rank == 1, share_embeddings_and_output_weights=False, position_embedding_type="rope",
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        if head:
            megatron.apply(model)
        losses = []

        def forward(batches, model):
            tokens = next(batches)
            positions = torch.arange(16)[None].expand(2, -1)
            output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

            def mean(output):
                losses.append(float(output.detach().mean()))
                return output.mean(), {}

            return output, mean

        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(data[:microbatches]), model=[model], num_microbatches=microbatches,
            seq_length=16, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        grads = [p.main_grad if p.grad is None else p.grad + p.main_grad for p in model.parameters()]
        return sum(losses), float(torch.stack([grad.double().norm() for grad in grads]).norm())

    deferral = {"gradient_accumulation_fusion": True, "defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 0}
    with onepass.use_backend("torch"):
        for microbatches in (1, 3):
            stock = run(local_spec, False, microbatches)
            installed = megatron.install()
            for options in ({}, deferral):
                ours = run(megatron.gpt_layer_spec, True, microbatches, **options)
                print(microbatches, options, stock, ours, flush=True)
                assert all(abs(a - b) <= 2e-6 * abs(b) for a, b in zip(ours, stock, strict=True))
            installed.undo()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
