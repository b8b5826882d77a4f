"""A training run: it prepares text and model, runs steps, evaluates, logs, and saves checkpoints and text samples."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from onepass.gpt import Config
from onepass.gpt.lora import adapter_files
from onepass.gpt.settings import written_yaml
from onepass.runtime.cpu_threads import CpuThreads
from onepass.train import checkpoint, stages, text
from onepass.train.batches import Batches
from onepass.train.files import write_atomically
from onepass.train.layout import ParallelLayout
from onepass.train.live import Live, MatrixPeak
from onepass.train.memory import compare_memory, describe_memory, memory_of_run
from onepass.train.options import Options
from onepass.train.packing import Documents, PackedBatches
from onepass.train.precision import Counts, Saturation, has_delayed_scales
from onepass.train.record import Line, Record, read_log
from onepass.train.samples import TextSample, write
from onepass.train.setup import make
from onepass.train.updates import learning_rate

_SAVING = 20  # a run that saves by time trains at least so many times as long as a save takes


class Diverged(Exception):
    """The loss, or the gradient's norm, is infinite or NaN."""


class _EndTime:
    """When the device ends what was launched before. Only reading it waits."""

    def __init__(self, device: torch.device) -> None:
        self._clock, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def since(self, other: _EndTime) -> float:
        """Return the seconds from another one."""
        if self._event is None:
            return self._clock - other._clock
        self._event.synchronize()
        return float(other._event.elapsed_time(self._event)) / 1e3  # type: ignore[union-attr]


class _Ended(NamedTuple):
    """A launched step. Logging it reads loss and norm, which waits for the GPU."""

    step: int
    loss: Tensor
    norm: Tensor
    lr: float
    saturated: Counts | None
    at: _EndTime


