"""Measures time, peak memory, floor and error.

Time        is measured as `npu_trainer_kernels.timing` describes.
Memory      is the allocator's peak in one call, minus the memory before it and minus the call's results (outputs in
            mode forward, gradients of inputs and weights otherwise).
Floor       is for the LM head the time of the op's matrix products one by one, at their real shapes and dtype, with
            random factors, in the same run; for other ops the minimum of bytes at the bandwidth of a large copy, or,
            for attention, its operations at the rate of a large matrix product, if that takes longer.
Error       is |result - truth| / |truth| of every output and gradient against the reference in higher precision (fp64
            for fp32, fp32 for bf16); it is compared with the plain reference's own error in the case's dtype.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from npu_trainer_kernels import device as devices
from npu_trainer_kernels import timing
from npu_trainer_kernels.descriptions import Inputs, as_tuple
from npu_trainer_kernels.timing import QUICK, Function, Settings, Summary, Timer, is_accelerator, measure, summarise

from .cases import OPS, OpCase

__all__ = [
    "QUICK",
    "Settings",
    "Summary",
    "bandwidth",
    "errors",
    "is_accelerator",
    "measure",
    "operations",
    "peak_extra_bytes",
    "product_seconds",
    "summarise",
    "truth_of",
    "verdict",
]

# Rows of the head for which the truth is computed at once.
TRUTH_ROWS = 4096


def rotation(case: OpCase, device: torch.device, bytes_of_one: int) -> int:
    """Returns the number of sets of inputs that the measurement rotates through."""
    return timing.rotation(device, bytes_of_one) if OPS[case.op].products is None else 1


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def _call(fn: Function, inputs: Inputs, mode: str) -> tuple[Tensor, ...]:
    """Runs one call and returns its results."""
    outputs = fn(inputs.tensors)
    if mode == "forward":
        return as_tuple(outputs)
    inputs.backward(outputs)
    # Two leaves may share one gradient tensor.
    return tuple({g.data_ptr(): g for g in inputs.leaf_grads().values() if g is not None}.values())


def peak_extra_bytes(fn: Function, inputs: Inputs, mode: str, device: torch.device) -> int:
    """Returns the peak memory of a call beyond inputs, weights and results. In mode backward forward counts too,
    because its saved tensors are alive."""
    inputs.drop_grads()
    if is_accelerator(device):
        module = torch.get_device_module(device)
        devices.synchronize(device)
        before = module.memory_allocated(device)
        module.reset_peak_memory_stats(device)
        left = sum(t.nbytes for t in _call(fn, inputs, mode))
        devices.synchronize(device)
        peak = module.max_memory_allocated(device) - before
    else:
        peak, left = _peak_on_cpu(lambda: sum(t.nbytes for t in _call(fn, inputs, mode)))
    inputs.drop_grads()
    return max(0, peak - left)


def _peak_on_cpu(call: Callable[[], int]) -> tuple[int, int]:
    """Returns the largest sum of live allocations during the call, from the profiler's log of the allocator, and the
    call's result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        left = call()
    live = peak = 0
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, left


# ---------------------------------------------------------------------------------------------------------------------
# Floors
# ---------------------------------------------------------------------------------------------------------------------


def _median_seconds(call: Callable[[], Any], device: torch.device, settings: Settings) -> float:
    timer = Timer(device, head_start=False)
    for _ in range(2):
        estimate = timer(call)
    count = math.ceil(max(settings.least, min(settings.most, settings.seconds * 1e3 / max(estimate, 1e-3))))
    return summarise([timer(call) for _ in range(count)]).median / 1e3


def product_seconds(case: OpCase, device: torch.device, settings: Settings) -> dict[str, float]:
    """Returns the seconds of the head's matrix products at their real shapes, by mode."""
    products = OPS[case.op].products
    assert products is not None
    rows, hidden, vocab = products(case)
    x = torch.randn(rows, hidden, device=device).to(case.torch_dtype)
    weight = torch.randn(vocab, hidden, device=device).to(case.torch_dtype)
    gradient = torch.empty(rows, vocab, dtype=case.torch_dtype, device=device).normal_()
    # Each result is freed before the next product.
    forward = _median_seconds(lambda: torch.mm(x, weight.t()), device, settings)
    backward = _median_seconds(lambda: torch.mm(gradient, weight), device, settings)
    backward += _median_seconds(lambda: torch.mm(gradient.t(), x), device, settings)
    return {"forward": forward, "backward": backward, "both": forward + backward}


