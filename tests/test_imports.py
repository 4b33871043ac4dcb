"""The package imports whatever optional dependency is missing or broken, and says what to install when it is needed."""

import os
import subprocess
import sys

import pytest

# A finder that makes one top-level module fail in a given way.
BREAK = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise {error}("planted: " + name)
sys.meta_path.insert(0, Broken())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError", "RuntimeError"])
def test_import_survives_broken_optional_dependencies(error):
    code = BREAK.format(names=["triton", "torch_npu", "trl"], error=error) + (
        "import torch, npu_trainer_kernels as n\n"
        "from npu_trainer_kernels import ops\n"
        "x = torch.randn(3, 4, requires_grad=True); w = torch.randn(5, 4)\n"
        "ops.fused_linear_cross_entropy(x, w, torch.tensor([0, 1, 4])).backward()\n"
        "assert x.grad is not None\n"
        "print('fine')"
    )
    done = run(code)
    assert done.stdout.strip() == "fine", done.stderr


def test_kernels_without_triton_name_the_extra():
    code = BREAK.format(names=["triton"], error="ImportError") + (
        "from npu_trainer_kernels.ops._head_gradient import _row_gradient_kernel as k\nk[(1,)]()"
    )
    done = run(code)
    assert "MissingDependencyError" in done.stderr
    assert "npu_trainer_kernels[cuda]" in done.stderr


def test_grpo_trainer_without_trl_says_what_to_install():
    code = BREAK.format(names=["trl"], error="ImportError") + "from npu_trainer_kernels import GRPOTrainer"
    done = run(code)
    assert "MissingDependencyError" in done.stderr
    assert "pip install 'trl>=1.15,<2'" in done.stderr


def test_asking_for_triton_on_a_cpu_says_why_not():
    code = (
        "import torch\nfrom npu_trainer_kernels import ops\n"
        "ops.linear_logprob(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=int), backend='triton')"
    )
    assert "on a CPU Triton runs only in its interpreter" in run(code).stderr


def test_unknown_attribute():
    import npu_trainer_kernels

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        npu_trainer_kernels.nothing  # noqa: B018


def test_training_knows_neither_the_ascend_compiler_nor_the_benchmarks():
    """What a Trainer imports; in a process of its own, since other tests import everything."""
    code = (
        "import sys; import npu_trainer_kernels.callback, npu_trainer_kernels.arguments, npu_trainer_kernels.ops; "
        "print([n for n in sys.modules if n.startswith(('npu_trainer_kernels.ascend', 'npu_trainer_kernels.cli', "
        "'benchmarks', 'npu_trainer_kernels.benchmarks'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
