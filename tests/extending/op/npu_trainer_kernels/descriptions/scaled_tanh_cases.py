"""The scaled tanh."""

from collections.abc import Mapping

import torch

from .. import ops
from .base import (
    BACKEND,
    HIDDEN,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    Outputs,
    Tensors,
    Workload,
    randn,
    run_backward,
)

__all__ = ["FORMS", "GATE"]

SCALE = 2.0


def _build(work: Workload, device: torch.device) -> Inputs:
    shape = work.sizes["N"], work.sizes["H"]
    return Inputs({"x": randn(work, device, *shape, scale=3.0)}, ("x",), (randn(work, device, *shape),))


def _reference(t: Tensors) -> Outputs:
    return ops.scaled_tanh_reference(t["x"], SCALE)


def _ours(backend: str | None) -> Function:
    return lambda t: ops.scaled_tanh(t["x"], SCALE, backend=backend)


# Without `work`: nobody measures it yet.
FORMS = {"scaled_tanh": Form(_build, _reference, _ours, lambda m, n: {"N": n, "H": m.hidden})}


def _gate(t: GateTensors, rows: int, hidden: int) -> Mapping[str, int]:
    run_backward(ops.scaled_tanh(t.floats(rows, hidden), SCALE, backend=BACKEND))
    row = rows * hidden * t.itemsize
    return {"_forward_kernel": 2 * row, "_backward_kernel": 3 * row}


GATE: tuple[GateEntry, ...] = (GateEntry("scaled_tanh", HIDDEN, "hidden", _gate),)
