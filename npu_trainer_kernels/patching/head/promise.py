"""Logits that are promised instead of computed.

A patched head returns a promise: a tensor with the logits' shape, dtype and device that has no memory. It records what
loss code does to logits before a cross-entropy (`promise_records`), and its cross-entropy is the fused op. Any other
use of its values materializes it: the head's product is computed, once, and the recorded steps are applied to it; from
then on every use is one of ordinary logits. Reading shape, dtype or autograd attributes, and hooks of wrapper
libraries, are no use of values.

A promise has its own node in autograd's graph, between hidden states, weight and bias on one side and losses on the
other. The gradient that backward sends through it is deferred as well (`OwedGradient`): a loss records to which logits
it owes a gradient, and the first node, whose inputs are the hidden states and parameters, runs the fused op's backward
for them. So hooks on logits run before the head's backward, as FSDP2 and DeepSpeed expect, DDP finds every parameter,
and code that reads the gradient of logits sees its ordinary values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

from ...ops.host import once_differentiable, stands_on
from .head_call import HeadCall

__all__ = ["OwedGradient", "Place", "PromiseStep", "PromisedLogits", "Transform", "promise"]


@dataclass(frozen=True)
class Transform:
    """A function of a head's output l: `outer * tanh(inner * l)`, or `inner * l` where outer is None."""

    inner: float = 1.0
    outer: float | None = None

    def times(self, number: float) -> Transform:
        """Returns this transform multiplied by a number."""
        if self.outer is None:
            return Transform(self.inner * number)
        return Transform(self.inner, self.outer * number)

    def capped(self) -> Transform:
        """Returns the tanh of this transform, which has none yet."""
        return Transform(self.inner, 1.0)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the transform to a head's output."""
        return self.inner * logits if self.outer is None else self.outer * torch.tanh(self.inner * logits)

    @property
    def options(self) -> dict[str, float]:
        """The transform as the fused op's arguments."""
        if self.outer is None:
            return {"logit_scale": self.inner}
        return {"logit_scale": self.inner * self.outer, "softcap": abs(self.outer)}


NO_TRANSFORM = Transform()


