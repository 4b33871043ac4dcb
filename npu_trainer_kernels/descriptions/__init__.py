"""A description of each op: one home for all that runs an op by itself.

    shapes = ModelShapes.of_config(config)
    for workload in of_model(shapes, tokens=4096, dtype="bfloat16"):
        inputs = workload.inputs(device)
        ours, plain = workload.ours("triton"), workload.reference
        inputs.backward(ours(inputs.tensors))

`npu-kernels doctor`, `tune` and `prove`, the benchmarks, the Ascend gate and the tests read them. `base.py` says what a
description is made of, and each other file describes one family of ops: its forms (`FORMS`), and the sizes and options
that the Ascend compiler is given (`GATE`). A new file is found by being there.
"""

import importlib
import pkgutil
from types import ModuleType

from ..evidence.table import FORM_NAMES
from .base import (
    DTYPES,
    EPS,
    FORMS,
    GATE_DTYPES,
    HEAD_DIMS,
    HIDDEN,
    ROWS,
    VOCABULARIES,
    Form,
    GateEntry,
    GateTensors,
    Inputs,
    ModelShapes,
    Outputs,
    Tensors,
    Work,
    Workload,
    as_tuple,
    attention_lengths,
)  # fmt: skip
from .head import DIVERGENCE_BETAS, GRPO_BETA, GRPO_EPSILON, grpo_lengths, grpo_terms
from .rotation import is_rotation, rope_of, rotation_entry

__all__ = [
    "DIVERGENCE_BETAS", "DTYPES", "EPS", "FORMS", "GATE", "GATE_DTYPES", "GRPO_BETA", "GRPO_EPSILON", "HEAD_DIMS",
    "HIDDEN", "ROWS", "VOCABULARIES", "Form", "GateEntry", "GateTensors", "Inputs", "ModelShapes", "Outputs", "Tensors",
    "Work", "Workload", "as_tuple", "attention_lengths", "grpo_lengths", "grpo_terms", "is_rotation", "of_model",
    "rope_of", "rotation_entry",
]  # fmt: skip


def _families() -> list[ModuleType]:
    """Returns the files of this folder that describe ops, in the order of the table's rows, which is that of the Ascend
    report; a file that the table has no form of comes last."""
    names = (info.name for info in pkgutil.iter_modules(__path__) if info.name != "base")
    found = (importlib.import_module(f"{__name__}.{name}") for name in names)
    return sorted(found, key=lambda family: min(map((*FORM_NAMES, *family.FORMS).index, family.FORMS)))


_every_family = _families()
for _family in _every_family:
    FORMS.update(_family.FORMS)
GATE: tuple[GateEntry, ...] = tuple(entry for family in _every_family for entry in family.GATE)
"""All rows of the Ascend gate."""


def of_model(shapes: ModelShapes, tokens: int, dtype: str) -> list[Workload]:
    """Returns every op that a model can use, at its shapes.

    Args:
        shapes: the model.
        tokens: the number of tokens of a micro-batch; for GRPO these are 8 completions of equal length.
        dtype: a key of `DTYPES`.

    Raises:
        ValueError: fewer than 8 tokens, or an unknown dtype.
    """
    if tokens < 8:
        raise ValueError(f"tokens must be at least 8; got {tokens}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    every = ((form, FORMS[form].sizes(shapes, tokens)) for form in FORM_NAMES)
    return [Workload(form, sizes, dtype) for form, sizes in every if all(sizes.values())]
