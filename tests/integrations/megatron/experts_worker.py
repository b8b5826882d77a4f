"""One of two ranks that share experts, or parts of each: stock's loop, then onepass and moe_permute_fusion. Prints both."""

import os
import sys
import types
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
if "TRITON_INTERPRET" in os.environ:
    import onepass.testing.interpreter  # noqa: F401  # biases' kernels
torch.cuda.current_device = lambda: "cpu"
event = types.SimpleNamespace(synchronize=lambda: None)
stream = types.SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
torch.cuda.current_stream, torch.cuda.stream = lambda: stream, lambda _: nullcontext()


class OnCPU:
    """torch, without the GPU on which a dispatcher with moe_permute_fusion has its indices."""

    device = staticmethod(lambda name: torch.device("cpu"))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def main(rank: int, store: str, kind: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher
    from test_megatron import KINDS, config_of, model_of, step

    import onepass
    from onepass.integrations import megatron

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    token_dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
        t.numpy() if as_numpy and isinstance(t, torch.Tensor) else t
    )
    token_dispatcher.torch = OnCPU()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    of_tensors = kind.startswith("tensor")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2 if of_tensors else 1,
        expert_model_parallel_size=1 if of_tensors else 2,
        expert_tensor_parallel_size=2 if of_tensors else 1,
    )
    random.get_cuda_rng_tracker().fork = lambda name="": torch.random.fork_rng(devices=[])
    options = KINDS["experts"] | {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
    options |= {"moe_token_dispatcher_type": kind.rpartition(" ")[2]}
    if of_tensors:
        options |= {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True}
    else:
        options |= {"expert_model_parallel_size": 2, "add_bias_linear": True, "moe_shared_expert_intermediate_size": None}
    if kind.startswith("padded"):
        options |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    found, installed = [], megatron.install(experts=False)  # stock's norms refuse sequence parallelism
    with onepass.use_backend("torch"):
        for grouped in (False, True):
            config = config_of(**options | {"moe_grouped_gemm": grouped, "moe_permute_fusion": grouped})
            model = model_of(config, megatron.gpt_layer_spec(config))
            experts = model.decoder.layers[0].mlp.experts
            assert type(experts).__name__ == ("GroupedSequentialMLP" if grouped else "SequentialMLP")
            assert all(parameter.allreduce is of_tensors for parameter in experts.parameters())
            found.append((step(model), {name: value for name, value in model.state_dict().items() if value is not None}))
    (stock, theirs), (ours, own) = found
    assert theirs.keys() == own.keys()
    torch.testing.assert_close(own, theirs, rtol=0, atol=0)  # each expert starts as it would
    off = [abs(a - b) / abs(b) for a, b in zip(ours, stock, strict=True)]
    print(f"{kind}: stock={stock} ours={ours}", flush=True)
    assert off[0] < 2e-6 and off[1] < 1e-6, off
    installed.undo()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
