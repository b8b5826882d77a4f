"""python -m onepass.integrations.megatron SCRIPT ...: install, print what was replaced, and run the script unmodified."""

import runpy
import sys
from pathlib import Path

from onepass.integrations.megatron import install


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m onepass.integrations.megatron SCRIPT [its arguments]")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as `python SCRIPT` has it: a clone of Megatron-LM lies there
    print(install(), flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
