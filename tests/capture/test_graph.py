"""Graphs of a device, as far as a host without one can tell."""

from types import SimpleNamespace

import pytest
import torch

from npu_trainer_kernels.capture import Refused, recorder_for
from npu_trainer_kernels.cli import _doctor


def test_a_device_without_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    with pytest.raises(Refused, match=r"^torch\.cuda has no graphs in this version$"):
        recorder_for(torch.device("cuda"))


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        (None, "impossible, this version of the device's package has no graphs"),
        ({"class": "torch.cuda.CUDAGraph", "most": None}, "possible, by torch.cuda.CUDAGraph"),
        ({"class": "torch.npu.NPUGraph", "most": 1800}, "possible, by torch.npu.NPUGraph, at most 1800"),
    ],
)
def test_doctor_says_what_a_device_has(graphs: dict[str, object] | None, said: str) -> None:
    assert _doctor._graphs(graphs) == said
