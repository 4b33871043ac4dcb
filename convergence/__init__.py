"""Trains small models without and with the kernels, and compares them by the noise-floor rule of `verify`.

`python -m convergence --help`. The cases are in `cases.py`, the faults that must be caught in `mutations.py`.
"""

from npu_trainer_kernels.support.optional import require

require("the convergence suite", "trl", "datasets", "peft")  # before its modules import them
