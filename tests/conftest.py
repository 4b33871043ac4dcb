"""Test setup: Triton kernels run in Triton's interpreter, unless NPU_KERNELS_TEST_DEVICE names an accelerator."""

import os
from pathlib import Path

DEVICE = os.environ.setdefault("NPU_KERNELS_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    # Read by Triton when a kernel is decorated, so before anything imports the package.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Two ranks of a test on two cores: one thread each, and the same summation order everywhere.
torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out tests/ascend, which run without the interpreter, in a session and an environment of their own
    (`make test-ascend`), unless they are what was asked for."""
    folder = Path(__file__).parent / "ascend"
    asked = any(Path(argument.partition("::")[0]).resolve().is_relative_to(folder) for argument in config.args)
    return True if collection_path == folder and not asked else None


@pytest.fixture
def device() -> torch.device:
    """Where tests put their tensors."""
    return torch.device(DEVICE)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every op is tested with each of its implementations."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
