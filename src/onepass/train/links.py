"""What a run writes stays in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from onepass.runtime.errors import CommandError


def check_links(folder: Path) -> None:
    """Raise CommandError if a link in a run's folder leads out of it. The folder itself may be a link."""
    inside = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in sorted((*folders, *files))):
            target = os.path.realpath(path)
            if path.is_symlink() and os.path.commonpath((inside, target)) != inside:
                raise CommandError(f"{path} must be in the run's folder, but is a link to {target}: put what it names there")
