"""The loss step of TRL's GRPO on its fused head, by TRL's kernels and by onepass's, of bf16 and fp32 logits: time, memory, loss.

    python benchmarks/trl_head.py [--shape 8192 4096 151936] [--softcap C] [--frozen-head]

The model is an embedding, a norm and a head of TRL's making (`add_fused_lm_head`): the head is nearly all there is. A step is
a forward with log-probabilities and entropies, GRPO's clipped loss, and a backward. Shares are of TRL's time in the same process.
Without a GPU it runs small, to show that it runs. Needs trl 1.15 or newer.
"""

import argparse
import statistics
import time
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from onepass.integrations import trl as onepass_trl

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TEMPERATURE, CLIP = 0.9, 0.2


def new_model(inner, vocabulary, softcap, frozen):
    torch.manual_seed(0)
    family = "llama" if softcap is None else "gemma2"
    more = {} if softcap is None else {"final_logit_softcapping": softcap}
    config = AutoConfig.for_model(
        family, hidden_size=inner, vocab_size=vocabulary, num_hidden_layers=0, intermediate_size=inner, tie_word_embeddings=False,
        num_attention_heads=inner // 64, num_key_value_heads=inner // 64, **more,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    model.get_input_embeddings().requires_grad_(False)  # its gradient is no part of the head
    model.get_output_embeddings().requires_grad_(not frozen)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model.train()


def step(model, ids, old, advantages):
    """Return the loss, with the gradients in `.grad`."""
    output = model(input_ids=ids, labels=ids, fused_lm_head=True)
    ratio = (output.log_probs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    loss.backward()
    return loss.detach()


def measured(model, run, rounds, unmeasured=5):
    """Return the median time in ms, the peak of memory in GiB above what was there, the loss, and the norm of gradients."""
    times = []
    for turn in range(rounds + unmeasured):
        model.zero_grad(set_to_none=True)
        if turn == unmeasured and ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        if ON_GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = run()
        if ON_GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if ON_GPU else float("nan")
    norm = sum(p.grad.float().square().sum() for p in model.parameters() if p.grad is not None).sqrt()
    return 1e3 * statistics.median(times[unmeasured:]), peak, float(loss), float(norm)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = (8192, 4096, 151936) if ON_GPU else (256, 64, 1024)
    parser.add_argument("--shape", type=int, nargs=3, default=shape, metavar=("TOKENS", "HIDDEN", "VOCABULARY"))
    parser.add_argument("--softcap", type=float, help="of Gemma 2's logits")
    parser.add_argument("--frozen-head", action="store_true", help="as under LoRA")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    tokens, inner, vocabulary = args.shape
    model = new_model(inner, vocabulary, args.softcap, args.frozen_head)
    ids = torch.randint(vocabulary, (1, tokens + 1), device=DEVICE)
    with torch.no_grad():
        old = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    old = old + 0.1 * torch.randn_like(old)
    run = partial(step, model, ids, old, torch.randn(1, tokens, device=DEVICE))
    print(f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, {tokens} x {inner} x {vocabulary}, {model.dtype}")
    found = {}
    for name in ("TRL", "onepass", "fp32 head", "TRL again"):
        installed = None if "TRL" in name else onepass_trl.install(fp32_head=name == "fp32 head")
        found[name] = measured(model, run, args.rounds)
        if installed is not None:
            installed.undo()
    print(f"fp32 head over onepass: {found['fp32 head'][0] / found['onepass'][0]:.3f}")
    for name, (ms, peak, loss, norm) in found.items():
        share = ms / found["TRL"][0]
        print(f"{name:10} {ms:9.2f} ms, {share:.3f} of TRL's; {peak:6.2f} GiB; loss {loss:.6f}, norm of gradients {norm:.5f}")


if __name__ == "__main__":
    main()
