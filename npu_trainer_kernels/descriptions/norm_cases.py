"""Norms: RMSNorm by itself, behind a projection, behind a residual addition, with a gate; layer norm."""

from collections.abc import Mapping
from typing import Any

import torch

from .. import ops
from .base import (
    BACKEND,
    EPS,
    HEAD_DIMS,
    HIDDEN,
    ROWS,
    Call,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    ModelShapes,
    Outputs,
    Tensors,
    Workload,
    passes,
    randn,
    run_backward,
)

__all__ = ["FORMS", "GATE"]


def _build_norm(work: Workload, device: torch.device) -> Inputs:
    shape = work.sizes["N"], work.sizes["H"]
    weight = (1 + 0.1 * torch.randn(shape[1], device=device)).to(work.torch_dtype)
    tensors = {"x": randn(work, device, *shape), "weight": weight}
    return Inputs(tensors, ("x", "weight"), (randn(work, device, *shape),))


def _norm_reference(t: Tensors) -> Outputs:
    return ops.rms_norm_reference(t["x"], t["weight"], EPS)


def _norm(backend: str | None) -> Function:
    return lambda t: ops.rms_norm(t["x"], t["weight"], EPS, backend=backend)


def _build_linear_norm(work: Workload, device: torch.device) -> Inputs:
    rows, hidden, heads, size = (work.sizes[name] for name in ("N", "H", "Q", "D"))
    tensors = {
        "x": randn(work, device, rows, hidden),
        "weight": randn(work, device, heads * size, hidden, scale=hidden**-0.5),
        "norm_weight": randn(work, device, size),
    }
    return Inputs(tensors, ("x", "weight", "norm_weight"), (randn(work, device, rows, heads, size),))


def _linear_norm_reference(t: Tensors) -> Outputs:
    return ops.linear_rms_norm_reference(t["x"], t["weight"], t["norm_weight"], eps=EPS)


def _linear_norm(backend: str | None) -> Function:
    return lambda t: ops.linear_rms_norm(t["x"], t["weight"], t["norm_weight"], eps=EPS, backend=backend)


