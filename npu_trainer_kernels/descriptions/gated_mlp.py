"""Gated MLPs: SwiGLU and its like, by itself and with the projection behind it."""

from collections.abc import Mapping
from typing import Any

import torch

from .. import ops, tiling
from ..ops.gates import ACTIVATIONS
from .base import (
    BACKEND,
    GPT_OSS,
    Call,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    Outputs,
    Tensors,
    Workload,
    passes,
    randn,
    run_backward,
)

__all__ = ["FORMS", "GATE"]


def _build_swiglu(work: Workload, device: torch.device) -> Inputs:
    shape = work.sizes["N"], work.sizes["I"]
    tensors = {"gate": randn(work, device, *shape), "up": randn(work, device, *shape)}
    return Inputs(tensors, ("gate", "up"), (randn(work, device, *shape),))


def _swiglu_reference(t: Tensors) -> Outputs:
    return ops.swiglu_reference(t["gate"], t["up"])


def _swiglu(backend: str | None) -> Function:
    return lambda t: ops.swiglu(t["gate"], t["up"], backend=backend)


def _geglu_reference(t: Tensors) -> Outputs:
    return ops.swiglu_reference(t["gate"], t["up"], activation="gelu_tanh")


def _geglu(backend: str | None) -> Function:
    return lambda t: ops.swiglu(t["gate"], t["up"], activation="gelu_tanh", backend=backend)


def _build_swiglu_linear(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_swiglu(work, device)
    inputs.tensors["weight"] = randn(work, device, work.sizes["H"], work.sizes["I"], scale=work.sizes["I"] ** -0.5)
    inputs.leaves = ("gate", "up", "weight")
    inputs.grads = (randn(work, device, work.sizes["N"], work.sizes["H"]),)
    return inputs


def _swiglu_linear_reference(t: Tensors) -> Outputs:
    return ops.swiglu_linear_reference(t["gate"], t["up"], t["weight"])


def _swiglu_linear(backend: str | None) -> Function:
    return lambda t: ops.swiglu_linear(t["gate"], t["up"], t["weight"], backend=backend)


def _mlp_elements(sizes: Mapping[str, int]) -> int:
    return sizes["N"] * sizes["I"]


# Forward reads gate and up, writes one; backward reads both and dy, writes two.
_MLP_PASSES = passes((3, 5), _mlp_elements)
FORMS = {
    "swiglu": Form(_build_swiglu, _swiglu_reference, _swiglu, lambda m, n: {"N": n, "I": m.intermediate}, _MLP_PASSES),
    "swiglu_linear": Form(
        _build_swiglu_linear, _swiglu_linear_reference, _swiglu_linear,
        lambda m, n: {"N": n, "I": m.intermediate, "H": m.hidden},
    ),
    "geglu": Form(_build_swiglu, _geglu_reference, _geglu, lambda m, n: {"N": n, "I": m.intermediate}, _MLP_PASSES),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


_PROJECTED = 16


def _swiglu_gate(strided: bool = False, **options: Any) -> Call:
    def call(t: GateTensors, rows: int, size: int) -> Mapping[str, int]:
        gate, up = _gate_and_up(t, rows, size, **options)
        if strided:  # the halves of one projection, as two tensors
            gate, up = t.floats(rows, 2 * size).chunk(2, -1)
        run_backward(ops.swiglu(gate, up, backend=BACKEND, **options))
        row = rows * size * t.itemsize
        return {"_forward_kernel": 3 * row, "_backward_kernel": 5 * row}

    return call


def _gate_and_up(
    t: GateTensors, rows: int, size: int, joined: str | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (t.floats(rows, size), t.floats(rows, size)) if joined is None else (t.floats(rows, 2 * size), None)


def _swiglu_linear_gate(**options: Any) -> Call:
    """Backward forms the product once more, everything in the place of what it was formed from."""

    def call(t: GateTensors, rows: int, size: int) -> Mapping[str, int]:
        # Only the activation's kernels are looked at: any width of the projection will do.
        weight = t.floats(_PROJECTED, size)
        gate, up = _gate_and_up(t, rows, size, **options)
        run_backward(ops.swiglu_linear(gate, up, weight, overwrite=True, backend=BACKEND, **options))
        row = rows * size * t.itemsize
        return {"_forward_kernel": 3 * row, "_backward_kernel": 6 * row}

    return call


# The sizes of Gemma 3 1B, 4B and 27B; of a layer of each other gate; of any gate to come.
_GATES: dict[str, tuple[int, ...]] = {"gelu_tanh": (6912, 10240, 21504), "gelu": (14336,), "relu2": (6912,)}
_GATES |= {name: (8192,) for name in ACTIVATIONS if name not in _GATES and name != "silu"}


# Vector instructions per element, counted by hand.
_MINIMA = {
    "_backward_kernel": (
        15,
        "3 in, 2 out to convert; a = g / (1 + exp(-g)) (4); du = dy a; dg = dy u (1 + (g - a)) / (1 + exp(-g)) (5)",
    ),
}
GATE: tuple[GateEntry, ...] = (
    GateEntry("swiglu", (4864, 8192, 14336, 18944), "intermediate", _swiglu_gate(), minima=_MINIMA),
    # Tiles of several rows; of one; two to four of a row.
    GateEntry("swiglu, halves of one projection", (1408, 2880, 4864, 8192, 11008, 14336, 18944), "intermediate",
          _swiglu_gate(strided=True)),
    *(GateEntry(f"swiglu, {name}", sizes, "intermediate", _swiglu_gate(activation=name))
      for name, sizes in _GATES.items()),
    # Of GPT-OSS 20B; of Phi-3 mini and GLM-4 9B.
    GateEntry("swiglu, alpha, limit, offset", (2880,), "intermediate", _swiglu_gate(**GPT_OSS)),
    GateEntry("swiglu, joined in halves", (8192, 13696), "intermediate", _swiglu_gate(joined="halves")),
    GateEntry("swiglu, joined by turns", (8192,), "intermediate", _swiglu_gate(joined="interleaved"),
          unserved=tiling.swiglu_unserved),
    GateEntry("swiglu, joined by turns, alpha, limit, offset", (2880,), "intermediate",
          _swiglu_gate(joined="interleaved", **GPT_OSS), unserved=tiling.swiglu_unserved),
    GateEntry("swiglu_linear", (4864, 8192, 14336, 18944), "intermediate", _swiglu_linear_gate()),
    GateEntry("swiglu_linear, gelu_tanh", (6912, 10240, 21504), "intermediate",
              _swiglu_linear_gate(activation="gelu_tanh")),
    GateEntry("swiglu_linear, gelu", (14336,), "intermediate", _swiglu_linear_gate(activation="gelu")),
    GateEntry("swiglu_linear, joined in halves", (8192, 13696), "intermediate", _swiglu_linear_gate(joined="halves")),
    GateEntry("swiglu_linear, joined by turns, alpha, limit, offset", (2880,), "intermediate",
          _swiglu_linear_gate(joined="interleaved", **GPT_OSS), unserved=tiling.swiglu_unserved),
)  # fmt: skip
