"""Settings of a run from a preset, a YAML file and flags, for the commands that take them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onepass.gpt import PRESETS, Config
from onepass.gpt.huggingface import config_of
from onepass.gpt.settings import Flag, nearest, read_yaml
from onepass.gpt.weights import read_config
from onepass.runtime.errors import CommandError
from onepass.train.foreign_flags import in_place_of
from onepass.train.options import TRAINING, Options

NAMES = frozenset({*Config.names(), *Options.names()})


def add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", help=f"model and settings to begin with: {', '.join(PRESETS)} (tiny)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML, as a run's config.yaml has them")


def add_flag(group: Any, flag: Flag, *aliases: str) -> None:
    about = (flag.help + _default(flag)).replace("%", "%%")
    if flag.off is not None:
        group.add_argument(flag.on, dest=flag.field, action="store_true", default=argparse.SUPPRESS, help=about)
        group.add_argument(flag.off, dest=flag.field, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    elif flag.type is tuple:
        named = "PATH" if flag.field == "data" else "NAME"
        group.add_argument(flag.on, dest=flag.field, nargs="+", metavar=named, default=argparse.SUPPRESS, help=about)
    else:
        kind = flag.type.__name__.upper()
        group.add_argument(
            flag.on, *aliases, dest=flag.field, type=flag.type, choices=flag.choices or None, default=argparse.SUPPRESS,
            metavar=None if flag.choices else {"STR": "NAME"}.get(kind, kind), help=about,
        )  # fmt: skip


def _default(flag: Flag) -> str:
    if flag.default in (None, ()):
        return "" if flag.off is None else f" ({flag.off})"
    if flag.type is not bool:
        return f" ({flag.default})"
    return f" (on; {flag.off})" if flag.default else " (off)"


def merge_settings(
    preset: str | None, written: Mapping[str, Any] | None, flags: Mapping[str, Any], on_gpu: bool
) -> tuple[Config, Options]:  # fmt: skip
    """Merge settings of a preset, then a file, then flags. Later ones take precedence."""
    if preset is not None and preset not in PRESETS:
        raise CommandError(f"--preset must be one of {', '.join(PRESETS)}, but is {preset!r}{nearest(preset, PRESETS)}")
    given = {**(written or {}), **{name: value for name, value in flags.items() if name in NAMES}}
    values: dict[str, Any]
    if given.get("load_hf") is not None:
        if preset:
            raise CommandError(f"--preset must not be given with --load-hf, whose folder has the model, but is {preset!r}")
        values = config_of_folder(given["load_hf"]).to_dict()
    else:
        begin = preset or "tiny"
        values = {} if written is not None and not preset else {**PRESETS[begin], **TRAINING[begin]}
    if written is None and on_gpu:
        values = {"params_dtype": "bf16", "log_interval": 10} | values
    values |= given
    if values.get("pipeline_model_parallel_size", 1) != 1:  # embedding and output layer are in different stages
        values.setdefault("untie_embeddings_and_output_weights", True)
    try:
        return tuple(kind.from_dict({k: v for k, v in values.items() if k in kind.names()}) for kind in (Config, Options))  # type: ignore[return-value]
    except ValueError as error:
        raise CommandError(str(error)) from None


def config_of_folder(folder: object) -> Config:
    """Return the configuration of --load-hf's model."""
    try:
        return config_of(read_config(Path(str(folder))))
    except (ValueError, FileNotFoundError) as error:
        raise CommandError(f"--load-hf {folder}: {error}") from None


def read_file(path: Path, *, pipe: bool) -> dict[str, Any]:
    """Read settings. Several ranks take no pipe, of which one would leave the others nothing."""
    try:
        values = read_yaml(path, (*Config.flags(), *Options.flags()), pipe=pipe)
    except OSError as error:
        raise CommandError(f"--config {path} can't be read: {error.strerror}") from None
    except Exception as error:  # PyYAML raises many types
        raise CommandError(f"--config {path} is no YAML of settings: {' '.join(str(error).split())}") from None
    for key in values:
        if key not in NAMES:
            ours = in_place_of(f"--{key}")
            advice = f"; in place of it: {ours}" if ours else nearest(str(key), NAMES)
            raise CommandError(f"{path}: {key!r} is no setting{advice}")
    return values
