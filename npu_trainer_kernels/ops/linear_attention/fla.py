"""The gated delta rule by flash-linear-attention (the package `fla-core`, imported as `fla`), an optional backend.

| gate | beta | function |
|---|---|---|
| a head | yes | `fla.ops.gated_delta_rule.chunk_gated_delta_rule` |
| a channel | yes | `fla.ops.kda.chunk_kda` |
| a head | no | `fla.ops.simple_gla.chunk_simple_gla` |
| a channel | no | `fla.ops.gla.chunk_gla` |

The last two have no norms of q and k, which would be rounded between two functions, so that fla does not serve them
there; and no groups of heads, so that heads are repeated before. fla's Triton kernels
run on accelerators; its versions differ in what they take and on which chips they are right. So each form of a call is
tried once on a device, on a few tokens, beside our own form in torch: outputs, final states and all gradients. fla's
own autograd serves backward; it keeps more than the inputs, and says nothing about second derivatives.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import backends
from ... import device as devices
from ...support.errors import one_line
from ..attention import Segments, once_for_segments, uploaded
from ..trial import differs
from .delta_rule_chunks import normalized
from .head_slices import in_chunks

__all__ = ["DeltaRuleForm", "by_fla", "choose", "unserved_by_fla"]

_OP = "gated_delta_rule"
_FUNCTIONS = {
    (True, False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("fla.ops.kda", "chunk_kda"),
    (False, False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    (False, True): ("fla.ops.gla", "chunk_gla"),
}


@dataclass(frozen=True)
class DeltaRuleForm:
    """What a call asks of fla.

    Attributes:
        delta: whether there is a beta.
        by_channel: whether there is a gate for each channel.
        normalize: whether q and k are divided by their norms.
        group: the number of value heads for each key head.
        key, value: the sizes of heads, Dk and Dv.
    """

    delta: bool
    by_channel: bool
    normalize: bool = False
    group: int = 1
    key: int = 128
    value: int = 128


def _function(form: DeltaRuleForm) -> Callable[..., Any]:
    module, name = _FUNCTIONS[form.delta, form.by_channel]
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def by_fla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None,
    state: torch.Tensor | None, segments: Segments | None, scale: float, normalize: bool, return_state: bool,
) -> Any:  # fmt: skip
    """Computes the op with fla. The arguments are those of `gated_delta_rule`."""
    function = _function(DeltaRuleForm(beta is not None, g.dim() == 4))
    options: dict[str, Any] = {"scale": scale, "initial_state": state, "output_final_state": return_state}
    if segments is not None:
        # fla computes indexes on the host, once for each of these tensors. From the copy on the host it need not wait.
        ends = once_for_segments(segments, "fla", _ends)
        options["cu_seqlens"] = ends[0]
        if "cu_seqlens_cpu" in inspect.signature(function).parameters:
            options["cu_seqlens_cpu"] = ends[1]
    if beta is not None:
        options |= {"beta": beta, "use_qk_l2norm_in_kernel": normalize}
    else:
        q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    with torch.autocast(v.device.type, enabled=False):
        o, last = function(q, k, v, g, **options)
    return (o, last) if return_state else o


def _ends(begins: np.ndarray, ends: np.ndarray, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    both = np.concatenate(([0], ends))
    return uploaded(both, where), torch.from_numpy(both)


def unserved_by_fla(device: torch.device, dtype: torch.dtype, form: DeltaRuleForm) -> str | None:
    """Returns why fla does not serve calls of this form, for a report, or None if it does. The first question for a
    form on a device that has fla tries it there, which compiles fla's kernels and waits for the device.

    Args:
        device: the device of the tensors.
        dtype: the dtype of q, k and v.
        form: what the calls ask.
    """
    if devices.spec(device).is_host:
        return "fla's kernels run on accelerators"
    if importlib.util.find_spec("fla") is None:
        return "fla is not installed (the package fla-core)"
    if form.normalize and not form.delta:
        return "fla has no norms of q and k without the delta rule"
    return _trial(device, dtype, form)


def _in_torch(*args: Any) -> Any:
    return in_chunks(*args, "torch")


@functools.cache
def _trial(device: torch.device, dtype: torch.dtype, form: DeltaRuleForm) -> str | None:
    """Compares fla with our form in torch: segments with states before them, and rows without."""
    name = _FUNCTIONS[form.delta, form.by_channel][1]
    generator = torch.Generator("cpu").manual_seed(0)
    heads = 2 * form.group

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def outcome(run: Callable[..., Any], given: Sequence[torch.Tensor | None], segments: Segments | None) -> list[Any]:
        results = run(*given, segments, form.key**-0.5, form.normalize, True)
        wanted = [t for t in given if t is not None]
        return [*results, *torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results])]

    def given(rows: int, tokens: int, states: int) -> list[torch.Tensor | None]:
        q, k = (normalized(drawn(rows, tokens, 2, form.key)).to(dtype) for _ in range(2))
        v, beta = drawn(rows, tokens, heads, form.value).to(dtype), drawn(rows, tokens, heads).sigmoid().to(dtype)
        g = -drawn(rows, tokens, heads, *[form.key] * form.by_channel).exp()
        state = drawn(states, heads, form.key, form.value) if states else None
        return [q, k, v, g, beta if form.delta else None, state]

    # Hide the tensors that these gradients save from outer hooks, such as those of a checkpoint around the layer.
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), own:
            for lengths in ((1, 70, 5), None):
                segments = None if lengths is None else Segments.make(lengths, device)
                tensors = given(2, 20, 0) if lengths is None else given(1, sum(lengths), len(lengths))
                tensors = [t if t is None else t.detach().requires_grad_() for t in tensors]
                wide = [t if t is None else t.detach().float().requires_grad_() for t in tensors]
                reason = differs(name, outcome(by_fla, tensors, segments), outcome(_in_torch, wide, segments), dtype)
                if reason is not None:
                    return reason
    except Exception as error:
        # The errors of Triton's compilers and of drivers have no type in common.
        if devices.is_out_of_memory(error):
            raise
        return f"{name} raises there: {one_line(error, 120)}"
    return None


def choose(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None, normalize: bool,
    backend: str | None,
) -> str:  # fmt: skip
    """Returns the backend of a call: "fla", or one of the table of ops. The table has kernels of this package and their
    measurements; fla's kernels are what transformers uses, too, where they are installed.

    Args:
        q, k, v, g, beta, normalize, backend: see `gated_delta_rule`.

    Raises:
        ValueError: an unknown backend, or one that cannot run there or does not serve the call.
    """
    # Dynamo need not trace the lookup.
    traced = torch.compiler.is_compiling()
    if backend == "fla" or (backend is None and not traced and not backends.asked_for(_OP)):
        reason = _unserved(q, k, v, g, beta, normalize)
        if reason is None:
            return "fla"
        if backend == "fla":
            raise ValueError(f"backend must be another one or None for this call; got 'fla': {reason}")

    def at() -> backends.Shape:
        return v.dtype, v.shape[0] * v.shape[1], (k.shape[2], v.shape[2], k.shape[3], v.shape[3])

    return backends.choose(_OP, v.device, backend, at=at)


def _unserved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None, normalize: bool
) -> str | None:
    """Returns why fla does not serve a call, or None."""
    if torch.compiler.is_compiling():
        return "a compiler traces the call"
    if not v.numel():
        return "the call has no tokens"
    if not q.dtype == k.dtype == v.dtype:
        return f"fla takes q, k and v of one dtype; got {q.dtype}, {k.dtype} and {v.dtype}"
    group = v.shape[2] // k.shape[2]
    form = DeltaRuleForm(beta is not None, g.dim() == 4, normalize, group, k.shape[3], v.shape[3])
    return unserved_by_fla(v.device, v.dtype, form)
