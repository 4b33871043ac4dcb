"""The token embedding."""

from collections.abc import Mapping

import torch

from .. import ops
from .base import (
    BACKEND,
    HIDDEN,
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
    run_backward,
)

__all__ = ["FORMS", "GATE"]


def _build_embedding(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    ids = torch.randint(s["V"], (s["N"],), device=device)
    tensors = {"weight": randn(work, device, s["V"], s["D"]), "ids": ids}
    return Inputs(tensors, ("weight",), (randn(work, device, s["N"], s["D"]),))


def _embedding_reference(t: Tensors) -> Outputs:
    return ops.embedding_reference(t["ids"], t["weight"])


def _embedding(backend: str | None) -> Function:
    return lambda t: ops.embedding(t["ids"], t["weight"], backend=backend)


def _embedding_work(case: Workload) -> dict[str, Work]:
    s = case.sizes
    size = float(s["D"] * case.torch_dtype.itemsize)
    rows, weight = s["N"] * size, s["V"] * size
    forward, backward = 2 * rows, rows + weight
    return {"forward": Work(bytes=forward), "backward": Work(bytes=backward), "both": Work(bytes=forward + backward)}


FORMS = {
    "embedding": Form(
        _build_embedding, _embedding_reference, _embedding,
        lambda m, n: {"N": n, "V": m.vocabulary, "D": m.hidden}, _embedding_work,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


def _embedding_gate(scale: float | None) -> Call:
    def call(t: GateTensors, rows: int, hidden: int) -> Mapping[str, int]:
        vocabulary = 32000 if t.where == "meta" else 500
        ids = t.ids(rows, below=vocabulary)
        run_backward(ops.embedding(ids, t.floats(vocabulary, hidden), scale=scale, backend=BACKEND))
        row = hidden * t.itemsize
        distinct = rows if t.where == "meta" else ids.unique().numel()
        return {"_gather_kernel": 2 * rows * row, "_scatter_kernel": (rows + distinct) * row}

    return call


GATE: tuple[GateEntry, ...] = (
    GateEntry("embedding", HIDDEN, "hidden", _embedding_gate(None), follows_ids=True),
    GateEntry("embedding, scaled", HIDDEN, "hidden", _embedding_gate(45.25), follows_ids=True),
)  # fmt: skip
