"""What the vendor's operators are documented to compute, for tensors on the CPU: the package's own references under
the operators' names and signatures.

The formulas are in prose (https://www.hiascend.com, op-plugin's `docs/context/torch_npu-npu_*.md`); where the norms
round is in the kernels and golden functions of CANN's ops-nn (`norm/rms_norm`, `norm/add_rms_norm`). Backward of a norm
is the package's torch twin, which `tests/ops` holds to the reference: the operator is given rstd, but no epsilon.

Defaults are the schemas': PyTorch leaves arguments out that have their default value.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from npu_trainer_kernels.ops._head_options import HeadOptions
from npu_trainer_kernels.ops._head_reference import logits_statistics_reference
from npu_trainer_kernels.ops._norm import _normed, norm_backward
from npu_trainer_kernels.ops.rope import rope_reference
from npu_trainer_kernels.ops.swiglu import swiglu_reference


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    return _normed(x, gamma, epsilon, 0.0, "gemma")


def _add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = x1 + x2
    return *_normed(s, gamma, epsilon, 0.0, "llama"), s


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dgamma = norm_backward(
        x, None, gamma.float(), rstd.reshape(-1), dy, None, 0.0, "gemma", 1.0, True, True, "torch"
    )  # fmt: skip
    assert dx is not None
    assert dgamma is not None
    return dx, dgamma


def _joined_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    assert x.is_contiguous(), "npu_swiglu takes no tensor with gaps"
    assert x.numel(), "npu_swiglu takes no empty tensor"
    gate, up = x.float().chunk(2, dim)
    return swiglu_reference(gate, up).to(x.dtype)


def _joined_swiglu_backward(dy: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.func.vjp(lambda t: _joined_swiglu(t, dim).float(), x)[1](dy.float())[0]


def _rotary_mul(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
    assert r1.shape[1] == r2.shape[1] == 1, "11SD or B1SD"
    tables = r1.squeeze(1).float(), r2.squeeze(1).float()
    return rope_reference(x.float(), x.float(), *tables)[0].to(x.dtype)


def _losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -logits_statistics_reference(logits, target, HeadOptions()).log_prob


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> tuple[torch.Tensor, ...]:
    assert (weight, reduction, target.dtype) == (None, "none", torch.int64)
    log_probs = logits.log_softmax(-1)
    # The last two are for z-loss, and empty without it.
    return _losses(logits, target).to(logits.dtype), log_probs, logits.new_empty(0), logits.new_empty(0)


def _cross_entropy_backward(
    d_loss: torch.Tensor, log_probs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
    d_z_loss: torch.Tensor | None = None, lse: torch.Tensor | None = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    assert (weight, d_z_loss, lse, reduction) == (None, None, None, "none")
    # Logits are log-probabilities up to a number per row, which the loss does not see.
    return torch.func.vjp(lambda t: _losses(t, target), log_probs)[1](d_loss)[0]


ON_CPU: dict[str, Callable[..., object]] = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_swiglu": _joined_swiglu,
    "npu_swiglu_backward": _joined_swiglu_backward,
    "npu_rotary_mul": _rotary_mul,
    "npu_cross_entropy_loss": _cross_entropy,
    "npu_cross_entropy_loss_backward": _cross_entropy_backward,
}


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside the `with` block torch_npu's operators take CPU tensors."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    for name, function in ON_CPU.items():
        library.impl(name, function)
    try:
        yield
    finally:
        library._destroy()
