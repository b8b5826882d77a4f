"""`onepass doctor`: report this machine's hardware and versions, which backends it can use, and known problems.

Exit status: 1 if something is broken, else 0. Broken means that calls raise, results are wrong, or a GPU's kernels can't run for
a reason that can be fixed on this machine. What works, but slower or with fewer features, is a warning.
"""

from onepass.doctor.diagnosis import add_arguments, diagnose, run

__all__ = ["add_arguments", "diagnose", "run"]
