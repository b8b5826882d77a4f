"""Tiny models of transformers' families, and the table of docs/huggingface/families.md: what `apply` replaces in each.

    python -m onepass.integrations.huggingface.families [FAMILY ...]
    python -m onepass.integrations.huggingface.families --page docs/huggingface/families.md

The first prints rows for the installed transformers, the second writes all of them into the page. A family whose loss or
gradients differ from transformers' own has no row: the command names it and fails.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.applied import apply, layers_of
from onepass.integrations.huggingface.patches import AppliedRow
from onepass.runtime.backend import use_backend

VOCABULARY = 97
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, **SPECIAL,
}  # fmt: skip
MOE = SMALL | {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
_MIXED = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = _MIXED | {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 40}
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_WINDOW_BESIDE_WHOLE = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {  # by the name of the configuration's class: small sizes of each part that the family has
    "Llama": SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Llama4Text": SMALL | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 40, "head_dim": 8,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 64, "no_rope_layers": [1, 0],
    },
    "Qwen2": SMALL,
    "Qwen2Moe": _MIXED | _SHARED,
    "Qwen3": SMALL | {"head_dim": 16},
    "Qwen3Moe": MOE | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "Qwen3Next": _MIXED | _DELTA | _SHARED,
    "Qwen3_5Text": SMALL | _DELTA,
    "Qwen3_5MoeText": _MIXED | _DELTA | _SHARED,
    "Mistral": SMALL | {"sliding_window": 5},
    "Ministral3": SMALL | {"head_dim": 8},
    "Mixtral": MOE | {"num_local_experts": 4},
    "Gemma": SMALL | {"head_dim": 16},
    "Gemma2": SMALL | {"head_dim": 16, "sliding_window": 5},
    "Gemma3Text": SMALL | {"head_dim": 16, "sliding_window": 5},
    "Gemma4Text": SMALL | {
        "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_hidden_layers": 4, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": True,
    },
    "Phi3": SMALL,
    "GptOss": MOE | {"num_local_experts": 4, "head_dim": 16, "sliding_window": 5},
    "DeepseekV2": _MIXED | _LATENT | {
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "v_head_dim": 16,
    },
    "DeepseekV3": _DEEPSEEK | _LATENT,
    "Glm4MoeLite": _DEEPSEEK | _LATENT | {"v_head_dim": 16},
    "MiniCPM3": SMALL | _LATENT | {"num_key_value_heads": 4},
    "Youtu": SMALL | _LATENT | {"num_key_value_heads": 4},
    "KimiLinear": _DEEPSEEK | _LATENT | {
        "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention"],
    },
    "Glm4": SMALL | {"head_dim": 8},
    "Glm4Moe": _DEEPSEEK | {"head_dim": 16},
    "Ernie4_5_Moe": _MIXED | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
    "MiniMax": _MIXED | {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "MiniMaxM2": _MIXED | {"num_local_experts": 4, "head_dim": 8},
    "Olmo2": SMALL,
    "Olmo3": SMALL | _WINDOW_BESIDE_WHOLE,
    "SmolLM3": SMALL | {"no_rope_layers": [1, 0]},
    "Granite": SMALL | {"residual_multiplier": 0.5, "logits_scaling": 3.0},
    "GraniteMoe": _MIXED | {"num_local_experts": 4},
    "GraniteMoeHybrid": _MIXED | _MAMBA_2 | {
        "num_local_experts": 4, "mamba_d_head": 16, "shared_intermediate_size": 40, "layer_types": ["mamba", "attention"],
    },
    "NemotronH": _MIXED | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "hybrid_override_pattern": "M*E", "head_dim": 8,
        "moe_shared_expert_intermediate_size": 40, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
        "n_groups": 1, "chunk_size": 8,
    },
    "FalconH1": SMALL | _MAMBA_2 | {"mamba_d_head": 8, "mamba_d_ssm": 32, "head_dim": 8},
    "Mamba2": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8,
        "n_groups": 2, "chunk_size": 8,
    },
    "Bamba": SMALL | _MAMBA_2 | {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "Zamba2": SMALL | {
        "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 8, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"], "adapter_rank": 4,
    },
    "Lfm2": SMALL | {"layer_types": ["conv", "full_attention"]},
    "Cohere": SMALL,
    "StableLm": SMALL,
    "Starcoder2": SMALL | {"residual_dropout": 0.0},
    "GPTNeoX": SMALL | {"rotary_pct": 0.5},
    "GPT2": {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
    },
    "OPT": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}  # fmt: skip


def tiny_model(family: str = "Llama", **options: Any) -> nn.Module:
    """Return a model in training mode, with random norm weights and biases too."""
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**{**SPECIAL, **FAMILIES.get(family, {}), **options})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(masked: bool = False, tokens: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(7))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :3] = -100
    if masked:
        mask[0, -4:] = 0
        labels[0, -4:] = -100
    return {"input_ids": ids, "labels": labels, **({"attention_mask": mask} if masked else {})}


Step = tuple[Tensor, dict[str, Tensor]]


def step(model: Any, **given: Any) -> Step:
    """Return the loss and each parameter's gradient. torch.compile's prefix is removed from the names."""
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    plain = {name.replace("_orig_mod.", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: grad.clone() for name, grad in plain.items()}


def assert_alike(found: Step, expected: Step, tolerance: float = 2e-5) -> None:
    """Assert that losses and gradients are close. Gradients of pure rounding, such as a key bias's, are not compared."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance, check_dtype=False)
    assert found[1].keys() == expected[1].keys()
    largest = max(grad.norm() for grad in expected[1].values())
    for name, grad in expected[1].items():
        apart = (found[1][name].float() - grad.float()).norm()
        assert apart <= tolerance * grad.float().norm() + 1e-6 * largest, f"{name}: {apart / grad.norm():.1e}"


