"""Test setup: Triton kernels run in Triton's interpreter, unless NPU_KERNELS_TEST_DEVICE names an accelerator."""

import os

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
