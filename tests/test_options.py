"""The values of options: the same lists as in the modules that import torch, and near misses are named."""

import subprocess
import sys

import pytest

from npu_trainer_kernels import options
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.modules import GatedMlpPatch


def test_the_lists_are_those_of_the_patches():
    assert set(options.MODEL_OPS) == set(PATCHES)
    assert GatedMlpPatch.op == options.TILED_OP


@pytest.mark.parametrize(
    ("given", "end"),
    [
        (["rmsnorm"], "; did you mean 'rms_norm'?"),
        (["rms_norm", "Swiglu", "ropes"], "; did you mean 'swiglu', 'rope'?"),
        (["rms_norm"], ""),
        (["zzz", 3], ""),
    ],
)
def test_what_was_probably_meant(given, end):
    assert options.did_you_mean(given, options.MODEL_OPS) == end


def test_checking_the_arguments_imports_no_torch():
    code = "import sys, npu_trainer_kernels.arguments; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
