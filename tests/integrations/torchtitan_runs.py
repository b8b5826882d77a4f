"""torchtitan's own Trainer on a CPU: some steps of a small Llama 3. Imports torchtitan."""

import dataclasses
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

if not torch.cuda.is_available():  # before other modules copy them: without a GPU torchtitan means CUDA
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**vars(torch.cpu) | {"current_device": lambda: 0})

if not hasattr(torch.distributed, "set_timeout"):  # newer than PyTorch 2.13; the trainer sets shorter ones after its first step
    torch.distributed.set_timeout = lambda timeout, group: None

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.config.configurable import Configurable
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.distributed import fsdp
from torchtitan.trainer import Trainer

_without_division = fsdp.disable_fsdp_gradient_division


def _by_sums(model):
    """gloo can't multiply before it sums, not even by 1."""
    _without_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = _by_sums

NAMES = ("norm", "feed_forward", "complex_rope", "loss", "attention")
BATCH, LENGTH, VOCABULARY = 4, 32, 2048


class Watch(MetricsProcessor):
    """Keeps what the trainer says of each step. torchtitan's own asks CUDA for its memory."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, **_):
        self.config, self.steps, self.color = config, [], utils.NoColor()
        self.device_memory_monitor = self
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    device_name = "cpu"

    def get_peak_stats(self):
        return type("Stats", (), {"max_reserved_gib": 0.0, "max_reserved_pct": 0.0})

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        self.steps.append((global_avg_loss, grad_norm))

    def close(self):
        pass


class Words(BaseDataLoader):
    """Random tokens in documents of random lengths; some labels are ignored."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        documents: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, seq_len, **_):
        self.documents, self.ranks, self.rank, self.size = config.documents, dp_world_size, dp_rank, local_batch_size
        self.length = seq_len

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        while True:
            shape = self.ranks * self.size, self.length
            tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=generator)
            labels = tokens[:, 1:].masked_fill(torch.rand(shape, generator=generator) < 0.1, -100)
            starts = torch.rand(shape, generator=generator) < (0.1 if self.documents else 0)
            starts[:, 0] = True
            at = torch.arange(self.length).expand(shape)
            positions = at - (at * starts).cummax(1).values
            mine = slice(self.rank * self.size, (self.rank + 1) * self.size)
            yield {"input": tokens[mine, :-1].contiguous(), "positions": positions[mine]}, labels[mine].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = get_vocab_size = encode


def new_config(folder, overrides=(), attention="flex", layers=2, ranks=1, **parallelism):
    spec = model_registry("debugmodel", attn_backend="flex" if attention == "sdpa" else attention)
    spec.model.layers = spec.model.layers[:layers]
    if attention == "sdpa":
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY), num_chunks=4),
        model_spec=spec, optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(local_batch_size=BATCH // ranks, seq_len=LENGTH, steps=3, mixed_precision_param="float32",
                                disable_cuda_graphs=True),
        dataloader=Words.Config(documents=attention != "sdpa"), metrics=Watch.Config(log_freq=1), tokenizer=NoTokenizer.Config(), dump_folder=str(folder),
    )
    config.lr_scheduler.warmup_steps = 1
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.activation_checkpoint = None
    config.checkpoint.enable = False
    config.override.imports = [f"onepass.integrations.torchtitan.{name}" for name in overrides]
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def train(config):
    """Return each step's loss and norm of gradients, and the trainer."""
    torch.autograd.set_multithreading_enabled(False)
    trainer = Trainer(config)
    trainer.train()
    return trainer.metrics_processor.steps, trainer
