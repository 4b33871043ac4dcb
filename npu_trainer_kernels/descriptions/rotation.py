"""The rotation of queries and keys, in halves and by turns."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import device, ops, tiling
from .base import (
    BACKEND,
    HEAD_DIMS,
    Call,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    ModelShapes,
    Outputs,
    Tensors,
    Unserved,
    Workload,
    passes,
    randn,
    run_backward,
)

__all__ = ["FORMS", "GATE", "is_rotation", "rope_of", "rotation_entry"]


def _build_rope(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes

    def heads(count: int) -> Tensor:
        # The layout of attention: [B, S, heads, D] in memory, viewed as [B, heads, S, D].
        return randn(work, device, 1, s["S"], count, s["D"]).transpose(1, 2)

    frequency = 1.0 / 500000.0 ** (torch.arange(0, s["D"], 2, device=device) / s["D"])
    angle = torch.arange(s["S"], device=device).unsqueeze(1) * frequency
    angle = torch.cat((angle, angle), -1).unsqueeze(0)
    tensors = {
        "q": heads(s["Q"]),
        "k": heads(s["K"]),
        "cos": angle.cos().to(work.torch_dtype),
        "sin": angle.sin().to(work.torch_dtype),
    }
    return Inputs(tensors, ("q", "k"), (heads(s["Q"]), heads(s["K"])))


def _rope_reference(t: Tensors) -> Outputs:
    return ops.rope_reference(t["q"], t["k"], t["cos"], t["sin"])


def _rope(backend: str | None) -> Function:
    return lambda t: ops.rope(t["q"], t["k"], t["cos"], t["sin"], backend=backend)


def _rope_sizes(model: ModelShapes, tokens: int) -> dict[str, int]:
    return {"S": tokens, "Q": model.heads, "K": model.kv_heads, "D": model.head_dim}


def _build_rope_by_turns(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_rope(work, device)
    # Half of each head rotates, as in GLM-4; the op reads the first half of tables of half the width.
    for name in ("cos", "sin"):
        inputs.tensors[name] = inputs.tensors[name][..., : work.sizes["D"] // 2].contiguous()
    return inputs


_BY_TURNS: dict[str, Any] = {"pairs": "interleaved", "tables": "first_half"}


def _rope_by_turns_reference(t: Tensors) -> Outputs:
    return ops.rope_reference(t["q"], t["k"], t["cos"], t["sin"], **_BY_TURNS)


def _rope_by_turns(backend: str | None) -> Function:
    return lambda t: ops.rope(t["q"], t["k"], t["cos"], t["sin"], backend=backend, **_BY_TURNS)


def _head_elements(sizes: Mapping[str, int]) -> int:
    return sizes["S"] * (sizes["Q"] + sizes["K"]) * sizes["D"]


_ROTATION_PASSES = passes((2, 2), _head_elements)
FORMS = {
    "rope": Form(_build_rope, _rope_reference, _rope, _rope_sizes, _ROTATION_PASSES),
    "rope_by_turns": Form(
        _build_rope_by_turns, _rope_by_turns_reference, _rope_by_turns, _rope_sizes, _ROTATION_PASSES
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


def _rope_gate(part: float = 1.0, table: torch.dtype | None = None, **options: Any) -> Call:
    """As in a model: heads are cut out of the projection `[B, T, H D]`, by a transposition where they come before
    tokens; `part` of each rotates. `table`: the dtype of the tables, where that is another."""

    def call(t: GateTensors, rows: int, size: int) -> Mapping[str, int]:
        heads, kv_heads = 32, 8
        q, k = (t.floats(1, rows, n * size).view(1, rows, n, size) for n in (heads, kv_heads))
        if options.get("heads", 1) == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        kind = options.get("tables", "each")
        width = int(part * size) // (2 if kind == "pair" else 1)
        cos, sin = (t.floats(1, rows, width, dtype=table, grad=False) for _ in range(2))
        run_backward(*ops.rope(q, k, cos, sin, backend=BACKEND, **options))
        # Forward and backward: every head of q and k is read and written, cos and sin are read once for all of them.
        read = width // 2 if kind == "first_half" else width
        return {"_rotate_kernel": 2 * rows * (2 * (heads + kv_heads) * size * t.itemsize + 2 * read * cos.itemsize)}

    return call


def _share(part: float) -> str:
    return {0.25: "a quarter", 0.5: "half", 0.75: "three quarters"}.get(part, f"{part:g} of a head")


def rope_of(part: float, sizes: tuple[int, ...], form: str = "rope", **options: Any) -> GateEntry:
    rule = _rope_rule(part, options.get("pairs", "halves"))
    return GateEntry(f"{form}, {_share(part)}", sizes, "head", _rope_gate(part, **options), part=part, unserved=rule)


def _rope_rule(part: float, pairs: str) -> Unserved:
    def unserved(size: int, itemsize: int, spec: device.DeviceSpec) -> str | None:
        half = int(part * size) // 2
        return tiling.rope_unserved(half, size - 2 * half, itemsize, pairs != "halves", spec)

    return unserved


_ONE_BY_ONE = {"halves": "", "interleaved": "by turns", "regrouped": "regrouped"}


_OF_TABLES = {"each": "", "pair": "tables of pairs", "first_half": "tables of which half is read"}


def rotation_entry(part: float, pairs: str, tables: str, casting: str) -> GateEntry:
    """A rotation as a model has it, of any head; options as `ops.rope` has them.

    Args:
        part: the share of a head that rotates.
        pairs, tables, casting: options of `ops.rope`.
    """
    words = (_ONE_BY_ONE[pairs], _OF_TABLES[tables])
    op = ", ".join(["rope", *filter(None, words), *([] if part == 1 else [_share(part)])])
    call = _rope_gate(part, pairs=pairs, tables=tables, casting=casting)
    return GateEntry(op, (), "head", call, part=part, unserved=_rope_rule(part, pairs))


_OTHER_HEAD_DIMS = tuple(size for size in range(32, 257, 8) if size not in HEAD_DIMS)


GATE: tuple[GateEntry, ...] = (
    GateEntry("rope", HEAD_DIMS, "head", _rope_gate()),
    # Heads whose halves are no multiple of 32 bytes, too.
    GateEntry("rope, any head", _OTHER_HEAD_DIMS, "head", _rope_gate(), share=64, dtypes=("bf16",)),
    # Of the images of Qwen3-VL and of Qwen2.5-VL: tokens before heads, tables of 32 bits beside heads of 16.
    GateEntry("rope, of images", (64, 72, 80), "head", _rope_gate(table=torch.float32, casting="fp32", heads=2),
          dtypes=("bf16",)),
    # Of Pythia and Qwen3-Next, of GLM-4.5, of Phi-4 mini.
    rope_of(0.25, (128, 256)),
    rope_of(0.5, (64, 128, 256)),
    rope_of(0.75, (128,)),
    # Of GPT-OSS; of Cohere; of GLM-4; of Ernie 4.5; of DeepSeek-V3's part of a head that rotates.
    GateEntry("rope, tables of pairs", (64, 128), "head", _rope_gate(tables="pair")),
    GateEntry("rope, by turns", (64, 128, 256), "head", _rope_gate(pairs="interleaved", casting="fp32")),
    rope_of(0.5, (128,), "rope, by turns", pairs="interleaved", tables="first_half"),
    GateEntry("rope, by turns, tables of pairs", (64, 128), "head",
              _rope_gate(pairs="interleaved", tables="first_half")),
    GateEntry("rope, regrouped", (64, 128), "head", _rope_gate(pairs="regrouped", tables="first_half")),
)  # fmt: skip


def is_rotation(entry: GateEntry) -> bool:
    """Whether an entry is one of `ops.rope`."""
    return entry.op.partition(",")[0] == "rope"
