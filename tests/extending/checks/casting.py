"""The new casting: found by the probe, served by torch and by Triton, and refused by the vendor."""

import pytest
import torch
from torch import nn

from npu_trainer_kernels import apply_npu_kernels, vendor
from npu_trainer_kernels.descriptions import GATE
from npu_trainer_kernels.ops.norms import CASTINGS
from npu_trainer_kernels.patching.modules.norm_forms import NormForm, recognise_norm
from tests.closeness import assert_op_close
from tests.ops.test_rms_norm import InverseInOneDtype

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def norm(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = InverseInOneDtype(96)
    nn.init.uniform_(module.weight, 0.5, 1.5)
    return module.to(dtype)


class Lengthened(InverseInOneDtype):
    """Rounds one product more."""

    def forward(self, x):
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)
        return ((x * rstd).float() * (1 + self.weight.float())).to(x.dtype)


def test_the_probe_finds_it():
    found = recognise_norm(norm())
    assert isinstance(found, NormForm)
    assert (found.casting, found.offset, found.eps, found.one_dtype) == ("rstd", 0.0, 1e-6, False)
    assert isinstance(recognise_norm(Lengthened(96)), str)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_module_is_served(dtype, backend):
    x, own = torch.randn(7, 96).to(dtype).requires_grad_(), norm(dtype)
    with apply_npu_kernels(model := nn.Sequential(norm(dtype)), ops=["rms_norm"], backend=backend) as kernels:
        y = model(x)
        assert kernels.report().ran == {"rms_norm": 1}
        (replaced,) = kernels.report().replaced
        assert (replaced.backend, replaced.detail) == (backend, "casting=rstd, offset=0, eps=1e-06")
        if backend == "torch":
            assert torch.equal(y, own(x))
        assert_op_close(
            lambda x, w: torch.func.functional_call(model, {"0.weight": w}, x),
            lambda x, w: torch.func.functional_call(own, {"weight": w}, x),
            [x, own.weight],
            lambda out: (out[0] * torch.linspace(-1, 1.5, 96).to(dtype)).sum(dtype=torch.float64),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_the_vendor_does_not_get_it(dtype, adds):
    reason = vendor.uncovered_norm(dtype, dtype, "rstd", dtype if adds else None)
    assert reason is not None
    assert reason.startswith("casting 'rstd'")


def test_the_ascend_compiler_gets_it():
    assert "rstd" in CASTINGS
    assert [entry.op for entry in GATE if "rstd" in entry.op] == ["rms_norm, rstd"]
