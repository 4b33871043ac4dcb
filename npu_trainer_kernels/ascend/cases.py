"""The cases of the gate, from the descriptions of ops (`descriptions.GATE`): each in every size and dtype.

A description's function calls the op forward and backward, and serves both purposes of a `gate.GateCase`: on `meta`
tensors of the production shape it makes the op's own host code and tiling choose the launches; on CPU tensors it makes
one core's share of that (the rows that one of the chip's cores gets, or two rows of logits), so that the bytes moved
can be counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from .. import device
from ..descriptions import (
    GATE,
    GATE_DTYPES,
    GateEntry,
    GateTensors,
    ModelShapes,
    is_rotation,
    rope_of,
    rotation_entry,
)  # fmt: skip
from .gate import FewRows, GateCase, Minimum

__all__ = ["cases", "cases_of", "model_cases"]


def cases_of(entry: GateEntry) -> Iterator[GateCase]:
    """One case of an entry for each size and dtype."""
    for size in entry.sizes:
        for name in entry.dtypes:
            yield _case(entry, size, name)


def _case(entry: GateEntry, size: int, name: str) -> GateCase:
    dtype = GATE_DTYPES[name]

    def run() -> None:
        entry.call(GateTensors(dtype, "cpu" if entry.reads_values else "meta"), entry.rows, size)

    def run_share() -> Mapping[str, int]:
        chip = device.spec(torch.device("cpu"))
        rows = entry.share or entry.rows // chip.vector_cores
        with device.use_spec(replace(chip, vector_cores=1)):
            return entry.call(GateTensors(dtype, "cpu"), rows, size)

    # A launch is compiled for numbers of rows that 16 divides, as a micro-batch's are.
    few = 16 if entry.share else entry.rows // 32

    def run_few() -> None:
        entry.call(GateTensors(dtype, "cpu" if entry.reads_values or entry.follows_ids else "meta"), few, size)

    # Kernels move the same bytes in fp16 as in bf16.
    measured = None if name == "fp16" else run_share
    minima = {kernel: Minimum(*minimum) for kernel, minimum in entry.minima.items()}
    unserved = None if entry.unserved is None else partial(entry.unserved, size, dtype.itemsize)
    return GateCase(entry.op, f"{entry.rows} x {size} ({entry.label})", name, run, measured, entry.max_traffic,
                    FewRows(run_few, few, few * size), minima, unserved)  # fmt: skip


def cases() -> list[GateCase]:
    """All cases of the table."""
    return [case for entry in GATE for case in cases_of(entry)]


def model_cases(shapes: ModelShapes, dtype: str, rotations: Sequence[Mapping[str, str]] = ()) -> list[GateCase]:
    """Returns the table's cases at a model's shapes instead of its own, for compiling; their traffic is not counted.
    Cases whose sizes the model lacks are left out, and so are rotations that the model does not use.

    Args:
        shapes: the model.
        dtype: a key of `descriptions.GATE_DTYPES`.
        rotations: the rotations of the model's code, each as options of `ops.rope` (`pairs`, `tables`, `casting`);
            empty: they are not known, and the result has every rotation of the table.
    """
    sizes = {
        "hidden": shapes.hidden,
        "head": shapes.head_dim,
        "intermediate": shapes.intermediate,
        "vocabulary": shapes.vocabulary,
        "channels": shapes.channels,
    }
    known = {entry.part for entry in GATE}
    if rotations:
        own = [rotation_entry(shapes.rotated, **form) for form in rotations]
        table = (*(entry for entry in GATE if not is_rotation(entry)), *own)
    else:
        table = GATE if shapes.rotated in known else (*GATE, rope_of(shapes.rotated, ()))
    entries = (e for e in table if dtype in e.dtypes and sizes[e.label] and e.part in (1.0, shapes.rotated))
    fitted = (replace(e, sizes=(sizes[e.label],), dtypes=(dtype,)) for e in entries)
    return [replace(case, run_small=None, few=None) for entry in fitted for case in cases_of(entry)]