# ---- the table ----

TABLE = "families"  # its place in the page
_COLUMNS = {"norms": ("norm",), "MLP, experts": ("mlp",), "attention": ("rope", "qkv"), "loss": ("loss",)}
_SHORTER = {
    "norm_linear, with the residual's sums": "norm_linear with residual",
    "rms_norm, with the residual's sums": "rms_norm with residual",
    "documents for packed and padded masks": "documents",
    "documents for padded masks": "documents of padded batches",
    "its norms stay apart: what it makes of its children is not known": "its formula is not known",
    "its norms stay apart: none is of a sum, or before one layer that takes it in": "nothing of it joins its norms",
    "its norms stay apart: several layers read one's result, which is computed and kept once": "several layers read its norm",
    "not all of its layers pass a mask on to an attention that is causal": "its masks, as not all layers are attention's",
    "what its input goes to are not just linear layers": "q, k and v are not just linear layers of its input",
}


def table(families: Iterable[str] = tuple(FAMILIES)) -> str:
    """Return the table of these families. Raise AssertionError where numbers differ from transformers' own."""
    headings = ["family", *_COLUMNS, "left, because"]
    return "\n".join([_line(headings), "|---" * len(headings) + "|", *(_line(cells_of(family)) for family in families)])


def cells_of(family: str) -> list[str]:
    """Apply onepass to the family's tiny model, compare its numbers with transformers', and return the table's cells."""
    with torch.random.fork_rng(devices=[]), use_backend("torch"):
        torch.manual_seed(0)
        model = tiny_model(family)
        before = copy.deepcopy(model)
        rows = apply(model).rows
        for given in (batch(), batch(masked=True)):
            try:
                assert_alike(step(model, **given), step(before, **given))
            except AssertionError as error:
                raise AssertionError(f"{family}: {error}") from error
    replaced = [row for row in rows if row.by is not None]
    parts = (_words(row for row in replaced if row.part in kinds) for kinds in _COLUMNS.values())
    prefix = type(model).__name__.partition("For")[0]
    left = [f"{row.kind.removeprefix(prefix)}: {_shorter(row.why)}" for row in rows if row.why is not None]
    return [family, *parts, "; ".join(dict.fromkeys(left))]


def _shorter(words: str) -> str:
    return re.sub("|".join(_SHORTER), lambda match: _SHORTER[match[0]], words)


def _words(rows: Iterable[AppliedRow]) -> str:
    """Return what runs, once each, with the layers where others of the same class run by something else."""
    kinds: dict[tuple[str, str], dict[str, list[AppliedRow]]] = {}
    for row in rows:
        kinds.setdefault((row.part, row.kind), {}).setdefault(_shorter(row.by or ""), []).append(row)
    words = [
        f"{by} in layer {layers_of(those)}" if len(found) > 1 else by for found in kinds.values() for by, those in found.items()
    ]
    return "; ".join(dict.fromkeys(words))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the cells of each family in a page."""
    lines = _place(page)[1].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row for row in cells}


def with_table(page: str, made: str) -> str:
    before, _, after = _place(page)
    return f"{before}\n{made}\n{after}"


def _place(page: str) -> tuple[str, str, str]:
    start, end = f"<!-- {TABLE} -->", f"<!-- /{TABLE} -->"
    before, _, rest = page.partition(start)
    inside, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page must have a place from {start} to {end}")
    return before + start, inside, end + after


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m onepass.integrations.huggingface.families", description=__doc__)
    parser.add_argument("family", nargs="*", help="the name of a configuration's class less `Config`; none: all")
    parser.add_argument("--page", type=Path, help="write all rows into this page's table")
    given = parser.parse_args(arguments)
    try:
        made = table(given.family or FAMILIES)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    if given.page is None:
        print(made)
    else:
        given.page.write_text(with_table(given.page.read_text(encoding="utf-8"), made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
