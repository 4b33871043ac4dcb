"""Setup of the tests against torch_npu itself, on a machine without an NPU; they run in an environment of their own
(`make test-npu-contract`), which has torch_npu and no driver.

`vendor` makes the vendor's operators available for tensors on the CPU and on meta: `use_chip` lets any device stand for
an NPU. Where torch_npu or a tool is missing the tests fail with the command that installs it.
"""

import importlib
import os
from collections.abc import Iterator

import pytest

from npu_trainer_kernels import device
from tests.npu_contract import stubs

if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    raise pytest.UsageError("run `make test-npu-contract`: importing torch must not import torch_npu by itself")
# Before the tests are imported: transformers imports torch_npu where it is installed.
stubs.load()


@pytest.fixture(scope="session", autouse=True)
def _torch_npu() -> None:
    """torch_npu is there, and nothing stands in for it but the libraries under it."""
    error = device.torch_npu_error()
    assert error is None, f"torch_npu cannot be imported: {error!r}"
    # On meta, its attention asks the driver for the chip once, to warn of torch.compile on one of them.
    shapes = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    shapes._npu_fusion_attention_warning_printed = True  # type: ignore[attr-defined]


@pytest.fixture
def vendor() -> Iterator[str]:
    """The vendor's backend, on any device."""
    with device.use_chip("Ascend910B4"):
        yield "vendor"