@functools.cache
def operations(device: torch.device, dtype: torch.dtype, settings: Settings) -> float:
    """Returns the operations per second of a large square matrix product."""
    size = 8192 if is_accelerator(device) else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: torch.mm(a, b), device, settings)


def bandwidth(device: torch.device, settings: Settings) -> float:
    """Returns the bytes per second of a large copy on the device, bytes read plus bytes written."""
    size = (2 << 30) if is_accelerator(device) else (64 << 20)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), device, settings)


# ---------------------------------------------------------------------------------------------------------------------
# Error
# ---------------------------------------------------------------------------------------------------------------------


def _results(fn: Function, inputs: Inputs) -> dict[str, Tensor]:
    """Returns outputs and gradients by name."""
    outputs = fn(inputs.tensors)
    found = {f"out{i}": t.detach().clone() for i, t in enumerate(as_tuple(outputs))}
    inputs.backward(outputs)
    for name, grad in inputs.leaf_grads().items():
        if grad is None:
            raise RuntimeError(f"no gradient arrived at {name}")
        found[f"d{name}"] = grad
    return found


def truth_of(case: OpCase, inputs: Inputs) -> dict[str, Tensor]:
    """Returns outputs and gradients in higher precision."""
    exact = torch.float64 if case.dtype == "float32" else torch.float32
    if OPS[case.op].row_truth is not None:
        return _head_truth(case, inputs, exact)
    tensors = {n: t.detach().to(exact) if t.is_floating_point() else t for n, t in inputs.tensors.items()}
    raised = Inputs(tensors, inputs.leaves, tuple(g.to(exact) for g in inputs.grads)).require_grad()
    return _results(OPS[case.op].reference, raised)


def _head_truth(case: OpCase, inputs: Inputs, exact: torch.dtype) -> dict[str, Tensor]:
    row_truth = OPS[case.op].row_truth
    assert row_truth is not None
    x = inputs.tensors["x"].detach()
    flat = x.reshape(-1, x.shape[-1])
    weight = inputs.tensors["weight"].detach().to(exact).requires_grad_()
    dx = torch.empty_like(flat, dtype=exact)
    total = torch.zeros((), dtype=exact, device=x.device)
    per_row: list[Tensor] = []
    for rows in torch.arange(flat.shape[0], device=x.device).split(TRUTH_ROWS):
        chunk = flat[rows].to(exact).requires_grad_()
        outputs, objective = row_truth(torch.nn.functional.linear(chunk, weight), inputs, rows)
        objective.backward()
        assert chunk.grad is not None
        dx[rows] = chunk.grad
        total += objective.detach()
        if outputs is not None:
            per_row.append(outputs)
    assert weight.grad is not None
    return {"out0": torch.cat(per_row) if per_row else total, "dx": dx, "dweight": weight.grad}


def errors(fn: Function, inputs: Inputs, truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the norm-relative error of each output and gradient; infinity if a result is not finite."""
    inputs.drop_grads()
    found = _results(fn, inputs)
    inputs.drop_grads()
    return {name: _relative(found[name], expected) for name, expected in truth.items()}


def _relative(value: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.vector_norm(value.to(expected.dtype).reshape(expected.shape) - expected).item()
    scale = torch.linalg.vector_norm(expected).item()
    error = difference / scale if scale else difference
    return error if math.isfinite(error) else math.inf


def verdict(found: Mapping[str, float], reference: Mapping[str, float] | None, dtype: str) -> str:
    """Returns `"ok"`; `"inaccurate"` if an error exceeds three times the plain reference's own error plus the dtype's
    rounding; `"wrong"` if it exceeds a tenth, or is not finite."""
    if not all(math.isfinite(e) and e < 0.1 for e in found.values()):
        return "wrong"
    rounding = max({"bfloat16": 2.0**-8, "float32": 2.0**-23}[dtype], 2e-6)
    base = reference or {}
    within = all(e <= 3 * base.get(name, rounding) + rounding for name, e in found.items())
    return "ok" if within else "inaccurate"


def as_json(summary: Summary) -> dict[str, float]:
    """Converts a summary for the results file."""
    return asdict(summary)
