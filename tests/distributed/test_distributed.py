"""Two gloo ranks on the CPU: the same parameters with the kernels as without, under DDP and FSDP2."""

import json
import os
import subprocess
import sys


def test_same_parameters_as_without(tmp_path):
    """All cases of `run.py` in one start of the ranks, since starting takes longer than any of them."""
    target = tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               "-m", "tests.distributed.run", str(target)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(target.read_text())
    assert len(found) == 4 + 16
    for task in ("sft", "grpo"):
        assert found[f"{task} ddp"]["wrapped"] == "DistributedDataParallel"
        assert found[f"{task} fsdp2"]["wrapped"].startswith("FSDP")
    still = {name: case for name, case in found.items() if case["moved"] < 1e-3}
    wrong = {name: case for name, case in found.items() if not case["apart"] < 1e-3 * case["moved"]}
    assert not still
    assert not wrong