@dataclass(frozen=True)
class PromiseStep:
    """A recorded step on promised logits: `function(logits, *args, **kwargs)`.

    Attributes:
        alias: whether the result shares memory with its input.
    """

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    alias: bool

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.function(logits, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Place:
    """The definition of promised logits: a call of the head, and the steps since. It does not depend on the graph.

    Attributes:
        hidden: the hidden states after the steps on rows.
        transform: the steps on values.
        shadow: a meta tensor with the shape, dtype and strides.
    """

    call: HeadCall
    hidden: torch.Tensor
    shadow: torch.Tensor
    transform: Transform = NO_TRANSFORM
    steps: tuple[PromiseStep, ...] = ()

    def values(self) -> torch.Tensor:
        """Returns the logits outside of any graph, in the memory of the head's output if ordinary logits would be."""
        aliased = all(step.alias for step in self.steps)
        with torch.no_grad():
            return functools.reduce(lambda t, step: step(t), self.steps, self.call.logits(not aliased).detach())

    @property
    def written(self) -> bool:
        """Whether other code has written to the memory that these logits share."""
        return self.call.written and all(step.alias for step in self.steps)


@dataclass
class _State:
    """The state of a promise.

    Attributes:
        parent: the promise that it was made from, if both are in the graph, or both are not.
        own: whether it was made in the graph; otherwise an autograd function may have put it there afterwards.
        real: the materialized logits, or None; `clean` is their version at that time.
        loose: values that code below autograd has needed.
        fused: whether a loss was computed from it or from a promise made of it.
        hooks: hooks for the materialized logits.
    """

    parent: PromisedLogits | None = None
    own: bool = False
    real: torch.Tensor | None = None
    clean: int = 0
    loose: torch.Tensor | None = None
    fused: bool = False
    hooks: list[Callable[[torch.Tensor], Any]] = field(default_factory=list)


class PromisedLogits(torch.Tensor):
    """See the module's docstring.

    Attributes:
        answer: runs a torch function that is called with a promise; `promise_records` sets it.
    """

    answer: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    place: Place
    state: _State

    @staticmethod
    def __new__(cls, place: Place) -> PromisedLogits:
        shadow = place.shadow
        self = torch.Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), dtype=shadow.dtype, device=place.call.device
        )
        self.place, self.state = place, _State()
        return self

    def done(self, place: Place) -> PromisedLogits:
        """Returns the promise that the last step of `place` makes of this one."""
        in_graph = self.requires_grad
        if in_graph and torch.is_grad_enabled():
            made: PromisedLogits = _PromiseOfStep.apply(self, place)
            made.state.parent, made.state.own = self, True
        else:
            made = PromisedLogits(place)
            # Made without gradients, it must not keep the graph alive; a copy of ordinary logits would not either.
            made.state.parent = None if in_graph else self
        return made

    @property
    def settled(self) -> bool:
        """Whether its values must be taken from memory: they were computed, or other code has written to them."""
        state = self.state
        if state.real is not None or state.loose is not None:
            return True
        if state.parent is not None:
            return self.place.steps[-1].alias and state.parent.written
        return self.place.written

    @property
    def written(self) -> bool:
        """Whether other code has written to its memory."""
        state = self.state
        if state.real is not None:
            return state.real._version != state.clean
        return self.settled

    def formed(self, reason: str) -> torch.Tensor:
        """Returns the materialized logits, which are in the graph if the promise is."""
        state = self.state
        if state.real is None:
            self.place.call.tell(reason)
            in_graph = self.requires_grad
            from_parent = state.parent is not None and state.own == in_graph and state.loose is None
            if from_parent and (self.place.steps[-1].alias or not state.parent.written):  # type: ignore[union-attr]
                with torch.set_grad_enabled(in_graph):
                    state.real = self.place.steps[-1](state.parent.formed(reason))  # type: ignore[union-attr]
                for hook in state.hooks:
                    state.real.register_hook(hook)
            else:
                values = self.place.values() if state.loose is None else state.loose
                with torch.set_grad_enabled(in_graph):
                    state.real = _Real.apply(self, values) if in_graph else values
            state.clean = state.real._version
        return state.real

    def loss(self, fused: Callable[[], torch.Tensor], again: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns a loss of this promise's call that a fused op computes; in the graph, it depends on this promise.

        Args:
            fused: runs the op; its graph ends at the leaves of the call.
            again: computes the same loss from ordinary logits, for code that reads their gradient.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            with torch.no_grad():
                return fused()
        loss: torch.Tensor = _PromisedLoss.apply(self, _Debt(fused(), self.place, again))
        used: PromisedLogits | None = self
        while used is not None:
            used.state.fused, used = True, used.state.parent
        return loss

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.answer(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd, where C++ code was called with a promise: the graph is recorded already.
        args, kwargs = tree_map_only(PromisedLogits, lambda p: p._loose(f"given to {function}"), (args, kwargs or {}))
        return function(*args, **kwargs)

    def _loose(self, reason: str) -> torch.Tensor:
        state = self.state
        if state.real is not None:
            return state.real.detach()
        if state.loose is None:
            self.place.call.tell(reason)
            with self.place.call.above_autograd():
                state.loose = self.place.values()
        return state.loose


def promise(call: HeadCall, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> PromisedLogits:
    """Returns the promise of a head's logits."""
    if not torch.is_grad_enabled():
        return PromisedLogits(Place(call, call.hidden, call.shadow))
    made: PromisedLogits = _PromiseOfHead.apply(hidden, weight, bias, Place(call, call.hidden, call.shadow))
    made.state.own = True
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Debt:
    """A loss that the fused op has computed, and the logits that it belongs to."""

    loss: torch.Tensor
    place: Place
    again: Callable[[torch.Tensor], torch.Tensor]

    def gradient(self, upstream: torch.Tensor, at: Place) -> torch.Tensor:
        """Returns the gradient that this loss would send to the logits at `at`."""
        with self.place.call.above_autograd(), torch.enable_grad():  # the caller may be below it
            x = at.values().detach().requires_grad_()
            loss = self.again(functools.reduce(lambda t, step: step(t), self.place.steps[len(at.steps) :], x))
            return torch.autograd.grad(loss, x, upstream.to(loss.dtype))[0]


class OwedGradient(torch.Tensor):
    """The gradient of promised logits: losses that owe them a gradient, and gradients that were already computed
    (`paid`). Its values are computed when code reads them."""

    debts: tuple[tuple[_Debt, torch.Tensor], ...]
    paid: torch.Tensor | None
    at: Place

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, debts: tuple[tuple[_Debt, torch.Tensor], ...], at: Place, paid: torch.Tensor | None = None
    ) -> OwedGradient:
        self = torch.Tensor._make_wrapper_subclass(cls, at.shadow.shape, dtype=at.shadow.dtype, device=at.call.device)
        self.debts, self.at, self.paid = debts, at, paid
        return self

    def formed(self) -> torch.Tensor:
        """Returns the values that ordinary logits would have been sent."""
        owed = (debt.gradient(upstream, self.at) for debt, upstream in self.debts)
        return functools.reduce(torch.add, owed if self.paid is None else (self.paid, *owed))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and not kwargs and len(args) == 2:
            # Autograd sums the gradients of several uses of the same logits.
            owed = next(t for t in args if isinstance(t, OwedGradient))
            if all(isinstance(t, torch.Tensor) and t.shape == owed.shape for t in args):
                return functools.reduce(OwedGradient._plus, args[1:], _owed(args[0], owed.at))
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default) and not kwargs:
            return OwedGradient(args[0].debts, args[0].at, args[0].paid)
        args, kwargs = tree_map_only(OwedGradient, OwedGradient.formed, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _plus(self, other: torch.Tensor) -> OwedGradient:
        other = _owed(other, self.at)
        return OwedGradient(self.debts + other.debts, self.at, added(self.paid, other.paid))


def _owed(gradient: torch.Tensor, at: Place) -> OwedGradient:
    return gradient if isinstance(gradient, OwedGradient) else OwedGradient((), at, gradient)


def added(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum of two gradients, where None is no gradient."""
    return b if a is None else a if b is None else a + b


def _keeps_graph() -> bool:
    """Whether the running backward keeps the graph for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _taken(ctx: Any) -> Any:
    """Returns the data that a node has saved for backward, and frees it unless there may be another backward."""
    kept = ctx.kept
    if kept is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time: what the logits need for it has been freed. Specify "
            "retain_graph=True for the first backward."
        )
    if not _keeps_graph():
        ctx.kept = None
    return kept


class _PromiseOfHead(torch.autograd.Function):
    """(hidden, weight, bias) -> the first promise."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                place: Place) -> torch.Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.kept = place
        stands_on(ctx, hidden, weight, bias)
        return PromisedLogits(place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if d is None:
            return None, None, None, None
        place, keep = _taken(ctx), _keeps_graph()
        call: HeadCall = place.call
        owed = _owed(d, place)
        uses = [(debt.loss, upstream) for debt, upstream in owed.debts]
        if owed.paid is not None:
            uses.append((call.logits(), owed.paid))
        found: list[torch.Tensor | None] = [None, None, None]
        for formed, upstream in uses:
            new = call.gradients(formed, upstream, keep)
            found = [added(u, v) for u, v in zip(found, new, strict=True)]
        return *found, None


class _PromiseOfStep(torch.autograd.Function):
    """A promise -> the next promise."""

    @staticmethod
    def forward(ctx: Any, logits: PromisedLogits, place: Place) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.kept = (logits.place, place.steps[-1])
        stands_on(ctx, logits)
        return PromisedLogits(place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if d is None:
            return None, None
        before, step = _taken(ctx)
        owed, paid = _owed(d, before), None
        if owed.paid is not None:
            with torch.enable_grad():
                x = before.values().detach().requires_grad_()
                paid = torch.autograd.grad(step(x), x, owed.paid)[0]
        return OwedGradient(owed.debts, before, paid) if owed.debts else paid, None


class _PromisedLoss(torch.autograd.Function):
    """A promise -> the loss that the fused op has computed."""

    @staticmethod
    def forward(ctx: Any, logits: PromisedLogits, debt: _Debt) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.kept = debt
        stands_on(ctx, logits)
        return debt.loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if d is None:
            return None, None
        debt = _taken(ctx)
        return OwedGradient(((debt, d),), debt.place), None


class _Real(torch.autograd.Function):
    """A promise -> its materialized logits."""

    @staticmethod
    def forward(ctx: Any, logits: PromisedLogits, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d, None
