"""Environment variables that are on or off."""

import pytest

from npu_trainer_kernels import backends
from npu_trainer_kernels._switch import switch


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
    monkeypatch.setenv("NPU_KERNELS_STRICT", "perhaps")
    with pytest.raises(ValueError, match=r"NPU_KERNELS_STRICT must be one of .*; got 'perhaps'"):
        backends.is_strict()
