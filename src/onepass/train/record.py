"""The log files in a run's folder: log.csv, loss.png and TensorBoard events. A resumed run continues them.

A run's folder, such as runs/2026-11-22_14-05-33:

    config.yaml     all settings: `onepass train --config` takes it
    log.csv         one line per logged step
    loss.png        the loss curve
    events.out.*    for TensorBoard
    tokens/         the tokenizer and the tokenised text
    checkpoints/    step-00000500/, ...
    adapter/        a LoRA run's adapters, as PEFT loads them
    samples.txt     text that the model generated
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from onepass.runtime.errors import CommandError
from onepass.runtime.regular_file import read_regular
from onepass.train.files import write_atomically


@dataclass(frozen=True)
class Line:
    """A logged step. `eval_loss` is set if an evaluation followed the step."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    seconds: float  # since the run's start
    memory_gib: float | None = None
    eval_loss: float | None = None
    saturated: int | None = None  # numbers of eight-bit products with delayed scales, since the line before
    underflowed: int | None = None


_NAMES = [field.name for field in fields(Line)]
_OPTIONAL = [field.name for field in fields(Line) if field.default is None]
_SOMETIMES = "saturated", "underflowed"  # columns of runs in eight bits


class Record:
    """Writes log.csv and TensorBoard events. Each line is flushed, so that a killed run leaves its log.

    Args:
        folder: the run's folder.
        before: what an earlier run logged. Its lines of step `first` or later ones are removed.
        first: the step at which the run begins.
        saturations: whether there are columns of eight bits. They are there, too, where an earlier run had them.
    """

    def __init__(self, folder: Path, before: Sequence[Line] = (), first: int = 0, saturations: bool = False) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.lines = [line for line in before if line.step < first]
        self._kept = len(self.lines)
        saturations = saturations or any(line.saturated is not None for line in self.lines)
        self._names = [name for name in _NAMES if saturations or name not in _SOMETIMES]
        path = folder / "log.csv"
        with self._named_in_errors():
            write_atomically(path, _csv(self._names, *map(self._values, self.lines)))
            self._file = path.open("a", newline="")
            self._events = SummaryWriter(str(folder), purge_step=first or None)

    def add(self, line: Line) -> None:
        self.lines.append(line)
        with self._named_in_errors():
            self._file.write(_csv(self._values(line)))
            self._file.flush()
            for name, value in asdict(line).items():
                if value is not None and name not in ("step", "seconds"):
                    self._events.add_scalar(name, value, line.step)

    def close(self, plot: bool = True) -> None:
        with self._named_in_errors():
            self._file.close()
            self._events.close()
            if plot and len(self.lines) > self._kept:
                draw(self.folder / "loss.png", {"": self.lines})

    def _values(self, line: Line) -> list[Any]:
        values = [getattr(line, name) for name in self._names]
        return ["" if v is None else f"{v:.6g}" if isinstance(v, float) else v for v in values]

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CommandError(f"{self.folder} can't be written: {error.strerror}") from None


def _csv(*rows: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def read_log(path: Path) -> list[Line]:
    """Return the lines of a log.csv, without a truncated last line. Raise CommandError for one that is broken."""
    if not path.exists():
        return []
    lines = read_regular(path).decode(errors="replace").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    rows = csv.DictReader(whole)
    logged = []
    names = [name for name in _NAMES if name not in _SOMETIMES or name in (rows.fieldnames or ())]
    try:
        for row in rows:
            logged.append(_line(row, names))
    except (KeyError, TypeError, ValueError, csv.Error):
        raise CommandError(
            f"{path} must have {', '.join(names)} in line {rows.line_num}, but has {whole[rows.line_num - 1].strip()!r:.100}: "
            "correct it, or move the file away, and the log begins where the run goes on"
        ) from None
    return logged


def _line(row: dict[str, str], names: Sequence[str]) -> Line:
    values: dict[str, Any] = {name: None if row[name] == "" and name in _OPTIONAL else float(row[name]) for name in names}
    whole = {name: int(row[name]) for name in ("step", *_SOMETIMES) if row.get(name)}
    return Line(**values | whole)


def draw(path: Path, curves: Mapping[str, Sequence[Line]]) -> None:
    """Plot loss by step of one run, or of several runs by name."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, lines in curves.items():
        (drawn,) = axes.plot(
            [line.step for line in lines], [line.loss for line in lines], linewidth=1.2, label=name or "training"
        )
        evaluated = [line for line in lines if line.eval_loss is not None]
        if evaluated:
            label = f"{name}, held-out text".lstrip(", ")
            axes.plot(
                [line.step for line in evaluated], [line.eval_loss or 0.0 for line in evaluated], "o--",
                color=drawn.get_color(), markersize=4, linewidth=0.8, label=label,
            )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
    write_atomically(path, picture.getvalue(), sync=False)
