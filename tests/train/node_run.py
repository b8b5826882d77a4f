"""What torchrun starts in test_nodes.py: `onepass train`, of which a rank dies once, in a step that the environment names."""

import os
import signal
import sys
from pathlib import Path

from onepass.cli import main
from onepass.train import loop
from onepass.train import record as run_record
from onepass.train.steps import TrainSteps

if __name__ == "__main__":
    loop.MatrixPeak = run_record.draw = lambda *args: None  # these take seconds
    died, dies_at, run, done = Path("died"), int(os.environ.get("DIES_AT", "-1")), TrainSteps.run, []

    def run_or_die(self, batch):
        if len(done) == dies_at and os.environ["RANK"] == "1" and not died.exists():
            died.touch()
            if os.environ.get("WITH_TORCHRUN"):
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(batch)
        return run(self, batch)

    TrainSteps.run = run_or_die
    sys.exit(main(["train", *sys.argv[1:]]))
