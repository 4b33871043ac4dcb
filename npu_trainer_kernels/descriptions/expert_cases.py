"""The experts of a mixture."""

from collections.abc import Mapping
from typing import Any

import torch

from .. import ops
from .base import (
    BACKEND,
    GPT_OSS,
    Call,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    ModelShapes,
    Outputs,
    Tensors,
    Work,
    Workload,
    randn,
    run_backward,
)

__all__ = ["FORMS", "GATE"]


def _build_experts(work: Workload, device: torch.device) -> Inputs:
    n, hidden, inner, experts, slots = (work.sizes[name] for name in ("N", "H", "I", "E", "k"))
    # The output of a router: k different experts for each token, with probabilities that sum to one.
    scores, ids = torch.randn(n, experts, device=device).softmax(-1).topk(slots)
    tensors = {
        "x": randn(work, device, n, hidden),
        "ids": ids,
        "probabilities": (scores / scores.sum(-1, keepdim=True)).to(work.torch_dtype),
        "gate_up_weight": randn(work, device, experts, 2 * inner, hidden, scale=hidden**-0.5),
        "down_weight": randn(work, device, experts, hidden, inner, scale=inner**-0.5),
    }
    leaves = ("x", "probabilities", "gate_up_weight", "down_weight")
    return Inputs(tensors, leaves, (randn(work, device, n, hidden),))


def _experts_reference(t: Tensors) -> Outputs:
    return ops.moe_experts_reference(t["x"], t["ids"], t["probabilities"], t["gate_up_weight"], t["down_weight"])


def _experts(backend: str | None) -> Function:
    return lambda t: ops.moe_experts(
        t["x"], t["ids"], t["probabilities"], t["gate_up_weight"], t["down_weight"], backend=backend
    )


def _experts_sizes(model: ModelShapes, tokens: int) -> dict[str, int]:
    return {"N": tokens, "H": model.hidden, "I": model.intermediate, "E": model.experts, "k": model.slots}


def _experts_work(case: Workload) -> dict[str, Work]:
    """Products of every row with its expert's two matrices; x, o, the matrices, h, which has to be kept, and gradients.
    What else lies between products is not counted: nobody is known who needs none of it."""
    s = case.sizes
    rows, size = s["N"] * s["k"], float(case.torch_dtype.itemsize)
    product = 6.0 * rows * s["H"] * s["I"]
    matrices, tokens, kept = 3 * s["E"] * s["H"] * s["I"] * size, s["N"] * s["H"] * size, 2 * rows * s["I"] * size
    forward, backward = 2 * tokens + matrices + kept, 3 * tokens + 2 * matrices + kept
    return {
        "forward": Work(product, forward),
        "backward": Work(2 * product, backward),
        "both": Work(3 * product, forward + backward),
    }


FORMS = {"moe_experts": Form(_build_experts, _experts_reference, _experts, _experts_sizes, _experts_work)}


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


# Numbers per row and biases of each expert.
_EXPERTS_LIMIT = 1.10


# Of what the size of an entry is not: rows that are long enough for the numbers that come with each.
_INNER, _HIDDEN = 64, 512


def _moe_experts(
    experts: int, slots: int, of_hidden: bool, biased: bool = False, own_gate: bool = False, **options: Any
) -> Call:
    """Rows are as long as the size of the entry, or the gate is as wide; the other of the two is small, so that the
    products on the CPU are. With a gate of its own the steps are taken one by one."""

    def call(t: GateTensors, rows: int, size: int) -> Mapping[str, int]:
        # The rows of one core are of a few experts.
        n = experts if t.where == "meta" else min(experts, 4)
        hidden, inner = (size, _INNER) if of_hidden else (_HIDDEN, size)
        parts = 2 if options.get("gated", True) else 1
        biases: dict[str, Any] = {}
        if biased:
            biases = {"gate_up_bias": t.floats(n, parts * inner), "down_bias": t.floats(n, hidden)}
        own: dict[str, Any] = {"gate": lambda h: h[:, :inner] * h[:, inner:]} if own_gate else {}
        ids = t.ids(rows, slots, below=n)
        run_backward(ops.moe_experts(
            t.floats(rows, hidden), ids, t.floats(rows, slots, dtype=torch.float32),
            t.floats(n, parts * inner, hidden), t.floats(n, hidden, inner), backend=BACKEND, **biases,
            **own, **options,
        ))  # fmt: skip
        moved, all_rows = (slots + 1) * rows * hidden * t.itemsize, rows * slots
        # Without its own rows an expert's gradient is cleared: by the ids there are none such, and ends are read.
        least = {"_clear_kernel": 2 * 2 * 4 * n, "_sums_kernel": 2 * moved}
        if own_gate:
            # Of rows without an expert there are none either.
            tail = {"_clear_tail_kernel": 5 * 4}
            return (
                least
                | tail
                | {"_to_rows_kernel": moved, "_sums_backward_kernel": moved + all_rows * hidden * t.itemsize}
            )
        gate = all_rows * inner * t.itemsize
        if biased:
            least |= {"_expert_sums_kernel": parts * (gate + n * inner * t.itemsize)}
            # The matrix of the weights times the bias is there already, in fp32.
            least["_sums_kernel"] += rows * hidden * 4
        # Of x, of the gradient, and of x again.
        least |= {"_to_rows_kernel": 3 * moved}
        return least | {"_gate_kernel": (parts + 1) * gate, "_gate_backward_kernel": 2 * (parts + 1) * gate}

    return call


def _experts_of(
    name: str, experts: int, slots: int, hidden: int, inner: int, **options: Any
) -> tuple[GateEntry, GateEntry]:
    """A model's experts, once for what moves their rows and once for the gate."""
    return (
        GateEntry(f"moe_experts, {name}, rows", (hidden,), "hidden", _moe_experts(experts, slots, True, **options),
              max_traffic=_EXPERTS_LIMIT, follows_ids=True),
        GateEntry(f"moe_experts, {name}, gate", (inner,), "intermediate",
                  _moe_experts(experts, slots, False, **options), max_traffic=_EXPERTS_LIMIT, follows_ids=True),
    )  # fmt: skip


GATE: tuple[GateEntry, ...] = (
    *_experts_of("Qwen3 30B", 128, 8, 2048, 768),
    *_experts_of("GPT-OSS 20B", 32, 4, 2880, 2880, biased=True, interleaved=True, **GPT_OSS),
    # A device's share under expert parallelism.
    *_experts_of("DeepSeek-V3", 32, 8, 7168, 2048),
    *_experts_of("Mixtral", 8, 2, 4096, 14336),
    GateEntry("moe_experts, no gate", (1856,), "intermediate", _moe_experts(8, 2, False, gated=False, gate="relu2"),
          max_traffic=_EXPERTS_LIMIT, follows_ids=True),
    GateEntry("moe_experts, a gate of its own", (2048,), "hidden", _moe_experts(8, 2, True, own_gate=True),
          max_traffic=_EXPERTS_LIMIT, follows_ids=True),
)  # fmt: skip
