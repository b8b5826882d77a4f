"""`python -m onepass`, which torchrun can start: torchrun --nproc-per-node 2 -m onepass train"""

import sys

from onepass.cli import main

sys.exit(main())