class TrainRun:
    """One training run of this rank.

    Args:
        folder: the output folder.
        tokens: the folder of tokenised text, which several runs may share; by default in `folder`.
        plain: train with PyTorch operators, as in `onepass.train.setup.make`.
        resume: a checkpoint to continue from.
        verified: its files have been compared with their checksums already.
        threads: adjusts the number of CPU threads during the run.

    Attributes:
        stopped: whether a signal ended the run early.
        signal: the last SIGTERM or SIGINT that asked this rank to stop.
    """

    def __init__(
        self, config: Config, options: Options, layout: ParallelLayout, folder: Path, console: Console, *,
        tokens: Path | None = None, plain: bool = False, resume: Path | None = None,
        verified: bool = False, threads: CpuThreads | None = None,
    ) -> None:  # fmt: skip
        self.config, self.options, self.layout, self.folder, self.console = config, options, layout, folder, console
        self.plain, self.resume, self.verified, self.threads = plain, resume, verified, threads
        self.size = stages.sequences(config, options, layout.data.size)
        self._tokens = tokens or folder / "tokens"
        self.stopped = self._stepping = False
        self.signal: int | None = None
        self.record: Record | None = None
        self._unlogged: _Ended | None = None
        self._waits_later = layout.device.type == "cuda"

    def train(self) -> list[Line]:
        """Train, and return the logged steps. SIGTERM and Ctrl-C end the run early, with a checkpoint.

        Log and settings of a run are written last: a resume that is refused leaves them.
        """
        layout, options = self.layout, self.options
        peak = MatrixPeak(layout.device, self.config.dtype) if layout.first else None
        frozen = options.lora_rank is not None
        flops = self.config.flops_per_token(options.seq_length, frozen=frozen)
        with Live(self.console, options.train_iters, flops, peak) as self.live, self._stopping():
            before = [] if self.resume is None else self._before()
            self.tokens = self._text()
            if isinstance(batches := self.batches(), PackedBatches):
                self.live.say(batches.summary())
                self.live.flops = self.config.flops_per_token(batches.mean_span, frozen=frozen)
            self.trained = make(self.config, options, layout, self.plain, self.live.say)
            planned = None if self.plain else memory_of_run(self.config, options, layout)
            if planned is not None:
                self.live.say(describe_memory(planned, self.config.num_layers))
            verify = options.verify_checksums and not self.verified
            first = 0 if self.resume is None else checkpoint.load(self.resume, self.trained, self.config, layout, verify=verify)
            self._saturation = Saturation(self.trained.model, self.config, layout, self.size * options.seq_length)
            self._saturation.start()
            if self.resume is not None and (scales := checkpoint.describe_scales(self.resume, self.config)):
                self.live.say(scales)
            try:
                layout.on_first(lambda: self._write_first_files(before, first))
                if layout.disks and not self.plain:  # a resume may begin on any node
                    layout.on_each_disk(self._write_settings)
                self._stepping = True
                with self.options.invariance(self.plain):
                    self._steps(first)
                if planned is not None and layout.device.type == "cuda" and not self.trained.steps.replays:
                    self.live.say(compare_memory(planned, torch.cuda.max_memory_allocated(layout.device)))
            finally:
                self._stepping = False
                if self.record is not None:
                    lost = layout.ranks > 1 and isinstance(sys.exc_info()[1], RuntimeError)  # a restart waits, and will draw
                    self.record.close(plot=not lost)
        return [] if self.record is None else self.record.lines

    def release(self) -> None:
        """Free the model and the optimizer, so that other models can use their memory. Their tables run as this run did."""
        self.options = replace(self.options, cuda_graphs=self.trained.steps.replays)
        del self.trained

    def _text(self) -> text.Tokens:
        """Tokenise the text on each disk, by its first rank, and load it on all ranks."""

        def prepare() -> Any:
            options, keep = self.options, self.plain or self.resume is not None
            given = None if options.load_hf is None else text.folder_tokenizer(Path(options.load_hf), self.config.vocab_size)
            return text.prepare(
                self._tokens, options.data, self.config.vocab_size, options.seq_length, self.live.told,
                keep=keep, verify=options.verify_checksums, given=given,
            ).sums()  # fmt: skip

        text.check_same(self.layout.on_each_disk(prepare), self.layout)
        tokens = text.load(self._tokens, self.config.vocab_size)
        if self.resume is not None:
            checkpoint.check_vocabulary(self.resume, tokens.vocabulary)
        return tokens

    def _before(self) -> list[Line]:
        """Return what an earlier run logged, whose first rank may have been on any node."""
        return max(self.layout.on_each_disk(lambda: read_log(self.folder / "log.csv")), key=len)

    def _write_first_files(self, before: list[Line], first: int) -> None:
        """Write log.csv, and then config.yaml: of two files on a full disk, a run needs its settings as they were."""
        self.record = Record(self.folder, before, first, saturations=has_delayed_scales(self.config) and not self.plain)
        if not self.plain:
            self._write_settings()

    def _write_settings(self) -> None:
        write_atomically(self.folder / "config.yaml", written_yaml({**self.config.to_dict(), **self.options.to_dict()}))

    def batches(self, what: str = "train") -> Batches:
        options, data = self.options, self.layout.data
        seed = options.seed if what == "train" else options.seed + 1
        numbers = self.tokens.train if what == "train" else self.tokens.valid
        arguments = numbers, self.size, options.seq_length, seed, data.rank, data.size, self.layout.device
        return PackedBatches(self._documents[what], *arguments) if options.pack else Batches(*arguments)

    @cached_property
    def _documents(self) -> dict[str, Documents]:
        parts = {"train": self.tokens.train, "valid": self.tokens.valid}
        return {name: Documents(part, self.tokens.end) for name, part in parts.items()}

    def _steps(self, first: int) -> None:
        options, batches = self.options, self.batches()
        self._began = time.perf_counter()
        self._counted = first
        self._restart_clock(first)
        self._save_by_time(0.0)
        done = first
        for step in range(first, options.train_iters):
            self._seed(step)
            lr = learning_rate(step, options)
            self.trained.update.set_rate(lr)
            loss, norm = self.trained.steps.run(batches.of_step(step))
            self.trained.update.step(lr)
            if step == first and (cost := self.trained.update.describe_offload()) is not None:
                self.live.say(cost)
            self._log_step()  # logs the previous step: the GPU runs the current one while the host waits
            done, last = step + 1, step + 1 == options.train_iters
            stop, due = self._requests()
            evaluate = bool(options.eval_iters) and (last or (bool(options.eval_interval) and done % options.eval_interval == 0))
            save = last or stop or due or (options.save_interval and done % options.save_interval == 0)
            if evaluate or stop or last or done % options.log_interval == 0:
                self._unlogged = _Ended(step, loss, norm, lr, self._saturation.counts(), _EndTime(self.layout.device))
            if evaluate or save or not self._waits_later:
                self._log_step(evaluate)
            if save:
                self._check(step, float(self.layout.average(loss)), float(norm))  # waits for the step, which is no time of saving
                began = time.monotonic()
                checkpoint.save(
                    self.folder / "checkpoints", done, self.trained, self.config, options, self.layout,
                    vocabulary=self.tokens.vocabulary,
                )  # fmt: skip
                self._save_adapter()
                self._save_by_time(time.monotonic() - began)
                self._restart_clock(done)
            if stop:
                break
        self.stopped, _ = self._requests()  # also what came while the last step was saved
        if self.stopped:
            self.live.say(f"stopped after step {done}" + ("" if self.plain else f"; go on with --resume {self.folder}"))

    def _save_adapter(self) -> None:
        """Write a LoRA run's adapters as PEFT's folder. All ranks of the model gather them."""
        if self.trained.adapters is None or self.plain:
            return
        model: Any = self.trained.model
        files = adapter_files(model, self.options.load_hf)

        def write_files() -> None:
            (self.folder / "adapter").mkdir(exist_ok=True)
            for name, data in files.items():
                write_atomically(self.folder / "adapter" / name, data)

        self.layout.on_first(write_files)

    def _restart_clock(self, done: int) -> None:
        """Restart the throughput measurement: time before this call was not training."""
        self._last, self._since = _EndTime(self.layout.device), done

    def _seed(self, step: int) -> None:
        """Seed dropout from the step's number, so that a resumed run drops the same elements."""
        if self.config.hidden_dropout or self.config.attention_dropout:
            data, pipeline = self.layout.data, self.layout.pipeline
            place = data.rank * pipeline.size + pipeline.rank
            torch.manual_seed(((self.options.seed * 1_000_003 + step) * 4099 + place) % (1 << 62))

    # ---- logging and evaluation ----

    def _log_step(self, evaluate: bool = False) -> None:
        """Log the step that waits to be logged, if any. With `evaluate`, add the loss of the validation text."""
        if self._unlogged is None:
            return
        ended, self._unlogged = self._unlogged, None
        line = self._line(*ended)
        self._log(replace(line, eval_loss=self._evaluated()) if evaluate else line)
        if self.threads is not None:
            self.threads.watch(line.tokens_per_s)
        if evaluate:
            self._restart_clock(ended.step + 1)
        else:
            self._last, self._since = ended.at, ended.step + 1

    def _line(self, step: int, loss: Tensor, norm: Tensor, lr: float, counts: Counts | None, at: _EndTime) -> Line:
        value, size = float(self.layout.average(loss)), float(norm)  # waits for the GPU
        lost, heavy = self._saturation.read(counts, step + 1 - self._counted)
        self._counted = step + 1
        if warning := self._saturation.words(heavy):
            self.live.say(f"step {step + 1}/{self.options.train_iters}  {warning}")
        tokens, seconds = (step + 1 - self._since) * self.size * self.options.seq_length, max(at.since(self._last), 1e-9)
        device = self.layout.device
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        line = Line(step, value, lr, size, tokens / seconds, time.perf_counter() - self._began, memory)
        return line if lost is None else replace(line, **lost)

    def _log(self, line: Line) -> None:
        if self.record is not None:
            self.record.add(line)
            self.live.step(line)
        self._check(line.step, line.loss)

    def _check(self, step: int, loss: float, norm: float = 0.0) -> None:
        """Raise where a step has gone wrong. A checkpoint of its weights would push out one of good weights."""
        for what, value in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(value):
                raise Diverged(f"the {what} is {value} at step {step}: a lower --lr or a longer --lr-warmup-iters may help")

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
        with self._not_training(), options.invariance(self.plain):
            longest = self.config.max_position_embeddings
            samples = write(
                self.trained.steps.logits, self.tokens, options.samples, options.sample_tokens, longest, options.seed,
                self.layout.device, self._documents["valid"] if options.pack else None,
            )  # fmt: skip
        if self.layout.first:
            written = "\n\n".join(f"{sample.prompt}|||{sample.written}" for sample in samples)
            write_atomically(self.folder / "samples.txt", written + "\n", sync=False)
        return samples

    # ---- stopping, and saving by time ----

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Handle SIGTERM, which schedulers send, and Ctrl-C: the run ends after the current step, with a checkpoint.

        Ctrl-C ends at once where no step runs yet, or if it comes again.
        """

        def ask(number: int, frame: object) -> None:
            if number == signal.SIGINT and (self.signal is not None or not self._stepping):
                raise KeyboardInterrupt
            self.signal = number
            if number == signal.SIGINT and self.layout.first:
                with suppress(OSError):  # written past Python's buffers, which the signal may have interrupted
                    os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again ends at once\n")

        handled = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, ask) for number in handled}
        try:
            yield
        except Exception:
            if self.signal == signal.SIGTERM and self.layout.ranks > 1:  # another rank has failed, and its error is shown
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _save_by_time(self, took: float) -> None:
        """Set when the next save by time is due, after one that took so many seconds."""
        minutes = 0.0 if self.options.save_interval else self.options.save_minutes
        self._save_at = time.monotonic() + max(60 * minutes, _SAVING * took) if minutes else math.inf

    def _requests(self) -> tuple[bool, bool]:
        """Return whether any rank was told to stop, and whether a save by time is due: all ranks must save at the same step."""
        here = [self.signal is not None, time.monotonic() >= self._save_at]
        if self.layout.ranks > 1:
            there = torch.tensor(here, dtype=torch.float32)  # a CPU tensor, reduced by gloo: no wait for the GPU
            dist.all_reduce(there, dist.ReduceOp.MAX)
            here = there.bool().tolist()
        return here[0], here[1]
