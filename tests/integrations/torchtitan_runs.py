"""torchtitan's own Trainer, on a CPU: some steps of a small model. Imports torchtitan."""

import gc
import importlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan.tools import utils

if not torch.cuda.is_available():  # before others copy them: without a GPU torchtitan means CUDA
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**vars(torch.cpu) | {"current_device": lambda: 0})

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.distributed import fsdp
from torchtitan.models.common import attention
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import parallelize
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

OURS = "onepass.integrations.torchtitan"
NAMES = ("norm", "feed_forward", "complex_rope", "attention", "loss")
PACKED = ("norm", "feed_forward", "gqa", "loss")
BLOCK = ("block", "loss")
SETS = NAMES, PACKED, BLOCK
IN_FP8 = ("block in fp8", "loss")
BATCH, LENGTH, VOCABULARY, STEPS = 4, 32, 2048, 3


class Watch(MetricsProcessor):
    """Keeps the loss and the norm of gradients of each step. torchtitan's own asks CUDA for its memory."""

    device_name = "cpu"

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, **_):
        self.config, self.color, self.steps = config, utils.NoColor(), []
        self.device_memory_monitor, self.ntokens_since_last_log, self.data_loading_times = self, 0, []

    def get_peak_stats(self):
        return SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)

    def log(self, step, loss, largest_loss, norm, extra_metrics=None):
        self.steps.append((loss, norm))

    def close(self):
        """There is no file."""


class Words(BaseDataLoader):
    """Random tokens, in documents of random lengths or in one. Some labels are ignored."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        documents: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        self.config, self.rows, self.seen = config, local_batch_size, 0
        self.of_all, self.first = dp_world_size * local_batch_size, dp_rank * local_batch_size

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.seen)
            self.seen += self.of_all
            shape = self.of_all, LENGTH
            tokens = torch.randint(VOCABULARY, (self.of_all, LENGTH + 1), generator=generator)
            labels = tokens[:, 1:].masked_fill(torch.rand(shape, generator=generator) < 0.1, -100)
            starts = torch.rand(shape, generator=generator) < (0.1 if self.config.documents else 0.0)
            at = torch.arange(LENGTH).expand(shape)
            positions = at - (at * starts).cummax(1).values
            batch = [t[self.first : self.first + self.rows].contiguous() for t in (tokens[:, :-1], positions, labels)]
            yield {"input": batch[0], "positions": batch[1]}, batch[2]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        """Never called."""

    decode = get_vocab_size = encode


def apart(config):
    """Projections of q, k and v apart, for an attention's config."""
    fused = config.qkv_linear
    shared = {"in_features": fused.wqkv.in_features, "param_init": config.wo.param_init}
    q, kv = (Linear.Config(out_features=heads * fused.head_dim, **shared) for heads in (fused.n_heads, fused.n_kv_heads))
    return attention.QKVLinear.Config(head_dim=fused.head_dim, wq=q, wkv=kv)


def new_config(folder, names=(), kind="flex", ranks=1, model="llama3", fuse_qkv=True, **parallelism):
    """kind: of attention: "flex" and "varlen" see documents, "sdpa" whole sequences. ranks: that have data of their own."""
    registry = importlib.import_module(f"torchtitan.models.{model}").model_registry
    spec = registry("debugmodel", attn_backend="varlen" if kind == "varlen" else "flex")
    assert spec.model.vocab_size == VOCABULARY
    spec.model.layers = spec.model.layers[:2]
    if not fuse_qkv:
        for layer in spec.model.layers:
            layer.attention.qkv_linear = apart(layer.attention)
    if kind == "sdpa":
        for layer in spec.model.layers:
            layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    training = TrainingConfig(
        local_batch_size=BATCH // ranks, seq_len=LENGTH, steps=STEPS, mixed_precision_param="float32", disable_cuda_graphs=True
    )
    config = Trainer.Config(
        model_spec=spec, training=training, optimizer=default_adamw(lr=1e-3), dump_folder=str(folder),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY), num_chunks=4),
        dataloader=Words.Config(documents=kind != "sdpa"), metrics=Watch.Config(log_freq=1), tokenizer=NoTokenizer.Config(),
    )  # fmt: skip
    config.lr_scheduler.warmup_steps = 1
    config.debug.seed, config.debug.enable_structured_logging = 0, False
    config.activation_checkpoint = None
    chosen = {name: f"{OURS}.{name.removesuffix(' in fp8')}" for name in names}
    config.override.imports = [(path, {"precision": "fp8"}) if "fp8" in name else path for name, path in chosen.items()]
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def with_experts(config):
    """A Qwen 3's config with a mixture of experts in each layer."""
    spec = importlib.import_module("torchtitan.models.qwen3").model_registry("debugmodel_moe", attn_backend="flex").model
    for layer in config.model_spec.model.layers:
        layer.feed_forward, layer.moe = None, spec.layers[0].moe
    return config


@contextmanager
def on_cpu():
    """What torchtitan needs a GPU, NCCL or a newer PyTorch for, and what it leaves changed."""
    undivided = fsdp.disable_fsdp_gradient_division

    def by_sums(model):  # gloo can't multiply before it sums, not even by 1
        undivided(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def dense(q, k, v, *, block_mask, scale, enable_gqa, **_):  # FlexAttention has no backward on a CPU
        mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], q.device.type)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None

    with ExitStack() as stack:
        stack.enter_context(patch.object(fsdp, "disable_fsdp_gradient_division", by_sums))
        stack.enter_context(patch.object(attention.FlexAttention, "compiled_flex_attn", staticmethod(dense)))
        stack.enter_context(patch.object(attention, "_compiled_create_block_mask", create_block_mask))
        stack.enter_context(patch.object(_attention, "_compiled_create_block_mask", create_block_mask))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # as its init_distributed has it
        stack.enter_context(torch._dynamo.config.patch(capture_scalar_outputs=torch._dynamo.config.capture_scalar_outputs))
        stack.callback(gc.enable)
        stack.callback(torch._dynamo.reset)  # models are of one code, of which Dynamo compiles a few
        yield


@contextmanager
def without_fsdp():
    """Under spmd_types FSDP2 takes parameters over several ranks from a PyTorch newer than 2.13 on. Without it weights are drawn
    by parts."""

    with drawn_alike(), patch.object(parallelize, "apply_fsdp_to_decoder", lambda *_, **__: None):
        yield


@contextmanager
def drawn_alike():
    """Draw the same weights whatever the ranks share, but for those of which each has a part as a plain tensor."""

    def draw(self, name, parameter):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
        drawn = 0.05 * drawn + (parameter.dim() == 1)
        if isinstance(parameter, DTensor):
            drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements, src_data_rank=None)
        with torch.no_grad():
            parameter.copy_(drawn)

    with patch.object(Module, "_init_param", draw):
        yield


def train(config):
    """Return each step's loss and norm of gradients, and the model."""
    with on_cpu():
        trainer = Trainer(config)
        trainer.checkpointer.load(step=config.checkpoint.load_step)
        data = trainer.batch_generator(trainer.dataloader)
        while trainer.should_continue_training():
            trainer.step += 1
            trainer.train_step(data)
            trainer.checkpointer.save(trainer.step, last_step=trainer.step == config.training.steps)
        trainer.close()
    return trainer.metrics_processor.steps, trainer.model_parts[0]
