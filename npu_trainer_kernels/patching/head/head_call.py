"""One call of an LM head, with the data to compute its logits, or a loss of them, later or never.

It keeps the hidden states, as the head's own product would, but no graph except its own: leaves stand for hidden
states, weight and bias, and gradients are computed for these leaves alone. The promise's node passes them on to the
caller's graph (`promise`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from ...ops.head import fused_linear_cross_entropy
from ...ops.host import autocasts, compute_dtype
from ..call import current_call

__all__ = ["HeadCall", "answer_of", "is_asked", "is_of_a_wrapper", "is_partitioned", "labelled_rows"]

_COMPARED = 256  # rows, each with as many logits as the vocabulary

_T = TypeVar("_T")
# While a partitioned head is called for its hooks alone: the head, and the function to run instead of its forward.
_asked: contextvars.ContextVar[tuple[nn.Module, Callable[[], None]] | None] = contextvars.ContextVar(
    "npu_kernels_asked", default=None
)


# These wrappers hook modules to gather their parameters, and outputs to learn that backward has reached them.
_WRAPPERS = ("torch.", "deepspeed.", "accelerate.")


def is_of_a_wrapper(hook: Any) -> bool:
    """Whether a hook belongs to a wrapper library, and so reads no values."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(_WRAPPERS)


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed's ZeRO-3 owns a parameter: it exchanges `.data` around each module's forward and backward."""
    return hasattr(parameter, "ds_id")


def is_asked(head: nn.Module) -> bool:
    """Whether a head is called for its hooks alone."""
    asked = _asked.get()
    return asked is not None and asked[0] is head


def answer_of(head: nn.Module) -> torch.Tensor | None:
    """Runs the requested function if a head is called for its hooks, and returns a dummy; None for any other call."""
    asked = _asked.get()
    if asked is None or asked[0] is not head:
        return None
    asked[1]()
    return torch.empty(0)


def _divisor(device: torch.device) -> torch.Tensor | None:
    """Returns the expected divisor of a sum over tokens, or None. A wrong one costs one rounding, no more."""
    call = current_call()
    told = None if call is None else call.divisor
    # At least one, so that the sum is finite even for a batch without items.
    if isinstance(told, torch.Tensor) and told.dim() == 0:
        return told.detach().to(device, torch.float32).clamp(min=1.0)
    if isinstance(told, (int, float)):
        return torch.full((), max(told, 1.0), dtype=torch.float32, device=device)
    return None


def labelled_rows(hidden: torch.Tensor, target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns some rows with a label from all over a batch, and the labels; None where there are none."""
    hidden, target = hidden.detach().reshape(-1, hidden.shape[-1]), target.reshape(-1)
    places = (target != ignored).nonzero().squeeze(1)
    places = places[:: max(1, len(places) // _COMPARED)]
    return (hidden[places], target[places]) if len(places) else None


def _released(t: torch.Tensor) -> bool:
    if isinstance(t, DTensor):
        with torch.no_grad():
            t = t.to_local()
    return t.numel() == 0 or not t.untyped_storage().nbytes()


class HeadCall:
    """One call of a head.

    Attributes:
        hidden: the leaf that stands for the hidden states; it shares their memory.
        leaves: the leaves for hidden states, weight and bias, which get gradients; None where there is no bias.
        shadow: a meta tensor with the logits' shape, dtype and strides.
        spent: whether a backward has gone through this call; parameters that were resharded then may have changed.
    """

    def __init__(
        self, head: nn.Linear, hidden: torch.Tensor, backend: str | None,
        on_real: Callable[[str], None] | None, on_fused: Callable[[], None] | None,
        within: weakref.ref[nn.Module] | None,
        compare: Callable[[Callable[[], Any], Callable[[], Any]], str | None] | None = None,
    ) -> None:  # fmt: skip
        self._compare = compare
        self._head, self._backend, self._within = head, backend, within
        self._on_real, self._on_fused = on_real, on_fused
        # The parameters during this forward: FSDP2 puts its shards in their place afterwards.
        self._parameters = [p for p in (head.weight, head.bias) if p is not None]
        self.hidden = hidden.detach().requires_grad_(hidden.requires_grad)
        twins = [_twin(p) for p in self._parameters]
        self.leaves = (self.hidden, twins[0], twins[1] if len(twins) > 1 else None)
        self._versions = self._current_versions()
        self._autocast = (compute_dtype(hidden), autocasts(hidden))
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self.spent = False
        self._logits: torch.Tensor | None = None
        self._clean = 0
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        self.shadow = torch.empty(shape, dtype=self._autocast[0], device="meta")

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.hidden.device

    def tell(self, reason: str) -> None:
        """Reports the first reason why the logits themselves are needed; later ones concern the same call of the
        head."""
        told, self._on_real = self._on_real, None
        if told is not None:
            told(reason)

    # -----------------------------------------------------------------------------------------------------------------
    # Results
    # -----------------------------------------------------------------------------------------------------------------

    def logits(self, pristine: bool = False) -> torch.Tensor:
        """Returns the head's output, computed once. `pristine`: computed again if other code has written to it."""
        if self._logits is None or (pristine and self._logits._version != self._clean):
            with torch.enable_grad(), self._as_called():
                formed = self._with_parameters(lambda: _product(*self.leaves))
            if self._logits is not None:
                return formed
            self._logits, self._clean = formed, formed._version
        return self._logits

    @property
    def written(self) -> bool:
        """Whether other code has written to the logits."""
        return self._logits is not None and self._logits._version != self._clean

    def cross_entropy(self, hidden: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        """Runs the fused op on rows of this call; if gradients are enabled, its graph ends at the leaves."""
        _, weight, bias = self.leaves
        divisor = _divisor(self.device) if options["reduction"] == "sum" and torch.is_grad_enabled() else None
        if divisor is not None:
            # Plans for the division that follows, so that gradients are divided in fp32 and rounded once.
            options |= {"reduction": "mean", "num_items": divisor}
        with self._as_called():
            loss = self._with_parameters(
                lambda: fused_linear_cross_entropy(hidden, weight, target, bias, backend=self._backend, **options)
            )
        assert isinstance(loss, torch.Tensor)
        if self._on_fused is not None:
            self._on_fused()
        # Divides by the same number that the op has multiplied by: if the division follows, backward sends a one.
        return loss if divisor is None else loss / divisor.reciprocal()

    def with_teacher(self, teacher: HeadCall, loss: Callable[..., _T]) -> _T:
        """Calls a function with the weight and bias of this call and of a teacher's, while they are in memory."""
        mine, its = self.leaves[1:], teacher.leaves[1:]
        with self._as_called():
            return self._with_parameters(lambda: teacher._with_parameters(lambda: loss(*mine, *its)))

    def with_head(self, loss: Callable[..., _T]) -> _T:
        """Calls a function with the weight and bias of this call, while they are in memory."""
        with self._as_called():
            return self._with_parameters(lambda: loss(*self.leaves[1:]))

    @property
    def sharded(self) -> str | None:
        """Why an op that takes whole weights cannot take this head's, or None."""
        return "a head is sharded" if any(isinstance(p, DTensor) for p in self._parameters) else None

    def unlike(self, teacher: HeadCall) -> str | None:
        """Returns why no loss can be computed of this call and a teacher's together, or None."""
        if teacher.sharded is not None:
            if self.sharded is None:
                return "the teacher's head is sharded, and the student's is not"
            if self._parameters[0].device_mesh != teacher._parameters[0].device_mesh:  # type: ignore[attr-defined]
                return "the two heads are sharded over other ranks"
        if any(is_partitioned(p) or _released(p) for p in teacher._parameters):
            return "the teacher's head is sharded"
        if self._autocast[1] != teacher._autocast[1] or self.device != teacher.device:
            return "the two heads run under another autocast, or on other devices"
        return None

    def differs(
        self, hidden: torch.Tensor, transformed: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor,
        **options: Any,
    ) -> str | None:  # fmt: skip
        """Returns why the fused op's losses differ from those of the logits of some rows, if that is to be compared.

        Args:
            hidden, target, options: the arguments of `cross_entropy`.
            transformed: the function of the head's output that precedes the loss.
        """
        rows = labelled_rows(hidden, target, options["ignore_index"]) if self._compare is not None else None
        if rows is None:
            return None
        compare, self._compare = self._compare, None
        assert compare is not None
        (x, target), options = rows, {**options, "reduction": "none"}
        names = {"class_weights": "weight", "ignore_index": "ignore_index", "label_smoothing": "label_smoothing"}
        of_torch = {name: options[ours] for ours, name in names.items()}

        def own() -> torch.Tensor:
            with self._as_called():
                logits = self._with_parameters(lambda: _product(x, *self.leaves[1:]))
                return nn.functional.cross_entropy(transformed(logits.float()), target, reduction="none", **of_torch)

        return compare(own, lambda: self.cross_entropy(x, target, **options).float())

    def gradients(self, of: torch.Tensor, upstream: torch.Tensor, keep: bool) -> list[torch.Tensor | None]:
        """Returns the leaves' gradients of a tensor that was computed here; None for leaves that need none."""
        needed = [leaf for leaf in self.leaves if leaf is not None and leaf.requires_grad]
        with self._pointed():
            found = iter(torch.autograd.grad(of, needed, upstream, retain_graph=keep, allow_unused=True))
        self.spent = True
        return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in self.leaves]

    # -----------------------------------------------------------------------------------------------------------------
    # The state of the call
    # -----------------------------------------------------------------------------------------------------------------

    def _as_called(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context with the autocast state of the head's call."""
        dtype, enabled = self._autocast
        if (compute_dtype(self.hidden), autocasts(self.hidden)) == self._autocast:
            return contextlib.nullcontext()  # the usual case, and autocast takes ten times as long
        return torch.autocast(self.device.type, dtype=dtype if enabled else None, enabled=enabled)

    def above_autograd(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context with the dispatch keys of the head's call: with autograd, also for callers below it."""
        return torch._C._ForceDispatchKeyGuard(*self._keys)

    def _current_versions(self) -> list[int]:
        return [leaf._version for leaf in self.leaves if leaf is not None]

    def _with_parameters(self, function: Callable[[], _T]) -> _T:
        """Calls a function while the head's parameters are in memory and unchanged."""
        if any(_released(p) for p in self._parameters):
            return self._gathered(function)
        if self._current_versions() != self._versions:
            raise RuntimeError(
                "these logits are needed for the first time now that the head's weight or its input has been written "
                "to (by an optimizer's step?), so they cannot be what they were; use them before that, or keep "
                "what is needed of them"
            )
        with self._pointed():
            return function()

    def _gathered(self, function: Callable[[], _T]) -> _T:
        if self.spent:
            raise RuntimeError(
                "these logits are needed for the first time after their backward, and the head's parameters have been "
                "given to other ranks since; use them before backward, or keep what is needed of them"
            )
        if is_partitioned(self._parameters[0]):
            # DeepSpeed gathers them when the module is called.
            return self._called_again(function)
        unit = self._unit()
        if unit is None:
            raise RuntimeError(
                "these logits are needed for the first time after the head's parameters have been given away by "
                "whatever shards them; use them inside the model's forward"
            )
        unit.unshard()
        try:
            return function()
        finally:
            if not torch.is_grad_enabled():
                unit.reshard()  # with gradients, FSDP does so after backward, which needs it next

    def _called_again(self, function: Callable[[], _T]) -> _T:
        results: list[_T] = []
        grad = torch.is_grad_enabled()

        def answer() -> None:
            with torch.set_grad_enabled(grad), self._pointed():
                results.append(function())

        token = _asked.set((self._head, answer))
        try:
            with torch.no_grad():
                self._head(self.hidden)
        finally:
            _asked.reset(token)
        return results[0]

    def _unit(self) -> FSDPModule | None:
        """Returns the innermost FSDP2 unit that contains the head."""
        if isinstance(self._head, FSDPModule):
            return self._head
        model = None if self._within is None else self._within()
        modules = [] if model is None else list(model.modules())  # outer ones come first
        units = [m for m in modules if isinstance(m, FSDPModule) and any(each is self._head for each in m.modules())]
        return units[-1] if units else None

    @contextlib.contextmanager
    def _pointed(self) -> Iterator[None]:
        """Points the leaves of partitioned parameters to the parameters' memory while it exists."""
        pairs = [
            (leaf, p) for leaf, p in zip(self.leaves[1:], self._parameters, strict=False)
            if leaf is not None and is_partitioned(p)
        ]  # fmt: skip
        for leaf, p in pairs:
            leaf.data = p.data
        try:
            yield
        finally:
            for leaf, p in pairs:
                leaf.data = p.new_empty(0)


def _product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes a head's product; where ranks hold slices of the vocabulary, gathers it as the plan would."""
    if not isinstance(weight, DTensor):
        return nn.functional.linear(hidden, weight, bias)
    every = [Replicate()]
    same = DTensor.from_local(hidden, weight.device_mesh, every, run_check=False)
    logits: Any = nn.functional.linear(same, weight, bias)
    gathered: torch.Tensor = logits.redistribute(placements=every).to_local()
    return gathered


def _twin(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a leaf that shares a parameter's memory, whose gradients trigger none of the parameter's hooks."""
    # A leaf with the memory of a partitioned parameter would keep it alive.
    twin = parameter.new_empty(0) if is_partitioned(parameter) else parameter.detach()
    return twin.requires_grad_(parameter.requires_grad)
