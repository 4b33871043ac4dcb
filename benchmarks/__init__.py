"""Benchmarks: one runner over a table of ops, shapes and peers. `python -m benchmarks --help`."""

import os

from npu_trainer_kernels.support.switch import switch_off_run

# Keeps the profiler, which counts memory on a CPU, from logging to the terminal; it reads this when torch is loaded.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
switch_off_run()
