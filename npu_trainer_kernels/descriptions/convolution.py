"""The short causal convolution of layers with a state."""

from collections.abc import Mapping

import torch

from .. import ops
from .base import (
    BACKEND,
    Call,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    Outputs,
    Tensors,
    Work,
    Workload,
    randn,
)

__all__ = ["FORMS", "GATE"]


def _build(work: Workload, device: torch.device) -> Inputs:
    """x in the layout of models: neighbouring channels lie side by side."""
    s = work.sizes
    tensors = {
        "x": randn(work, device, 1, s["N"], s["C"]).transpose(1, 2),
        "weight": randn(work, device, s["C"], s["K"], scale=s["K"] ** -0.5),
    }
    return Inputs(tensors, ("x", "weight"), (randn(work, device, 1, s["N"], s["C"]).transpose(1, 2),))


def _reference(t: Tensors) -> Outputs:
    return ops.causal_conv1d_reference(t["x"], t["weight"], activation="silu")


def _ours(backend: str | None) -> Function:
    return lambda t: ops.causal_conv1d(t["x"], t["weight"], activation="silu", backend=backend)


def _work(case: Workload) -> dict[str, Work]:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    size = float(case.sizes["N"] * case.sizes["C"] * case.torch_dtype.itemsize)
    return {"forward": Work(bytes=2 * size), "backward": Work(bytes=3 * size), "both": Work(bytes=5 * size)}


FORMS = {
    "causal_conv1d": Form(
        _build, _reference, _ours, lambda m, n: {"N": n, "C": m.channels, "K": m.taps}, _work,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


def _gate(taps: int, activation: str | None, biased: bool, segments: bool) -> Call:
    def call(t: GateTensors, rows: int, channels: int) -> Mapping[str, int]:
        x = t.floats(1, rows, channels).transpose(1, 2)
        weight, bias = t.floats(channels, taps), t.floats(channels) if biased else None
        packed = state = None
        if segments:
            # Two segments, so that their chunks come from the host.
            packed = ops.Segments.make([rows // 2, rows - rows // 2], x.device)
            state = t.floats(2, taps - 1, channels).transpose(1, 2)
        y = ops.causal_conv1d(
            x, weight, bias, activation=activation, segments=packed, state=state, backend=BACKEND
        )  # fmt: skip
        assert isinstance(y, torch.Tensor)
        torch.autograd.backward(y, torch.ones_like(y.transpose(1, 2)).transpose(1, 2))
        size = rows * channels * t.itemsize
        # An NPU reads the state in fp32; its gradient has x's dtype. A share has the sums of one program.
        numbers = 2 * (taps - 1) * channels if segments else 0
        sums = (taps + 1) * channels * 4
        return {
            "_forward_kernel": 2 * size + 4 * numbers,
            "_backward_kernel": 3 * size + (4 + t.itemsize) * numbers + sums,
            "_sum_kernel": 2 * sums,
        }

    return call


GATE: tuple[GateEntry, ...] = (
    # Queries, keys and values side by side of Qwen3.5 0.8B and of Qwen3-Next; LFM2; Mamba 2; the most taps.
    GateEntry("causal_conv1d", (6144, 8192), "channels", _gate(4, "silu", False, False)),
    GateEntry("causal_conv1d, three taps", (2048,), "channels", _gate(3, None, False, False)),
    GateEntry("causal_conv1d, bias", (4352,), "channels", _gate(4, "silu", True, False)),
    GateEntry("causal_conv1d, eight taps", (4096,), "channels", _gate(8, "silu", True, True), follows_ids=True),
    GateEntry("causal_conv1d, segments and state", (8192,), "channels", _gate(4, "silu", True, True), follows_ids=True),
)
