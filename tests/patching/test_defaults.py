"""apply_npu_kernels while the process's default device or dtype is another one: probes have dtypes of their own."""

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from tests.models import batch, small_model

FAMILIES = ("llama", "gemma2", "granite", "cohere")


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def forget() -> None:
    """What is recognised is kept, and what the tests before have recognised would hide what is not."""
    for name, module in list(sys.modules.items()):
        if name.startswith("npu_trainer_kernels.patching"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


DEFAULTS = {
    "meta": lambda: default_device("meta"),
    "bf16": lambda: default_dtype(torch.bfloat16),
    "fp64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_is_found(family, default):
    with apply_npu_kernels(small_model(family), ops=PATCHES) as kernels:
        expected = str(kernels.report())
    model = small_model(family)
    forget()
    with DEFAULTS[default](), apply_npu_kernels(model, ops=PATCHES) as kernels:
        found = str(kernels.report())
    forget()
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_under_another_default_dtype_has_the_same_bits(family):
    """Every number that an op makes is of a dtype that it names."""

    def step(dtype):
        model = small_model(family)
        with default_dtype(dtype), apply_npu_kernels(model, ops=PATCHES):
            loss = model(**batch()).loss
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    for found, expected in zip(step(torch.bfloat16), step(torch.float32), strict=True):
        assert torch.equal(found, expected)
