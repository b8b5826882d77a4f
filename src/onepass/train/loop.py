"""A training run: it prepares text and model, runs steps, evaluates, logs, and saves checkpoints and text samples."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from onepass.gpt import Config
from onepass.gpt.settings import written_yaml
from onepass.train import checkpoint, stages, text
from onepass.train.batches import Batches
from onepass.train.layout import ParallelLayout
from onepass.train.live import Live
from onepass.train.options import Options
from onepass.train.peak import MatrixPeak
from onepass.train.record import Line, Record
from onepass.train.samples import TextSample, write
from onepass.train.setup import make
from onepass.train.threads import CpuThreads
from onepass.train.updates import learning_rate


class Diverged(Exception):
    """The loss is infinite or NaN."""


class _Ended(NamedTuple):
    """A launched step. Logging it reads loss and norm, which waits for the GPU."""

    step: int
    loss: Tensor
    norm: Tensor
    lr: float


class TrainRun:
    """One training run of this rank.

    Args:
        folder: the output folder.
        tokens: the folder of tokenised text, which several runs may share; by default in `folder`.
        plain: train with PyTorch operators, as in `onepass.train.setup.make`.
        resume: a checkpoint to continue from.
        threads: adjusts the number of CPU threads during the run.
    """

    def __init__(
        self, config: Config, options: Options, layout: ParallelLayout, folder: Path, console: Console, *,
        tokens: Path | None = None, plain: bool = False, resume: Path | None = None,
        threads: CpuThreads | None = None,
    ) -> None:  # fmt: skip
        self.config, self.options, self.layout, self.folder, self.console = config, options, layout, folder, console
        self.plain, self.resume, self.threads = plain, resume, threads
        self.size = stages.sequences(config, options, layout.data.size)
        self._tokens = tokens or folder / "tokens"
        self.stopped = self._asked_to_stop = False
        self._untold: _Ended | None = None
        self._waits_later = layout.device.type == "cuda"

    def train(self) -> list[Line]:
        """Train, and return the logged steps. SIGTERM ends the run early, with a checkpoint."""
        layout, options = self.layout, self.options
        peak = MatrixPeak(layout.device, self.config.dtype) if layout.first else None
        flops = self.config.flops_per_token(options.seq_length)
        with Live(self.console, options.train_iters, flops, peak) as self.live, self._stopping():
            self.tokens = self._text()
            self._write_settings()
            self.trained = make(self.config, options, layout, self.plain)
            first = 0 if self.resume is None else checkpoint.load(self.resume, self.trained, self.config, layout)
            self.record = Record(self.folder, first) if layout.first else None
            try:
                self._steps(first)
            finally:
                if self.record is not None:
                    self.record.close()
        return [] if self.record is None else self.record.lines

    def let_go(self) -> None:
        """Free the model and the optimizer, so that other models can use their memory."""
        del self.trained

    def _text(self) -> text.Tokens:
        """Tokenise the text on the first rank, and load it on all ranks."""
        if self.layout.first:
            text.prepare(self._tokens, self.options.data, self.config.vocab_size, self.options.seq_length, self.live.told)
        self.layout.wait_for_all()
        return text.load(self._tokens, self.config.vocab_size)

    def _write_settings(self) -> None:
        """Write config.yaml. Call it after the text is prepared, so that a run that fails for its text leaves no files."""
        if self.layout.first and not self.plain:
            (self.folder / "config.yaml").write_text(written_yaml({**self.config.to_dict(), **self.options.to_dict()}))

    def batches(self, what: str = "train") -> Batches:
        options, data = self.options, self.layout.data
        seed = options.seed if what == "train" else options.seed + 1
        numbers = self.tokens.train if what == "train" else self.tokens.valid
        return Batches(numbers, self.size, options.seq_length, seed, data.rank, data.size, self.layout.device)

    def _steps(self, first: int) -> None:
        options, batches = self.options, self.batches()
        self._began = time.perf_counter()
        self._wind(first)
        for step in range(first, options.train_iters):
            self._seed(step)
            loss, norm = self.trained.steps.run(batches.of_step(step))
            lr = learning_rate(step, options)
            self.trained.update.step(lr)
            self._tell()  # logs the previous step: the GPU runs the current one while the host waits
            done, last = step + 1, step + 1 == options.train_iters
            stop = self._told_to_stop()
            evaluate = bool(options.eval_iters) and (last or (bool(options.eval_interval) and done % options.eval_interval == 0))
            save = last or stop or (options.save_interval and done % options.save_interval == 0)
            if evaluate or stop or last or done % options.log_interval == 0:
                self._untold = _Ended(step, loss, norm, lr)
            if evaluate or save or not self._waits_later:
                self._tell(evaluate)
            if save:
                checkpoint.save(self.folder / "checkpoints", done, self.trained, self.config, options, self.layout)
                self._wind(done)
            if stop:
                self.stopped = True
                self.live.say(f"stopped after step {done}; go on with --resume {self.folder}")
                return

    def _wind(self, done: int) -> None:
        """Restart the throughput measurement. Time before this call was not training, or is logged already."""
        self._last, self._since = time.perf_counter(), done

    def _seed(self, step: int) -> None:
        """Seed dropout from the step's number, so that a resumed run drops the same elements."""
        if self.config.hidden_dropout or self.config.attention_dropout:
            data, pipeline = self.layout.data, self.layout.pipeline
            place = data.rank * pipeline.size + pipeline.rank
            torch.manual_seed(((self.options.seed * 1_000_003 + step) * 4099 + place) % (1 << 62))

    # ---- logging and evaluation ----

    def _tell(self, evaluate: bool = False) -> None:
        """Log the step that waits to be logged, if any. With `evaluate`, add the loss of the validation text."""
        if self._untold is None:
            return
        ended, self._untold = self._untold, None
        line = self._line(*ended)
        self._log(replace(line, eval_loss=self._evaluated()) if evaluate else line)
        if self.threads is not None:
            self.threads.watch(line.tokens_per_s)
        self._wind(ended.step + 1)

    def _line(self, step: int, loss: Tensor, norm: Tensor, lr: float) -> Line:
        value, size = float(self.layout.average(loss)), float(norm)  # waits for the GPU
        now = time.perf_counter()
        tokens = (step + 1 - self._since) * self.size * self.options.seq_length
        device = self.layout.device
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        return Line(step, value, lr, size, tokens / max(now - self._last, 1e-9), now - self._began, memory)

    def _log(self, line: Line) -> None:
        if self.record is not None:
            self.record.add(line)
            self.live.step(line)
        if not math.isfinite(line.loss):
            raise Diverged(f"the loss is {line.loss} at step {line.step}: a lower --lr or a longer --lr-warmup-iters may help")

    def _evaluated(self) -> float:
        batches = self.batches("valid")
        with self._not_training():
            losses = [self.trained.steps.loss(batches.of_step(n)) for n in range(self.options.eval_iters)]
        return float(self.layout.average(torch.stack(losses).mean()))

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        self.trained.model.eval()
        try:
            yield
        finally:
            self.trained.model.train()

    def samples(self) -> list[TextSample]:
        options = self.options
        if not options.samples:
            return []
        with self._not_training():
            longest = self.config.max_position_embeddings
            found = write(
                self.trained.steps.logits, self.tokens, options.samples, options.sample_tokens, longest, options.seed,
                self.layout.device,
            )  # fmt: skip
        if self.layout.first:
            said = "\n\n".join(f"{sample.prompt}|||{sample.written}" for sample in found)
            (self.folder / "samples.txt").write_text(said + "\n")
        return found

    # ---- stopping ----

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Handle SIGTERM, which schedulers send: the run ends after the current step, with a checkpoint."""

        def ask(number: int, frame: object) -> None:
            self._asked_to_stop = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _told_to_stop(self) -> bool:
        """Return whether any rank got SIGTERM, because all ranks must save at the same step."""
        if self.layout.ranks == 1:
            return self._asked_to_stop
        asked = torch.tensor(float(self._asked_to_stop))  # a CPU tensor, reduced by gloo: no wait for the GPU
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)
