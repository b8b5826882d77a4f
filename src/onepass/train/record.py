"""The log files in a run's folder: log.csv, loss.png and TensorBoard events. A resumed run continues them.

A run's folder, such as runs/2026-11-22_14-05-33:

    config.yaml     all settings: `onepass train --config` takes it
    log.csv         one line per logged step
    loss.png        the loss curve
    events.out.*    for TensorBoard
    tokens/         the tokenizer and the tokenised text
    checkpoints/    step-00000500/, ...
    samples.txt     text that the model generated
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from onepass.runtime.errors import CommandError


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


_NAMES = [field.name for field in fields(Line)]


class Record:
    """Writes log.csv and TensorBoard events. Each line is flushed, so that a killed run leaves its log.

    Args:
        folder: the run's folder.
        first: the step at which the run begins. Lines that an earlier run logged for this step or later ones are removed.
    """

    def __init__(self, folder: Path, first: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.lines = [line for line in read_log(folder / "log.csv") if line.step < first] if first else []
        try:
            self._file = (folder / "log.csv").open("w", newline="")
            self._writer = csv.writer(self._file)
            self._writer.writerow(_NAMES)
            for line in self.lines:
                self._write(line)
            self._events = SummaryWriter(str(folder), purge_step=first or None)
        except OSError as error:
            raise CommandError(f"{folder} can't be written: {error.strerror}") from None

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self._write(line)
        for name, value in asdict(line).items():
            if value is not None and name not in ("step", "seconds"):
                self._events.add_scalar(name, value, line.step)

    def _write(self, line: Line) -> None:
        values = [getattr(line, name) for name in _NAMES]
        self._writer.writerow(["" if v is None else f"{v:.6g}" if isinstance(v, float) else v for v in values])
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()
        if self.lines:
            draw(self.folder / "loss.png", {"": self.lines})


def read_log(path: Path) -> list[Line]:
    """Return the lines of a log.csv, without a truncated last line."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [_line(row) for row in rows if None not in row.values()]


def _line(row: dict[str, str]) -> Line:
    values: dict[str, Any] = {name: float(row[name]) if row[name] else None for name in _NAMES}
    return Line(**values | {"step": int(row["step"])})


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
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
