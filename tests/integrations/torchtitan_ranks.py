"""Ranks of tests/integrations/test_torchtitan.py: stock, then onepass, under FSDP2 and tensor parallelism."""

import contextlib
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from parallel.cpu_ring import known_to_cpus
from parallel.meeting import join

import onepass

TP = {"tensor_parallel_degree": 2}
PLAIN = {"enable_sequence_parallel": False}
CASES = {  # how the ranks share, and whether they compile; with each set of overrides
    "fsdp": ({"spmd_backend": "partial_dtensor"}, False),
    "fsdp, compiled": ({"spmd_backend": "partial_dtensor"}, True),
    "tp, sp": ({"spmd_backend": "partial_dtensor", **TP}, False),
    "tp, sp, compiled": ({"spmd_backend": "partial_dtensor", **TP}, True),
    "tp": ({"spmd_backend": "partial_dtensor", **TP, **PLAIN}, False),
    "spmd_types: tp, sp": ({"spmd_backend": "spmd_types", **TP}, False),
    "spmd_types: tp, sp, compiled": ({"spmd_backend": "spmd_types", **TP}, True),
    "spmd_types: tp": ({"spmd_backend": "spmd_types", **TP, **PLAIN}, False),
}
EP = {"spmd_backend": "partial_dtensor", "expert_parallel_degree": 2}
OF_EXPERTS = {"ep": EP, "tp and ep": EP | TP, "experts, fsdp": CASES["fsdp"][0], "experts, tp, sp": CASES["tp, sp"][0]}

WHOLE = 256  # tokens of a sequence that ranks share: FlexAttention's masks are of blocks of 128
CONTEXT = {  # the backend, torchtitan's attention, the model, and the overrides
    "flex": ("partial_dtensor", "flex", "llama3", ("block", "loss")),
    "flex, parts": ("partial_dtensor", "flex", "llama3", ("norm", "feed_forward", "complex_rope", "loss")),
    "sdpa": ("partial_dtensor", "sdpa", "llama3", ("block", "loss")),
    "flex, norms of heads": ("partial_dtensor", "flex", "qwen3", ("block", "loss")),
    "spmd_types: flex": ("spmd_types", "flex", "llama3", ()),
    "spmd_types: flex, block": ("spmd_types", "flex", "llama3", ("block", "loss")),
}


def shared_sequences(runs, ranks, folder):
    """Return the steps of each case of context parallelism, and the words with which others are refused."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch, known_to_cpus(), onepass.use_backend("torch"):
        monkeypatch.setattr(runs, "LENGTH", WHOLE)
        for case, (spmd, kind, model, names) in CONTEXT.items():
            config = runs.new_config(folder, names, kind, 1, model, spmd_backend=spmd, context_parallel_degree=ranks)
            with runs.without_fsdp() if spmd == "spmd_types" else runs.drawn_alike():
                found[case] = runs.train(config)[0]
        for spmd in ("partial_dtensor", "spmd_types"):
            config = runs.new_config(folder, (), "flex", 1, spmd_backend=spmd, context_parallel_degree=ranks)
            config.override.imports = [(f"{runs.OURS}.block", {"flex_as_documents": True})]
            with pytest.raises(NotImplementedError) as refused:
                runs.train(config)
            found[f"{spmd}: documents"] = str(refused.value)
    return found


def run(rank, ranks, folder, backend):
    os.environ |= {"LOCAL_RANK": str(rank)}
    warnings.simplefilter("ignore")
    join(rank, ranks, folder, backend)
    from integrations import torchtitan_runs as runs

    found = {}
    for case, (parallelism, compiled) in CASES.items():
        plain = parallelism["spmd_backend"] == "spmd_types"
        for names in ((), *runs.SETS, runs.IN_FP8):
            kind = "varlen" if names else "flex"
            shared = 1 if "tensor_parallel_degree" in parallelism else ranks
            config = runs.new_config(folder, names, kind, shared, **parallelism)
            config.compile.enable, config.compile.backend = compiled, "aot_eager"
            with onepass.use_backend("torch"), runs.without_fsdp() if plain else contextlib.nullcontext():
                found[case, names] = runs.train(config)[0]
    for case, parallelism in OF_EXPERTS.items():
        for names in ((), ("experts",)):
            shared = 1 if "tensor_parallel_degree" in parallelism else ranks
            config = runs.with_experts(runs.new_config(folder, names, "sdpa", shared, "qwen3", **parallelism))
            with onepass.use_backend("torch"):
                found[case, names] = runs.train(config)[0]
    found |= shared_sequences(runs, ranks, folder)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
