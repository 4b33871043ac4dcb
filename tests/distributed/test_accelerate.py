"""The launch configurations of `examples/accelerate`, two gloo ranks on the CPU in place of NPUs.

Those for DeepSpeed run where it is installed (`make test-zero3`).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGURATIONS = REPOSITORY / "examples" / "accelerate"
WRAPPED = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPLlamaForCausalLM"}


def start(name: str, folder: Path) -> subprocess.Popen[str]:
    """A few steps of examples/sft.py with the kernels, by `accelerate launch` as on NPUs but for kind and number."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGURATIONS / f"{name}.yaml"),
        "--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0",
        "-m", "tests.distributed.launched", str(REPOSITORY / "examples" / "sft.py"), "--use_npu_kernels",
        "--use_cpu", "True", "--bf16", "False", "--output_dir", str(folder), "--max_steps", "3",
        "--logging_steps", "1", "--disable_tqdm", "True", "--sequence_length", "32", "--text_characters", "60000",
        "--vocab_size", "300", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)  # fmt: skip


def check(name: str, wrapped: str, folder: Path) -> None:
    process = start(name, folder)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output[-6000:]
    assert json.loads((folder / "wrapped.json").read_text()) == wrapped
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["steps"] == 3
    assert re.search(r"linear_cross_entropy +torch: Linear; \d+ calls", metrics["kernels"])


@pytest.mark.full("ddp")
@pytest.mark.parametrize("name", WRAPPED)
def test_launch(tmp_path, name):
    check(name, WRAPPED[name], tmp_path)
