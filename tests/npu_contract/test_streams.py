"""The stream of a launch, asked of torch_npu itself: stand-ins for CANN's library make an NPU with streams."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_contract import stubs

_CANN = """
static long streams = 0;
int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }
int aclrtGetDevice(int *device) { *device = 0; return 0; }
int aclrtSetStreamOverflowSwitch(void *stream, unsigned flag) { return 0; }
int aclrtCreateStreamWithConfig(void **stream, unsigned priority, unsigned flag) {
  *stream = (void *)(0x1000 + 16 * ++streams);
  return 0;
}
"""

_PROGRAM = """
import ctypes, sys
import torch
from tests.npu_contract import stubs

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before the stand-ins that do nothing
stubs.load()
import torch_npu
from npu_trainer_kernels import device

if sys.argv[2] == "2.7.1":
    del torch_npu._C._npu_getCurrentRawStreamNoWait
torch_npu.npu._initialized = True  # streams need nothing of what there is beside
waits, ask = [], torch_npu._C._npu_getCurrentRawStream

def waiting(index):
    waits.append(index)
    return ask(index)

torch_npu._C._npu_getCurrentRawStream = waiting
ours, side = device.npu_stream(), torch.npu.Stream()

def streams(which):
    found = [which(0)]
    with torch.npu.stream(side):
        found.append(which(0))
    return [*found, which(0)]

expected = streams(ask)
assert len(set(expected)) == 2, expected
for _ in range(3):
    assert streams(ours) == expected
assert len(waits) == {"2.13": 0, "2.7.1": 2}[sys.argv[2]], waits
"""


@pytest.mark.parametrize("torch_npu", ["2.13", "2.7.1"])
def test_it_is_the_one_that_torch_npu_says_and_is_not_waited_for(tmp_path: Path, torch_npu: str):
    """Before 2.13 once for each stream."""
    library = tmp_path / "libascendcl.so"
    stubs.compile_library(_CANN, library)
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(library), torch_npu], capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
