"""The warm-up builds the launchers of triton-ascend itself, as far as that goes without CANN: its driver, compiler and
launcher code is the real one, and what they call (`tests/ascend/fake_cann.py`) is not."""

import json
import subprocess
import sys

from tests.ascend import fake_cann

_PROGRAM = """
import json, os, sys
from pathlib import Path

import torch, torch_npu
os.cpu_count = lambda: 4  # one builds ahead of the others on a machine of one core, too

from npu_trainer_kernels.training import warmup
from npu_trainer_kernels.ops.launch import compile_only
from tests.ascend import fake_cann, toys

# Three signatures: of other dtypes, and of another number of arguments.
launches = [
    warmup.Launch(toys.scaled_rows, (1,), (dtype, torch.float32, dtype, 5, 64, 0.5), (("BLOCK", 64),))
    for dtype in (torch.float32, torch.bfloat16)
] + [warmup.Launch(toys.scaled_whole_rows, (1,), (torch.float32, torch.float32, 5), (("COLS", 64), ("ROWS", 4)))]
_, problems = warmup.compile_all(launches, torch.device("npu", 0))
folder = Path(os.environ["FAKE_CXX_LOG"])
ahead = fake_cann.compiled_so_far(folder)
for launch in launches:
    compiled = compile_only(launch.kernel, launch.grid, launch.args, dict(launch.constexprs))
    compiled[(1, 1, 1)]  # what a first launch prepares
print(json.dumps({"problems": problems, "ahead": ahead, "later": fake_cann.compiled_so_far(folder)[len(ahead):]}))
"""


def test_the_first_launch_of_a_kernel_compiles_no_launcher(tmp_path):
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300,
                          env=fake_cann.environment(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    begins, ends = "__triton_launcher begins", "__triton_launcher ends"
    # The header once, and a launcher with it; then the two others side by side.
    at = found["ahead"].index("header begins")
    assert found["ahead"][at:] == ["header begins", "header ends", begins, ends, begins, begins, ends, ends]
    assert found["later"] == []
