"""The only accuracy rule of the package, which is the same on every processor.

A result is close if its error against the fp64 truth is at most twice the rounding error of plain PyTorch in the same
dtype, plus a few units in the last place of the result's dtype:

    |actual_i - truth_i|  <=  2 max_k max_j |reference_kj - truth_j|  +  4 ulp(truth_i)             (every element)
    rms(actual - truth)   <=  2 max_k rms(reference_k - truth)        +  1 ulp(rms(truth))  (of more than one element)

The references k are plain PyTorch, and plain PyTorch with the result of every operator changed by a random fraction of
a unit (`rounded`). The first one alone does not suffice: its rounding errors depend on the order in which the processor
sums, and a gradient that is zero, or a few numbers, may be exact by luck. Each reference can only widen the limits, so
the others are computed only if the result fails with the first.

The second line is the stricter one: a systematic error of one percent fails it in every dtype where it could matter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import device
from .support.rounding import rounded

__all__ = [
    "FACTOR",
    "ULPS_EACH",
    "ULPS_RMS",
    "Tensors",
    "assert_as_close",
    "assert_op_close",
    "rounded",
    "rounded_if_needed",
    "run",
]

FACTOR = 2.0
ULPS_EACH = 4.0
ULPS_RMS = 1.0

Tensors = Sequence[torch.Tensor | None]


def _require(holds: bool, message: str) -> None:
    # Not `assert`, because doctor needs this check under `python -O`, too.
    if not holds:
        raise AssertionError(message)


def run(fn: Callable[..., object], inputs: Sequence[object], upstream: Callable[[Tensors], torch.Tensor] | None,
        dtype: torch.dtype | None = None, where: torch.device | None = None) -> list[torch.Tensor | None]:  # fmt: skip
    """Returns the outputs of `fn(*inputs)`, then the gradients of `upstream(outputs)` for inputs that require one.

    `dtype` converts the floating-point inputs first (fp64 gives the truth); `where` moves all tensors to a device.
    """
    leaves = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            to = (dtype or value.dtype) if value.is_floating_point() else value.dtype
            value = value.detach().to(where or value.device, to).requires_grad_(value.requires_grad)
        leaves.append(value)
    result = fn(*leaves)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]
    wanted = [v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad]
    grads: list[torch.Tensor | None] = []
    if upstream is not None and wanted:
        grads = list(torch.autograd.grad(upstream(outputs), wanted, allow_unused=True))
    return [o if o is None else o.detach() for o in outputs] + grads


def assert_as_close(
    actual: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor, what: str,
    moved: Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]],
) -> None:  # fmt: skip
    """Raises AssertionError unless `actual` satisfies the rule of the module's docstring.

    Args:
        actual: the tested result, of any floating-point dtype; results of other dtypes must equal the truth.
        reference: the result of plain PyTorch, of the same shape and dtype.
        truth: the result in fp64.
        what: the name of the result in the error.
        moved: the results of the reference with changed rounding (`rounded`), or a function that returns them, which
            is called only if the result fails without them (`rounded_if_needed`).
    """
    try:
        _assert_within(actual, reference, truth, what, ())
    except AssertionError:
        others = moved() if callable(moved) else moved
        if not others:
            raise
        _assert_within(actual, reference, truth, what, others)


def rounded_if_needed(run: Callable[[], Any]) -> Callable[[Any], Callable[[], list[torch.Tensor]]]:
    """Returns what gives `assert_as_close` its last argument for each result of a reference.

        moved = rounded_if_needed(lambda: gradients(plain, inputs))
        for name, value in found.items():
            assert_as_close(value, expected[name], truth[name], name, moved(name))

    Args:
        run: runs the unpatched reference once more and returns its results, a list or a dict. It is called under every
            rounding as soon as one result needs it, and then not again. It must not make the model, whose weights
            would be changed, and must leave the tensors alone that it has returned before.
    """
    every = functools.cache(lambda: rounded(run))
    return lambda key: lambda: [results[key] for results in every()]


def _assert_within(
    actual: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor, what: str, moved: Sequence[torch.Tensor]
) -> None:
    _require(actual.shape == truth.shape, f"{what}: shape {list(actual.shape)}, expected {list(truth.shape)}")
    _require(actual.dtype == reference.dtype, f"{what}: dtype {actual.dtype}, expected {reference.dtype}")
    if not actual.is_floating_point():
        _require(torch.equal(actual, truth.to(actual)), f"{what}: {actual} is not {truth}")
        return
    if actual.numel() == 0:
        return
    a, r, t = (v.to(truth.device, torch.float64) for v in (actual, reference, truth))
    same = torch.equal(a.isfinite(), r.isfinite())
    _require(same, f"{what}: not finite where the reference is, or the other way round")
    finite = r.isfinite() & t.isfinite()
    a, t = a[finite], t[finite]
    if a.numel() == 0:
        return
    errors = [(v.to(t)[finite] - t).nan_to_num(0, 0, 0) for v in (reference, *moved)]
    eps = torch.finfo(actual.dtype).eps
    error, allowed = (a - t).abs(), FACTOR * max(e.abs().max() for e in errors) + ULPS_EACH * eps * t.abs()
    worst = int((error - allowed).argmax())
    _require(
        bool((error <= allowed).all()),
        f"{what}: element {worst}: error {error[worst]:.3e}, allowed {allowed[worst]:.3e} "
        f"(value {a[worst]:.6e}, truth {t[worst]:.6e})",
    )
    if a.numel() == 1:
        return
    found, size, *others = (v.square().mean().sqrt().item() for v in (a - t, t, *errors))
    limit = FACTOR * max(others) + ULPS_RMS * eps * size
    _require(found <= limit, f"{what}: rms error {found:.3e}, allowed {limit:.3e} (reference's {others[0]:.3e})")


def assert_op_close(op: Callable[..., object], reference: Callable[..., object], inputs: Sequence[object],
                    upstream: Callable[[Tensors], torch.Tensor] | None = None) -> None:  # fmt: skip
    """Compares `op(*inputs)` and its gradients with the reference in the same dtype, plain and `rounded`, and in fp64.

    Args:
        op: the tested op.
        reference: the op's reference; it must compute in fp64 if its inputs are fp64.
        inputs: the arguments; gradients are compared for those that require one.
        upstream: maps the outputs to the scalar to differentiate; None compares only outputs.
    """
    where = next((v.device for v in inputs if isinstance(v, torch.Tensor)), torch.device("cpu"))
    exact = where if device.has_fp64(where) else torch.device("cpu")
    actual, same = run(op, inputs, upstream), run(reference, inputs, upstream)
    moved = rounded_if_needed(lambda: run(reference, inputs, upstream))
    truth = run(reference, inputs, upstream, torch.float64, exact)
    _require(len(actual) == len(same), f"{len(actual)} results, the reference gives {len(same)}")
    for i, (a, r, t) in enumerate(zip(actual, same, truth, strict=True)):
        if r is None or t is None:
            _require(a is None, f"result {i} should be None")
            continue
        if a is None:
            raise AssertionError(f"result {i} should not be None")
        assert_as_close(a, r, t, f"result {i}", moved(i))
