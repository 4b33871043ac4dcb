"""Which calls the vendor's operators cover. How they are called is tested in tests/npu_contract, against torch_npu."""

from types import SimpleNamespace

import pytest
import torch

from npu_trainer_kernels import vendor as vendor_module
from npu_trainer_kernels.ops.gates import gate_options
from npu_trainer_kernels.ops.norms import CASTINGS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("adds", [False, True])
def test_a_casting_that_nobody_has_compared_is_not_covered(dtype: torch.dtype, adds: bool):
    """A new one rounds elsewhere, or computes something else."""
    known = {name for castings in vendor_module._NORM_CASTINGS.values() for name in castings}
    assert known <= set(CASTINGS)
    for casting in {"new", *CASTINGS} - known:
        reason = vendor_module.uncovered_norm(dtype, dtype, casting, dtype if adds else None)
        assert reason is not None
        assert reason.startswith(f"casting {casting!r}")


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_a_norm_in_one_dtype_is_covered(dtype: torch.dtype, casting: str):
    assert vendor_module.uncovered_norm(dtype, dtype, casting) is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((FP32, None, "llama"), "no weight"),
        ((BF16, FP32, "llama"), "float32 weight of bfloat16 x with casting 'llama'"),
        ((FP32, BF16, "gemma"), "bfloat16 weight of float32 x with casting 'gemma'"),
        ((BF16, FP16, "gemma"), "float16 weight of bfloat16 x"),
        ((BF16, BF16, "none"), "casting 'none' in bfloat16"),
        ((BF16, BF16, "gemma", BF16), "casting 'gemma' in bfloat16"),
        ((BF16, FP32, "gemma", BF16), "float32 weight of bfloat16 x"),
        ((BF16, BF16, "llama", FP32), "float32 residual of bfloat16 x"),
        ((FP32, FP32, "llama", FP32, "post"), "mode 'post'"),
    ],
)
def test_a_norm_that_is_not(arguments: tuple, why: str):
    reason = vendor_module.uncovered_norm(*arguments)
    assert reason is not None
    assert why in reason


@pytest.mark.parametrize(
    "arguments",
    [(BF16, FP32, "gemma"), (FP32, FP32, "none"), (BF16, BF16, "llama", BF16), (FP32, FP32, "gemma", FP32)],
)
def test_a_norm_that_is(arguments: tuple):
    assert vendor_module.uncovered_norm(*arguments) is None


def test_the_gradient_of_a_trained_weight_is_not_repeatable():
    weight = torch.ones(4)
    assert vendor_module.not_repeatable(None) is None
    assert vendor_module.not_repeatable(weight) is None
    weight.requires_grad_()
    assert "no fixed order" in (vendor_module.not_repeatable(weight) or "")
    torch.use_deterministic_algorithms(True)
    try:
        assert vendor_module.not_repeatable(weight) is None
    finally:
        torch.use_deterministic_algorithms(False)


def _rope(batch=2, q_heads=4, k_heads=2, size=8, dtype=BF16, tables=BF16):
    q, k = (torch.empty(batch, heads, 3, size, dtype=dtype, device="meta") for heads in (q_heads, k_heads))
    cos, sin = (torch.empty(1, 3, size, dtype=tables, device="meta") for _ in range(2))
    return vendor_module.uncovered_rope(q, k, cos, sin, _rotation())


def _rotation(pairs="halves", tables="each", casting="promote", heads=1):
    return SimpleNamespace(pairs=pairs, tables=tables, casting=casting, heads=heads)


def test_other_rotations_are_not_covered():
    q = torch.empty(2, 4, 3, 8, dtype=BF16, device="meta")
    table = torch.empty(1, 3, 8, dtype=BF16, device="meta")
    assert vendor_module.uncovered_rope(q, None, table, table, _rotation()) is None
    assert vendor_module.uncovered_rope(q, None, table, table, _rotation(casting="fp32")) is None
    for options in ({"pairs": "interleaved"}, {"tables": "first_half"}, {"heads": 2}):
        assert "pairs" in vendor_module.uncovered_rope(q, None, table, table, _rotation(**options))
    part = table[..., :4]
    assert vendor_module.uncovered_rope(q, None, part, part, _rotation()) == "4 of 8 elements of a head"


@pytest.mark.parametrize(
    ("options", "covered"),
    [
        ({}, True),
        ({"joined": "halves"}, True),
        ({"joined": "interleaved"}, False),
        ({"activation": "gelu"}, False),
        ({"activation": "gelu_tanh"}, False),
        ({"activation": "relu2"}, False),
        ({"alpha": 1.702}, False),
        ({"limit": 7.0}, False),
        ({"offset": 1.0}, False),
    ],
)
def test_gates(options, covered):
    defaults = {"activation": "silu", "alpha": 1.0, "limit": None, "offset": 0.0, "joined": None}
    reason = vendor_module.uncovered_swiglu(gate_options(**{**defaults, **options}))
    assert (reason is None) == covered


def test_rope():
    assert _rope() is None
    assert _rope(size=894) is None
    assert _rope(size=896) == "heads of 896 elements, of which less than 896 are allowed"
    assert "float32 and float32 tables of bfloat16 q" in (_rope(tables=FP32) or "")
    for too_many in ({"batch": 1000}, {"q_heads": 1000}, {"k_heads": 1000}):
        assert _rope(**too_many) == "1000 or more sequences or heads"


PLAIN = {"softcap": None, "logit_scale": 1.0, "label_smoothing": 0.0, "z_loss": 0.0, "outputs": ()}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("softcap", 30.0),
        ("logit_scale", 0.5),
        ("label_smoothing", 0.1),
        ("z_loss", 1e-4),
        ("outputs", ["predicted_ids"]),
    ],
)
def test_cross_entropy_options(option: str, value: object):
    assert vendor_module.uncovered_cross_entropy(10, **PLAIN) is None
    reason = vendor_module.uncovered_cross_entropy(10, **{**PLAIN, option: value})
    assert reason is not None
    assert reason.startswith(f"{option}=")


def test_cross_entropy_rows():
    assert vendor_module.uncovered_cross_entropy(200_000, **PLAIN) is None
    assert vendor_module.uncovered_cross_entropy(200_001, **PLAIN) == "200001 rows, of which 200000 are allowed"


def test_what_is_covered_is_said_of_every_op():
    assert all(vendor.covers and vendor.operators for vendor in vendor_module.SERVED.values())
