"""A description of each op: one home for all that runs an op by itself.

    shapes = ModelShapes.of_config(config)
    for workload in of_model(shapes, tokens=4096, dtype="bfloat16"):
        inputs = workload.inputs(device)
        ours, plain = workload.ours("triton"), workload.reference
        inputs.backward(ours(inputs.tensors))

`npu-kernels doctor`, `tune` and `prove`, the benchmarks, the Ascend gate and the tests read them. `base.py` says what a
description is made of, and each other file describes one family of ops: its forms (`FORMS`), and the sizes and options
that the Ascend compiler is given (`GATE`).
"""

from ..table import FORM_NAMES
from . import attention, embedding, experts, gated_mlp, head, norms, rotation
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
from .head import GRPO_BETA, GRPO_EPSILON, grpo_lengths, grpo_terms
from .rotation import is_rotation, rope_of, rotation_entry

__all__ = [
    "DTYPES", "EPS", "FORMS", "GATE", "GATE_DTYPES", "GRPO_BETA", "GRPO_EPSILON", "HEAD_DIMS", "HIDDEN", "ROWS",
    "VOCABULARIES", "Form", "GateEntry", "GateTensors", "Inputs", "ModelShapes", "Outputs", "Tensors", "Work",
    "Workload", "as_tuple", "attention_lengths", "grpo_lengths", "grpo_terms", "is_rotation", "of_model", "rope_of",
    "rotation_entry",
]  # fmt: skip

for _family in (norms, gated_mlp, experts, rotation, attention, embedding, head):
    FORMS.update(_family.FORMS)
GATE: tuple[GateEntry, ...] = (
    *norms.GATE, *gated_mlp.GATE, *rotation.GATE, *embedding.GATE, *experts.GATE, *head.GATE,
)  # fmt: skip
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
