"""Environment variables that are on or off."""

import pytest
from torch import nn

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.support.switch import switch


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("off", False), ("0", False)])
def test_on_or_off(monkeypatch, value, expected):
    monkeypatch.setenv("NPU_KERNELS_X", value)
    assert switch("NPU_KERNELS_X", not expected) is expected


@pytest.mark.parametrize("default", [False, True])
def test_not_set(monkeypatch, default):
    for value in (None, ""):
        monkeypatch.delenv("NPU_KERNELS_X", raising=False)
        if value is not None:
            monkeypatch.setenv("NPU_KERNELS_X", value)
        assert switch("NPU_KERNELS_X", default) is default


def test_anything_else_is_named(monkeypatch):
    """Before a model is trained, and not where a kernel has failed."""
    monkeypatch.setenv("NPU_KERNELS_STRICT", "perhaps")
    with pytest.raises(ValueError, match=r"NPU_KERNELS_STRICT must be one of .*; got 'perhaps'"):
        apply_npu_kernels(nn.Linear(1, 1))
