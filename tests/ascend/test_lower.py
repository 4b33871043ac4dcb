import pytest
import torch

from npu_trainer_kernels.ascend.lower import Specialization, bind, lower
from npu_trainer_kernels.ascend.toolchain import ToolchainError

from . import toys

CHIP = "Ascend910B4"


def _scaled_rows(x, n_rows=64, n_cols=1000, factor=2.0, **constexprs):
    args = (x, torch.empty(64, device=x.device), torch.empty_like(x), n_rows, n_cols, factor)
    return Specialization.of(toys.scaled_rows, args, {"BLOCK": 1024, **constexprs}, CHIP)


def test_a_launch_is_specialized_as_the_jit_does():
    spec = _scaled_rows(torch.empty(64, 1000, dtype=torch.bfloat16))
    assert spec.signature == {
        "x": "*bf16",
        "scale": "*fp32",
        "y": "*bf16",
        "n_rows": "i32",
        "n_cols": "i32",
        "factor": "fp32",
    }
    assert spec.constants == {"BLOCK": 1024}
    assert spec.aligned == ("x", "scale", "y", "n_rows")
    assert spec.runtime == spec.signature


def test_meta_tensors_lower_to_the_same_as_real_ones():
    real = _scaled_rows(torch.empty(64, 1000, dtype=torch.bfloat16))
    meta = _scaled_rows(torch.empty(64, 1000, dtype=torch.bfloat16, device="meta"))
    assert real.content == meta.content
    assert lower(real) == lower(meta)


def test_the_alignment_of_an_offset_meta_tensor_is_that_of_its_offset():
    whole = torch.empty(64 * 1000 + 8, dtype=torch.bfloat16, device="meta")
    assert "x" in _scaled_rows(whole[8:]).aligned
    assert "x" not in _scaled_rows(whole[4:]).aligned


def test_an_integer_one_and_none_are_constants():
    spec = _scaled_rows(torch.empty(1, 1000), n_rows=1)
    assert spec.constants == {"BLOCK": 1024, "n_rows": 1}
    assert "n_rows" not in spec.runtime
    args = (torch.empty(64, 1000), None, torch.empty(64, 1000), 64, True, 2**40)
    other = Specialization.of(toys.scaled_rows, args, {"BLOCK": 1024}, CHIP)
    assert other.signature["scale"] == "*i8"
    assert other.constants == {"BLOCK": 1024, "scale": None}
    assert (other.signature["n_cols"], other.signature["factor"]) == ("i1", "i64")


def test_content_follows_the_kernel_its_types_and_its_constants_but_not_its_values():
    x = torch.empty(64, 1000)
    base = _scaled_rows(x).content
    assert _scaled_rows(x, n_rows=128, factor=3.0).content == base
    assert _scaled_rows(x, n_rows=65).content != base
    assert _scaled_rows(x.half()).content != base
    assert _scaled_rows(x, BLOCK=2048).content != base
    assert _scaled_rows(x, multibuffer=False).content != base


def test_arguments_that_do_not_fit_raise():
    x = torch.empty(64, 1000)
    with pytest.raises(TypeError, match="missing a required argument"):
        bind(toys.scaled_rows, (x,), {})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        _scaled_rows(x, nonsense=1)
    with pytest.raises(TypeError, match="factor must be a tensor, int, float, bool or None; got str"):
        _scaled_rows(x, factor="2")
    with pytest.raises(TypeError, match=r"must be a triton.JITFunction .*; got function"):
        bind(toys.scaled_rows.fn, (), {})


def test_a_kernel_that_triton_refuses_is_named_with_its_stage():
    spec = Specialization.of(toys.refused, (torch.empty(64), torch.empty(64)), {"BLOCK": 64}, CHIP)
    with pytest.raises(ToolchainError) as error:
        lower(spec)
    assert (error.value.kernel, error.value.stage) == ("refused", "Triton frontend")
    assert error.value.diagnostics
