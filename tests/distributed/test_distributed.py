"""Two gloo ranks on the CPU: the same parameters with the kernels as without, under DDP."""

import os
import subprocess
import sys

import pytest
import torch

from tests.models import small_model


def run(tmp_path, task, variant) -> dict[str, torch.Tensor]:
    target = tmp_path / f"{task}-{variant}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               "-m", "tests.distributed.run", task, variant, str(target)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(target)


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_same_parameters_as_without(tmp_path, task):
    plain, kernels = (run(tmp_path, task, variant) for variant in ("plain", "kernels"))
    start = small_model("qwen3", tie_word_embeddings=False).state_dict()
    moved = max((plain[name] - start[name]).abs().max().item() for name in start)
    apart = max((plain[name] - kernels[name]).abs().max().item() for name in start)
    assert plain.keys() == kernels.keys()
    assert moved > 1e-3
    assert apart < 1e-3 * moved
