"""What triton-ascend has compiled is launched again without asking it, and without waiting for torch_npu's task queue.

triton-ascend's driver and launcher code is the real one; CANN and torch_npu are stand-ins (`fake_cann.py`). Tensors are
on the host and stand for an NPU's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ascend import fake_cann

_PROGRAM = """
import builtins, json, os, sys
import torch, torch_npu

builtins.launches = []
waits, stream = [], [7]
bindings = sys.modules["torch_npu._C"]

def waiting(index):
    waits.append(stream[0])
    return 100 + stream[0]

bindings._npu_getCurrentRawStream = waiting
bindings._npu_getCurrentStream = lambda index: (stream[0], index, 20)
if sys.argv[1] == "2.13":
    bindings._npu_getCurrentRawStreamNoWait = lambda index: 100 + stream[0]

from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from npu_trainer_kernels import device
from npu_trainer_kernels.support.triton import jit, tl
from npu_trainer_kernels.ops import launch as _launch

_launch.INTERPRETED = True
device.keeps_compiled = lambda where, real=device.keeps_compiled: real(torch.device("npu"))

@jit(lengths=("n",))
def add(x, y, n, scale, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * scale, mask=at < n)

asked, run = [], add.run
add.run = lambda *args, **kwargs: (asked.append(kwargs["grid"]), run(*args, **kwargs))[1]
x, y = torch.zeros(64), torch.zeros(64)

def launch(n=64, grid=(3,), scale=0.5, x=x):
    _launch.launch(add, grid, (x, y, n, scale), {"BLOCK": 64})

exec(sys.argv[2])
compiled = next(iter(_launch._of_any_length.values()))[1]
print(json.dumps({
    "asked": len(asked), "waits": waits,
    "launches": [[*given[:4], *(("x", "y")[t is y] if torch.is_tensor(t) else t for t in given[9:])]
                 for given in launches],
    "same": all(given[4:9] == (compiled.function, compiled.packed_metadata, None, None, None) for given in launches),
}))
"""


def after(folder: Path, lines: str, torch_npu: str = "2.13", **variables: str) -> dict[str, Any]:
    """What became of some launches."""
    program = folder / "program.py"  # Triton reads a kernel's source
    program.write_text(_PROGRAM)
    environment = fake_cann.environment(folder)
    (folder / "log").write_text("__triton_launcher begins\n" * 3)  # none waits for another
    environment["PYTHONPATH"] += f":{Path.cwd()}"
    done = subprocess.run([sys.executable, str(program), torch_npu, lines], capture_output=True, text=True, timeout=300,
                          env=environment | variables)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_triton_is_asked_once_for_all_lengths(tmp_path):
    found = after(tmp_path, "launch(); launch(); launch(n=1, scale=0.25); launch(n=33, grid=(2, 5)); launch(n=64)")
    assert found == {
        "asked": 1, "waits": [7], "same": True,
        "launches": [
            [3, 1, 1, 107, "x", "y", 64, 0.5], [3, 1, 1, 107, "x", "y", 64, 0.5], [3, 1, 1, 107, "x", "y", 1, 0.25],
            [2, 5, 1, 107, "x", "y", 33, 0.5], [3, 1, 1, 107, "x", "y", 64, 0.5],
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("torch_npu", "variables", "waits"),
    [
        ("2.13", {}, [7]),
        # Triton's own, and then once for each stream.
        ("2.7.1", {}, [7, 7, 9]),
        # Launchers that do not go through the queue keep the order by the wait.
        ("2.13", {"TRITON_ENABLE_TASKQUEUE": "false"}, [7, 7, 9, 7, 9]),
    ],
)
def test_streams(tmp_path, torch_npu, variables, waits):
    lines = "launch(); launch(); stream[0] = 9; launch(); stream[0] = 7; launch(); stream[0] = 9; launch()"
    found = after(tmp_path, lines, torch_npu, **variables)
    assert [given[3] for given in found["launches"]] == [107, 107, 109, 107, 109]
    assert found["waits"] == waits
    assert found["asked"] == 1


def test_what_triton_compiles_anew_it_is_asked_for(tmp_path):
    found = after(tmp_path, "launch(); launch(x=torch.zeros(65)[1:]); launch(n=1 << 31); launch(scale=2)")
    assert found["asked"] == 4


def test_more_programs_than_triton_launches(tmp_path):
    found = after(tmp_path, """
launch()
try:
    launch(grid=(65536,))
except RuntimeError as error:
    assert "grid should be less than 65536" in str(error), error
else:
    raise AssertionError("it was launched")
""")  # fmt: skip
    assert len(found["launches"]) == 1


def test_hooks_are_called(tmp_path):
    found = after(tmp_path, """
launch()
seen = []
CompiledKernel.launch_enter_hook = seen.append
launch()
assert launches.pop()[7] == seen.append
CompiledKernel.launch_enter_hook = None
launch()
""")  # fmt: skip
    assert found["asked"] == 1
    assert len(found["launches"]) == 2
