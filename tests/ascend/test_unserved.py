"""What the ops leave to the model on an NPU is what the gate refuses: no more, and no less."""

from dataclasses import replace

import pytest

from npu_trainer_kernels import descriptions, device
from npu_trainer_kernels.ascend import cases, gate

CHIP = "Ascend910B4"
pytestmark = pytest.mark.usefixtures("kept_cache")

# Size of a head, elements that rotate, how, dtypes: Pythia's, GPT-NeoX's and StableLM's heads, Llama 4's images.
ROTATIONS = [
    (88, 22, "halves", "bf16"),
    (88, 24, "halves", "bf16"),
    (96, 24, "halves", "bf16"),
    (64, 16, "halves", "bf16"),
    (64, 16, "halves", "fp32"),
    (96, 24, "halves", "fp32"),
    (80, 32, "halves", "bf16"),
    (88, 80, "halves", "bf16"),
    (88, 72, "halves", "bf16"),
    (88, 88, "interleaved", "bf16"),
    (72, 72, "interleaved", "fp32"),
    (88, 66, "interleaved", "bf16"),
    (80, 80, "interleaved", "bf16"),
    (112, 112, "interleaved", "fp32"),
    (128, 32, "interleaved", "bf16"),
    (88, 88, "regrouped", "bf16"),
    (96, 96, "regrouped", "bf16"),
]


def judged(entry, size, dtype):
    """What the op's rule says of a case, and what the gate does."""
    (case,) = cases.cases_of(replace(entry, sizes=(size,), dtypes=(dtype,)))
    failures = gate.failures(gate.collect([replace(case, run_small=None)], [CHIP]), known=())
    return case.unserved(device.chip_spec(CHIP)), failures


@pytest.mark.parametrize(("size", "rotated", "pairs", "dtype"), ROTATIONS, ids=str)
def test_rotations_are_left_to_the_model_where_the_gate_refuses_them(size, rotated, pairs, dtype):
    tables = "each" if pairs == "halves" else "first_half"
    reason, failures = judged(descriptions.rotation_entry(rotated / size, pairs, tables, "promote"), size, dtype)
    assert (reason is not None) == bool(failures), (reason, failures)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("op", "size"), [("swiglu_linear, joined by turns, alpha, limit, offset", 12288),
                                          ("swiglu_linear, joined by turns, alpha, limit, offset", 18432),
                                          ("swiglu, joined by turns", 18432)])  # fmt: skip
def test_gates_by_turns_are_left_to_the_model_where_the_gate_refuses_them(op, size, dtype):
    (entry,) = (entry for entry in descriptions.GATE if entry.op == op)
    reason, failures = judged(entry, size, dtype)
    assert (reason is not None) == bool(failures), (reason, failures)
