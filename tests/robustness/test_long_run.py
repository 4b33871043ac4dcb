"""2,000 steps with the kernels leave no more behind than 2,000 steps without: memory, caches, compiled kernels.

Lengths are random and reach, step by step, what no step before has reached. From step 500 on, what the allocators of
Python and C have given out is looked at every 250 steps: not what the process takes, which grows by whole arenas, and
by others where the machine is busy. Window by window this is held to the same steps without the kernels, whose log and
tables grow alike: what is kept in every step is a block of an allocator for each, and shows in every window; a table
that is made larger, in the one run or the other, shows in one.
"""

import functools
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import npu_trainer_kernels
from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.patching import PATCHES, apply

# After how many steps it is measured first, how many a window has, and the last step.
FIRST, WINDOW, LAST = 500, 250, 2000
LEAK_LAST = FIRST + WINDOW
SHORT = 60, 30, 150
LONG = pytest.mark.full(quick="test_caches_of_a_short_run_do_not_grow")
# The least that is kept of anything: a block of Python's allocator, or 32 bytes of C's on 64 bits.
SMALLEST_KEPT = {"blocks": 1, "heap": 32}
SMALLEST = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}


def cached() -> int:
    """Entries of every `functools.cache` of the package, of the handles, and kernels compiled."""
    entries = len(apply._handles)
    for name, module in list(sys.modules.items()):
        if not name.startswith(npu_trainer_kernels.__name__):
            continue
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == name:
                entries += value.cache_info().currsize
            # Triton's own cache of what a kernel was compiled to, per device.
            entries += sum(len(each[0]) for each in getattr(value, "device_caches", {}).values())
    return entries


class Rows(torch.utils.data.IterableDataset):
    """A row a step, up to 2 tokens long at first and 82 at last."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for step in range(LAST):
            length = int(torch.randint(2, 4 + step // 25, (), generator=generator))
            ids = torch.randint(0, SMALLEST["vocab_size"], (length,), generator=generator)
            yield {"input_ids": ids, "labels": ids}


class Growth(TrainerCallback):
    """What there is after the first step that counts and after every window."""

    def __init__(self, leaks: bool, first: int = FIRST, window: int = WINDOW) -> None:
        self.first, self.window = first, window
        self.seen: list[dict[str, int]] = []
        self.leak: list[torch.Tensor] | None = [] if leaks else None

    def on_step_end(self, args, state, control, **kwargs):
        if self.leak is not None:
            self.leak += torch.zeros(1000), torch.zeros(1000)
        if state.global_step >= self.first and (state.global_step - self.first) % self.window == 0:
            gc.collect()
            now = {
                "blocks": sys.getallocatedblocks(),
                "heap": sum(psutil.heap_info()),
                "cached": cached(),
            }
            self.seen.append(now)


def main(kind: str) -> None:
    """Trains `plain`, with the `kernels`, a `short` run of these, or with kernels and a `leak`; prints how much each
    window has added."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    first, window, last = SHORT if kind == "short" else (FIRST, WINDOW, LEAK_LAST if kind == "leak" else LAST)
    growth = Growth(kind == "leak", first, window)
    arguments: dict[str, Any] = {
        "output_dir": "unused", "max_steps": last, "per_device_train_batch_size": 1,
        "report_to": [], "save_strategy": "no", "logging_steps": 50, "use_cpu": True, "disable_tqdm": True,
        "optim": "sgd",
    }  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**SMALLEST)),
        TrainingArguments(**arguments),
        train_dataset=Rows(),
        callbacks=[growth, *([] if kind == "plain" else [NpuKernelsCallback(ops=PATCHES)])],
    )
    trainer.train()
    print(json.dumps([{name: b[name] - a[name] for name in a} for a, b in itertools.pairwise(growth.seen)]))


def start(kind: str, folder: Path) -> subprocess.Popen[str]:
    """In a process of its own, where nothing else has run or is running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.robustness.test_long_run", kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def windows(tmp_path_factory) -> dict[str, list[dict[str, int]]]:
    """By kind of run; the runs take place at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    running = {kind: start(kind, folder) for kind in ("plain", "kernels", "leak")}
    try:
        printed = {kind: process.communicate(timeout=300)[0] for kind, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert {kind: process.returncode for kind, process in running.items()} == dict.fromkeys(running, 0)
    return {kind: json.loads(text.splitlines()[-1]) for kind, text in printed.items()}


def more_than_plain(windows: dict[str, list[dict[str, int]]], kind: str, what: str) -> float:
    """What a window typically adds to that which the same steps add without the kernels."""
    return statistics.median(a[what] - b[what] for a, b in zip(windows[kind], windows["plain"], strict=False))


@LONG
@pytest.mark.parametrize("what", SMALLEST_KEPT)
def test_memory_does_not_grow(windows, what):
    limit = WINDOW * SMALLEST_KEPT[what] / 2
    assert more_than_plain(windows, "kernels", what) < limit
    # The measure sees two tensors kept in every step.
    assert more_than_plain(windows, "leak", what) > limit


@LONG
def test_caches_and_compiled_kernels_do_not_grow(windows):
    assert [window["cached"] for window in windows["kernels"]] == [0] * ((LAST - FIRST) // WINDOW)


def test_caches_of_a_short_run_do_not_grow(tmp_path):
    with start("short", tmp_path) as process:
        printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0
    first, window, last = SHORT
    assert [each["cached"] for each in json.loads(printed.splitlines()[-1])] == [0] * ((last - first) // window)


if __name__ == "__main__":
    main(sys.argv[1])
