"""Attention inside segments as one kernel: PyTorch's flash attention on CUDA, another flash attention that a user has
asked for, or the vendor's on an NPU (`npu_trainer_kernels.vendor.attention`).

For PyTorch's flash attention this module calls the operators below `torch.nn.attention.varlen.varlen_attn`. Their
schema has not changed since torch 2.7 (`varlen_attn` came in 2.10, its scale and window in 2.11), they take dropout,
and `torch.nn.attention.activate_flash_attention_impl` replaces them (by FA3 or FA4) here too. Their backward reads o
and the log-sum-exp of the scores, which allows sinks:

    lse'_i = log(exp(lse_i) + exp(sink))       o'_i = exp(lse_i - lse'_i) o_i

are the lse and the output of a softmax with one more term whose value is zero, and the operators' backward of o' and
lse' is the backward of that softmax. The sink has the probability exp(sink - lse'_i), and its gradient is

    d sink = - sum over i of exp(sink - lse'_i) do'_i o'_i                                         fp32

The kernels sum the gradient of q with atomics, as `scaled_dot_product_attention` does. It has the same bits every time
only under `torch.use_deterministic_algorithms(True)`; the same holds for the vendor's kernel, by its documentation.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ... import device as devices
from ... import vendor
from ..host import once_differentiable
from .segments import Options, Segments

__all__ = ["ByKernel", "by_flash"]

_16_BITS = (torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------------------------------
# Availability of flash attention
# ---------------------------------------------------------------------------------------------------------------------


def _is_replaced() -> bool:
    """Whether the user has replaced PyTorch's flash attention. No replacement has dropout."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # older versions lack it
    return current is not None and current() is not None


# ---------------------------------------------------------------------------------------------------------------------
# An installed flash attention
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _found() -> Callable[..., Any] | None:
    """Returns the varlen function of an installed flash attention package, FA3 before FA2, or None."""
    for package in ("flash_attn_interface", "flash_attn"):
        if importlib.util.find_spec(package) is None:
            continue
        try:
            module = importlib.import_module(package)
        except (ImportError, OSError) as error:
            # Usually the package was built for another torch. The user did not ask for it, so warn and continue.
            warnings.warn(f"attention goes without {package}, which cannot be imported: {error}", stacklevel=2)
            continue
        if hasattr(module, _VARLEN):
            return module.flash_attn_varlen_func
    return None


_VARLEN = "flash_attn_varlen_func"
_NEEDED = ("cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal")


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _installed(softcap: float | None, window: int | None, dropout: float) -> Callable[..., Any] | None:
    """Returns a varlen function that takes these options, or None: the one that transformers has loaded for a model
    (from a package or the hub) or, for a soft cap, which PyTorch's lacks, that of an installed package."""
    loaded = sys.modules.get("transformers.modeling_flash_attention_utils")
    function = getattr(loaded, "_flash_varlen_fn", None)  # older versions lack it
    if function is None and softcap is not None:
        function = _found()
    if function is None:
        return None
    wanted = {"softcap": softcap is not None, "window_size": window is not None, "dropout_p": bool(dropout)}
    needed = {*_NEEDED, *(name for name, asked in wanted.items() if asked)}
    return function if needed <= _parameters(function) else None


def _by_installed(
    function: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments,
    options: Options,
) -> torch.Tensor:  # fmt: skip
    """Computes attention with the function of `_installed`."""
    given = {
        "cu_seqlens_q": segments.cu_q,
        "cu_seqlens_k": segments.cu_k,
        "max_seqlen_q": segments.longest_q,
        "max_seqlen_k": segments.longest_k,
        "softmax_scale": options.scale,
        "causal": True,
    }
    if options.softcap is not None:
        given["softcap"] = options.softcap
    if options.window is not None:
        given["window_size"] = (options.window - 1, 0)
    if options.dropout:
        given["dropout_p"] = options.dropout
    takes = _parameters(function)
    # FA4 takes no maximum lengths.
    out = function(q, k, v, **{name: value for name, value in given.items() if name in takes})
    return out[0] if isinstance(out, tuple) else out


# ---------------------------------------------------------------------------------------------------------------------
# Operators without autograd
# ---------------------------------------------------------------------------------------------------------------------


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, segments: Segments,
    options: Options,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Any]:  # fmt: skip
    out, lse, random, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_of_flash(segments, options), False, **_by_name(options)
    )
    if sinks is not None:
        joined = torch.logaddexp(lse, sinks.float().unsqueeze(1))
        out = (out * (lse - joined).exp().t().unsqueeze(-1)).to(q.dtype)
        lse = joined
    return out, (lse, random, unused), None


def _flash_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    out: torch.Tensor, saved: tuple[torch.Tensor, ...], segments: Segments, options: Options, extra: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    lse, random, unused = saved
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, out, lse, *_of_flash(segments, options), random, unused, **_by_name(options)
    )
    if sinks is None:
        return dq, dk, dv, None
    dots = torch.linalg.vecdot(dy.float(), out.float())
    dsinks = -((sinks.float().unsqueeze(1) - lse).exp() * dots.t()).sum(1)
    return dq, dk, dv, dsinks.to(sinks.dtype)


def _of_flash(segments: Segments, options: Options) -> tuple[Any, ...]:
    return (
        segments.cu_q, segments.cu_k, segments.longest_q, segments.longest_k, options.dropout, options.window is None,
    )  # fmt: skip


def _by_name(options: Options) -> dict[str, Any]:
    left = -1 if options.window is None else options.window - 1
    return {"scale": options.scale, "window_size_left": left, "window_size_right": 0}


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "flash": (_flash_forward, _flash_backward),
    "vendor": (vendor.attention, vendor.attention_backward),
}


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Copies t unless the elements of a head are contiguous, which the operators require."""
    return t if t.stride(-1) == 1 else t.contiguous()


class ByKernel(torch.autograd.Function):
    """Computes o from (q, k, v, sinks, segments, options, a key of `_KERNELS`)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
                segments: Segments, options: Options, kernel: str) -> torch.Tensor:  # fmt: skip
        q, k, v = _dense(q), _dense(k), _dense(v)
        out, saved, ctx.extra = _KERNELS[kernel][0](q, k, v, sinks, segments, options)
        ctx.save_for_backward(q, k, v, sinks, out, *saved)
        ctx.given = segments, options, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, *saved = ctx.saved_tensors
        segments, options, kernel = ctx.given
        gradients = _KERNELS[kernel][1](
            _dense(dy), q, k, v, sinks, out, tuple(saved), segments, options, ctx.extra
        )  # fmt: skip
        return *gradients, None, None, None


def flash_serves(
    device: torch.device, dtype: torch.dtype, head_sizes: tuple[int, int], options: Options, sinks: bool
) -> bool:
    """Whether a flash attention supports a call."""
    size = head_sizes[0]
    if size > devices.widest_flash_head(device) or dtype not in _16_BITS or size != head_sizes[1]:
        return False
    if not sinks and _installed(options.softcap, options.window, options.dropout) is not None:
        return True
    return not (options.softcap is not None or size % 8 or (options.dropout and _is_replaced()))


def by_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, segments: Any, options: Options
) -> torch.Tensor | None:
    """Computes attention with a flash attention that supports the call. Returns None if none does."""
    if not flash_serves(q.device, q.dtype, (q.shape[-1], v.shape[-1]), options, sinks is not None):
        return None
    function = None if sinks is not None else _installed(options.softcap, options.window, options.dropout)
    if function is not None:
        return _by_installed(function, q, k, v, segments, options)
    return ByKernel.apply(q, k, v, sinks, segments, options, "flash")
