"""PyTorch's products on the CPU, each result moved by a fraction of a unit while `moves` is true (see `perturbed`).

The kernels take the place of PyTorch's own in its dispatcher, for all threads and below every mode, so that code under
test sees nothing of them. `perturbed` loads this file under a name of PyTorch's, as whose code it has to count.
"""

import functools
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["PRODUCTS", "install"]

_NAMES = """
    mm addmm bmm baddbmm mv addmv dot vdot addbmm _grouped_mm convolution convolution_backward mkldnn_linear
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
"""
_IMPLICIT = "CompositeImplicitAutograd"  # made of other operators, which are moved

# Drawn once, since code under test must be seen to draw nothing; a prime number of them.
_PARTS = torch.rand(65_537, generator=torch.Generator().manual_seed(0)) - 0.5

moves = False


def _overloads() -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in _NAMES.split() if hasattr(torch.ops.aten, name)]
    found = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [each for each in found if not has(each.name(), _IMPLICIT) and _has_kernel(each)]


def _has_kernel(operator: Any) -> bool:
    kinds = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), kind) for kind in kinds)


PRODUCTS = _overloads()
"""The operators whose results are moved."""


@functools.cache
def install() -> torch.library.Library:
    """Puts the kernels into PyTorch's dispatcher, where they stay; returns what keeps them there."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for operator in PRODUCTS:
            own = torch.library.get_kernel(operator, "CPU")
            library.impl(operator, _moving(operator.name(), own.call_boxed), "CPU", with_keyset=True)
    return library


def _moving(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(keys, *args, **kwargs)
        if moves:
            kwargs.pop("out", None)
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            found = [value for value in tree_leaves(result) if _is_real(value)]
            exact = _are_exact(given)
            seed = zlib.crc32(repr((name, [_layout(value) for value in given], torch.get_num_threads())).encode())
            for at, value in enumerate(found):
                if not (exact and _are_exact([value])):
                    _move(value, seed + at)
        return result

    return kernel


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    """What a product may go by; the stride of a dimension of one place is none."""
    strides = [stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True)]
    return str(value.dtype), list(value.shape), strides


def _are_exact(values: list[torch.Tensor]) -> bool:
    """Whether all are multiples of a sixteenth, whose sums are the same in any order."""
    return all(bool((v * 16 == (v * 16).round()).all()) for v in values if v.is_floating_point())


def _move(value: torch.Tensor, seed: int) -> None:
    u = _PARTS[(torch.arange(value.numel()) + seed) % len(_PARTS)].view(value.shape)
    moved = value + value * (torch.finfo(value.dtype).eps * u).to(value.dtype)
    value.copy_(torch.where(moved.isfinite(), moved, value))
