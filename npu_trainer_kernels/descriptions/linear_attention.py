"""The state of linear-attention layers."""

import torch

from .. import ops
from .base import Form, Function, GateEntry, Inputs, Outputs, Tensors, Workload, randn

__all__ = ["FORMS", "GATE"]


def _build(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    keys, values = (1, s["N"], s["Hk"], s["Dk"]), (1, s["N"], s["Hv"], s["Dv"])
    tensors = {
        "q": randn(work, device, *keys),
        "k": randn(work, device, *keys),
        "v": randn(work, device, *values),
        "g": -torch.rand(values[:3], device=device),
        "beta": torch.rand(values[:3], device=device).to(work.torch_dtype),
    }
    return Inputs(tensors, tuple(tensors), (randn(work, device, *values),))


def _reference(t: Tensors) -> Outputs:
    return ops.gated_delta_rule_reference(t["q"], t["k"], t["v"], t["g"], t["beta"], normalize=True)


def _ours(backend: str | None) -> Function:
    return lambda t: ops.gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"], normalize=True, backend=backend)


# `benchmarks/linear_attention.py` measures it.
FORMS = {
    "gated_delta_rule": Form(
        _build, _reference, _ours,
        lambda m, n: {"N": n, "Hk": m.state_keys, "Hv": m.state_values, "Dk": m.key_size, "Dv": m.value_size},
    ),
}  # fmt: skip
# The table says why an NPU has none of its kernels.
GATE: tuple[GateEntry, ...] = ()