def _build_add_norm(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_norm(work, device)
    shape = work.sizes["N"], work.sizes["H"]
    inputs.tensors["residual"] = randn(work, device, *shape)
    inputs.leaves = ("x", "residual", "weight")
    inputs.grads = (*inputs.grads, randn(work, device, *shape))
    return inputs


def _add_norm_reference(t: Tensors) -> Outputs:
    return ops.add_rms_norm_reference(t["x"], t["residual"], t["weight"], EPS)


def _add_norm(backend: str | None) -> Function:
    return lambda t: ops.add_rms_norm(t["x"], t["residual"], t["weight"], EPS, backend=backend)


def _layer_norm_reference(t: Tensors) -> Outputs:
    return ops.layer_norm_reference(t["x"], t["weight"], None, EPS)


def _layer_norm(backend: str | None) -> Function:
    return lambda t: ops.layer_norm(t["x"], t["weight"], None, EPS, backend=backend)


def _build_gated_norm(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_norm(work, device)
    inputs.tensors["gate"] = randn(work, device, work.sizes["N"], work.sizes["H"])
    inputs.leaves = ("x", "gate", "weight")
    return inputs


def _gated_norm_reference(t: Tensors) -> Outputs:
    return ops.gated_rms_norm_reference(t["x"], t["gate"], t["weight"], EPS)


def _gated_norm(backend: str | None) -> Function:
    return lambda t: ops.gated_rms_norm(t["x"], t["gate"], t["weight"], EPS, backend=backend)


def _row_sizes(model: ModelShapes, tokens: int) -> dict[str, int]:
    return {"N": tokens, "H": model.hidden}


def _row_elements(sizes: Mapping[str, int]) -> int:
    return sizes["N"] * sizes["H"]


FORMS = {
    # Forward reads x and writes y; backward reads x and dy and writes dx.
    "rms_norm": Form(_build_norm, _norm_reference, _norm, _row_sizes, passes((2, 3), _row_elements)),
    "linear_rms_norm": Form(
        _build_linear_norm, _linear_norm_reference, _linear_norm,
        lambda m, n: {"N": n, "H": m.hidden, "Q": m.heads, "D": m.head_dim},
    ),
    # Forward reads x and residual, writes y and S; backward reads S, dy and dS, writes one gradient for both.
    "add_rms_norm": Form(_build_add_norm, _add_norm_reference, _add_norm, _row_sizes, passes((4, 4), _row_elements)),
    # As rms_norm, with a gate that is read twice and whose gradient is written.
    "gated_rms_norm": Form(
        _build_gated_norm, _gated_norm_reference, _gated_norm, _row_sizes, passes((3, 5), _row_elements)
    ),
    "layer_norm": Form(_build_norm, _layer_norm_reference, _layer_norm, _row_sizes, passes((2, 3), _row_elements)),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


NORMED_HEAD_DIMS = tuple(range(32, 257, 8))


# Rows in two halves, and in blocks.
WIDE = (6144, 7168, 12288, 16384)


def _sums(hidden: int, itemsize: int, count: int = 1) -> dict[str, int]:
    """The partial gradients of weights: one core's, where the traffic is measured, into those of the parameters."""
    return {"_sum_kernel": count * hidden * (4 + itemsize)}


def _rms_norm(**options: Any) -> Call:
    def call(t: GateTensors, rows: int, hidden: int) -> Mapping[str, int]:
        weight = t.floats(hidden) if options.get("has_weight", True) else None
        given = {key: value for key, value in options.items() if key != "has_weight"}
        run_backward(ops.rms_norm(t.floats(rows, hidden), weight, backend=BACKEND, **given))
        row = rows * hidden * t.itemsize
        return {"_forward_kernel": 2 * row, "_backward_kernel": 3 * row, **_sums(hidden, t.itemsize)}

    return call


def _fp32_weight(t: GateTensors, rows: int, hidden: int) -> Mapping[str, int]:
    """Llama's casting promotes: y and its gradient are fp32."""
    run_backward(ops.rms_norm(t.floats(rows, hidden), t.floats(hidden, dtype=torch.float32), backend=BACKEND))
    elements = rows * hidden
    least = {"_forward_kernel": elements * (t.itemsize + 4), "_backward_kernel": elements * (2 * t.itemsize + 4)}
    return least | _sums(hidden, 4)


def _add_rms_norm(**options: Any) -> Call:
    def call(t: GateTensors, rows: int, hidden: int) -> Mapping[str, int]:
        x, residual, weight = t.floats(rows, hidden), t.floats(rows, hidden), t.floats(hidden)
        outputs = ops.add_rms_norm(x, residual, weight, backend=BACKEND, **options)
        run_backward(*(outputs if isinstance(outputs, tuple) else (outputs,)))
        row = rows * hidden * t.itemsize
        # "pre" reads x and residual and writes y and S, then reads S, dy and dS and writes one gradient for both.
        # "post" does not write S, and reads x and residual again in its place.
        least = {"_forward_kernel": (3 if options.get("mode") == "post" else 4) * row, "_backward_kernel": 4 * row}
        return least | _sums(hidden, t.itemsize)

    return call


def _layer_norm_gate(weighted: bool = True, biased: bool = True) -> Call:
    def call(t: GateTensors, rows: int, hidden: int) -> Mapping[str, int]:
        weight = t.floats(hidden) if weighted else None
        bias = t.floats(hidden) if biased else None
        run_backward(ops.layer_norm(t.floats(rows, hidden), weight, bias, backend=BACKEND))
        row = rows * hidden * t.itemsize
        sums = _sums(hidden, t.itemsize, weighted + biased)
        return {"_forward_kernel": 2 * row, "_backward_kernel": 3 * row, **sums}

    return call


def _gated_rms_norm(**options: Any) -> Call:
    def call(t: GateTensors, rows: int, hidden: int) -> Mapping[str, int]:
        x, gate, weight = t.floats(rows, hidden), t.floats(rows, hidden), t.floats(hidden)
        run_backward(ops.gated_rms_norm(x, gate, weight, backend=BACKEND, **options))
        row = rows * hidden * t.itemsize
        return {"_forward_kernel": 3 * row, "_backward_kernel": 5 * row, **_sums(hidden, t.itemsize)}

    return call


GATE: tuple[GateEntry, ...] = (
    GateEntry("rms_norm", HIDDEN, "hidden", _rms_norm()),
    GateEntry("rms_norm, gemma", HIDDEN, "hidden", _rms_norm(casting="gemma", offset=1.0)),
    GateEntry("rms_norm, none", HIDDEN, "hidden", _rms_norm(casting="none")),
    GateEntry("rms_norm, no weight", HIDDEN, "hidden", _rms_norm(has_weight=False)),
    GateEntry("rms_norm, fp32 weight", HIDDEN, "hidden", _fp32_weight, dtypes=("bf16",)),
    # The norms of queries and keys: many short rows.
    GateEntry("rms_norm, of heads", HEAD_DIMS, "head", _rms_norm(), rows=32 * ROWS),
    GateEntry("rms_norm, of heads of any size", NORMED_HEAD_DIMS, "head", _rms_norm(), rows=8 * ROWS, dtypes=("bf16",)),
    # Not whole numbers of 32-byte units.
    GateEntry("rms_norm, of heads of odd units", (72, 104), "head", _rms_norm(), rows=8 * ROWS,
              dtypes=("fp32", "fp16")),
    GateEntry("rms_norm, wide", WIDE, "hidden", _rms_norm(), dtypes=("bf16",)),
    GateEntry("add_rms_norm, pre, wide", WIDE[:2], "hidden", _add_rms_norm(), dtypes=("bf16",)),
    GateEntry("add_rms_norm, pre", HIDDEN, "hidden", _add_rms_norm()),
    GateEntry("add_rms_norm, pre, gemma", HIDDEN, "hidden", _add_rms_norm(casting="gemma", offset=1.0)),
    GateEntry("add_rms_norm, post", HIDDEN, "hidden", _add_rms_norm(mode="post")),
    GateEntry("add_rms_norm, post, gemma", HIDDEN, "hidden", _add_rms_norm(mode="post", casting="gemma", offset=1.0)),
    # Of Granite 4.
    GateEntry("add_rms_norm, pre, multiplier", (1536, 4096), "hidden", _add_rms_norm(multiplier=0.22)),
    # Of Cohere; of GPT-2, StableLM, Starcoder2 and their like; of OLMo.
    GateEntry("layer_norm, no bias", (4096, 8192, 12288), "hidden", _layer_norm_gate(biased=False)),
    GateEntry("layer_norm", (768, 1024, 2048, 4096, 6144), "hidden", _layer_norm_gate()),
    GateEntry("layer_norm, no weight", (2048, 4096), "hidden", _layer_norm_gate(weighted=False, biased=False)),
    # Of Qwen3-Next and Kimi-Linear, head by head; of Bamba, Granite 4 and Mamba 2; of Nemotron-H.
    GateEntry("gated_rms_norm, of heads", (64, 128, 256), "head", _gated_rms_norm(), rows=32 * ROWS),
    GateEntry("gated_rms_norm, of heads, gemma, sigmoid", (128,), "head",
          _gated_rms_norm(casting="gemma", activation="sigmoid"), rows=32 * ROWS),
    GateEntry("gated_rms_norm, gate first", (3072, 4096, 8192), "hidden", _gated_rms_norm(order="gate_first")),
    GateEntry("gated_rms_norm, gate first, 8 groups", (8192,), "hidden",
          _gated_rms_norm(order="gate_first", groups=8)),
)  # fmt: skip
