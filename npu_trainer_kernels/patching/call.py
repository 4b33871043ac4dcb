"""Records which patched model's forward is running.

Forward hooks on the patched model put a `Call` into a context variable while its forward runs. The function that
replaces TRL's head reads it, and the hooks count input tokens. Nothing is stored on the model, so copies of a patched
model share no state, and two models or two threads do not see each other's calls.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..capture import recording_now
from ..ops.checks import has_values
from ..ops.head import GrpoPlan
from ..support.opaque import opaque
from .learned_plan import LearnedPlan
from .stand_aside import StandAside
from .undo import Undo

__all__ = [
    "Call",
    "CallSettings",
    "HeadPlan",
    "Scored",
    "calls_end",
    "current_call",
    "current_plan",
    "generates",
    "leave_calls",
    "track_calls",
    "use_labels",
    "use_plan",
]


class HeadPlan(Protocol):
    """A trainer's plan for the gradient of its loss, made before the head runs."""

    def for_rows(self, rows: int, weight: torch.Tensor, itemsize: int, scored: "Scored | None") -> GrpoPlan | None:
        """Returns the plan for a head with so many rows, or None where the plan is for other rows or one completion
        does not fit into a chunk. `scored` says which positions the rows are from, where that is known."""

    def mismatch(self, share: float) -> None:
        """Called with the fraction of rows whose gradient differed from the plan."""


@dataclass
class CallSettings:
    """Settings and counters that the calls of a patched model share.

    Attributes:
        trl: the site that serves TRL's head inside the model's forward (`head.trl_seam.TrlHeadPatch`), or None.
        shares: whether training computes a common prefix of rows once.
        compacts: whether rows without a label are removed before TRL's head; False for fake tensors.
        tokens: the number of input tokens of the training forwards so far, on this process, padding included.
        live: the number of those that are not padding; a tensor on the device where the host need not wait for it.
        caches: whether a training forward without `use_cache` returns the KV cache that its configuration requests.
        eval_caches: whether a forward in evaluation mode without `use_cache` does.
        bodies: what captures the bodies (`bodies.BodyCapture`), or None.
        full: whether ids without numbers and without a mask (those of fit) are taken for rows without padding.
        learned: the plan that is learned from the gradients of TRL's loss, where no trainer provides one.
    """

    trl: Any = None
    shares: bool = False
    compacts: bool = True
    tokens: int = 0
    live: Any = 0
    caches: bool = True
    eval_caches: bool = True
    bodies: Any = None
    full: bool = False
    learned: LearnedPlan = field(default_factory=LearnedPlan)


class Scored:
    """The positions of a batch that TRL's head scores: those whose label is not -100. They are read from the device
    once per forward, together with the layout of the batch where the body reads that.

    Attributes:
        labels: `[B, L]`, the labels that the model was called with.
        label_shift: the number of positions between a label and the position that predicts it: 1, or 0 for shifted
            labels.
        places: `[n]`, indices of the scored positions in the flattened `[B, L - label_shift]`; None: not read yet.
        left_to_us: whether TRL passes all positions to the head, so that this package removes those without a label.
    """

    def __init__(self, labels: torch.Tensor, label_shift: int) -> None:
        self.labels, self.label_shift = labels, label_shift
        self.places: np.ndarray | None = None
        self.left_to_us = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the positions that the head is called with, `(B, L - label_shift)`."""
        return self.labels.shape[0], self.labels.shape[1] - self.label_shift

    @property
    def mask(self) -> torch.Tensor:
        """A boolean tensor on the device that marks the scored positions."""
        return self.labels[:, self.label_shift :] != -100

    def read(self) -> np.ndarray:
        """Returns `places`; the host waits for the device where they were not read yet."""
        if self.places is None:
            self.places = np.flatnonzero(self.mask.cpu().numpy())
        return self.places


@dataclass(frozen=True)
class Call:
    """One forward of a patched model.

    Attributes:
        previous: the call that this one is nested in, or None.
        labels: the labels that the model was called with, or that its trainer keeps for a loss outside the model.
        divisor: the divisor of the loss, which `transformers.Trainer` passes to the model, or None.
        generates: whether the forward has one token of each row and no gradients, and is not being captured.
        scored: the positions that TRL's head scores, where the model was called with labels.
        collects: whether the hidden states of all layers are asked for.
        positions: the position ids that the model was called with by name, which it may keep from its body (Mamba 2).
    """

    settings: CallSettings
    module: nn.Module
    previous: "Call | None"
    labels: torch.Tensor | None = None
    divisor: int | float | torch.Tensor | None = None
    generates: bool = False
    scored: Scored | None = None
    collects: bool = False
    positions: torch.Tensor | None = None


_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("npu_kernels_call", default=None)
_kept: contextvars.ContextVar[Any] = contextvars.ContextVar("npu_kernels_labels", default=None)
_plan: contextvars.ContextVar[HeadPlan | None] = contextvars.ContextVar("npu_kernels_plan", default=None)


def current_plan() -> HeadPlan | None:
    """Returns the plan of the trainer whose loss is being computed, or None."""
    return _plan.get()


@contextlib.contextmanager
def use_plan(plan: HeadPlan | None) -> Iterator[None]:
    """Provides a plan to TRL's head inside the `with` block."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


@contextlib.contextmanager
def use_labels(labels: Any) -> Iterator[None]:
    """Provides the labels of a loss outside the model inside the `with` block."""
    token = _kept.set(labels)
    try:
        yield
    finally:
        _kept.reset(token)


@contextlib.contextmanager
def calls_end() -> Iterator[None]:
    """Ends the calls that were begun inside the `with` block. PyTorch runs no hook of a forward that KeyboardInterrupt
    leaves, so a call would last, and TRL's head of other models would be served as that model's."""
    before = _current.get()
    try:
        yield
    finally:
        _current.set(before)


def current_call() -> Call | None:
    """Returns the call whose forward is running on this thread, or None."""
    return _current.get()


def generates() -> bool:
    """Whether this thread's running forward has one token of each row and no gradients, as generation with a cache:
    ops lose time there, except in a graph."""
    call = _current.get()
    return call is not None and call.generates


# Called once per module and token. Dynamo takes it for a constant, since every op stands aside inside a graph.
generates._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns an argument of a model's forward; ids and mask come first in all of them."""
    place = ("input_ids", "attention_mask").index(name)
    return kwargs.get(name, args[place] if len(args) > place else None)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    ids, embedded = _given("input_ids", args, kwargs), kwargs.get("inputs_embeds")
    if isinstance(ids, FakeTensor) or isinstance(embedded, FakeTensor):
        return 0
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    return embedded.shape[:-1].numel() if isinstance(embedded, torch.Tensor) else 0


def _has_one_column(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    ids = _given("input_ids", args, kwargs)
    rows = kwargs.get("inputs_embeds") if ids is None else ids
    return isinstance(rows, torch.Tensor) and rows.dim() > 1 and rows.shape[1] == 1


def _scored(kwargs: dict[str, Any]) -> Scored | None:
    shifted = kwargs.get("shift_labels")
    labels, label_shift = (kwargs.get("labels"), 1) if shifted is None else (shifted, 0)
    # Fake tensors have no values to read.
    return (
        Scored(labels, label_shift)
        if isinstance(labels, torch.Tensor) and labels.dim() == 2 and has_values(labels)
        else None
    )


def _untracked(*args: Any, **kwargs: Any) -> None:
    """Replaces the hooks in a graph that may not be broken, where TRL's own head runs."""


@functools.partial(opaque, in_full_graphs=_untracked)
def _enter(
    settings: CallSettings, aside: StandAside, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    outer = _current.get()
    if outer is None and module.training and torch.is_grad_enabled() and (tokens := _tokens(args, kwargs)):
        mask = _given("attention_mask", args, kwargs)
        settings.tokens += tokens
        if type(mask) is torch.Tensor and mask.device.type != "meta" and mask.numel() == tokens:
            settings.live = settings.live + mask.count_nonzero()
        else:
            settings.live = settings.live + tokens
    # PEFT's model passes them to the inner model by name.
    labels = kwargs.get("labels", _kept.get())
    labels = labels if isinstance(labels, torch.Tensor) else None
    one = not torch.is_grad_enabled() and _has_one_column(args, kwargs) and not recording_now()
    scored = _scored(kwargs) if settings.trl is not None and kwargs.get("fused_lm_head") else None
    collects = kwargs.get("output_hidden_states")
    if collects is None:
        collects = getattr(getattr(module, "config", None), "output_hidden_states", False)
    divisor = kwargs.get("num_items_in_batch")
    positions = kwargs.get("position_ids")
    _current.set(Call(settings, module, outer, labels, divisor, one, scored, bool(collects), positions))
    if outer is None:
        aside.begins(module, one)


@functools.partial(opaque, in_full_graphs=_untracked)
def _leave(aside: StandAside, module: nn.Module, args: Any, output: Any) -> None:
    # This hook also runs if another hook has raised before `_enter`. Then there is no call of this module to leave, and
    # the running call is another model's.
    call = _current.get()
    while call is not None and call.module is not module:
        call = call.previous
    if call is not None:
        _current.set(call.previous)
        if call.previous is None:
            aside.ends()


def leave_calls(settings: CallSettings) -> None:
    """Ends this thread's calls with these settings, since the hooks that would are taken out."""
    call = _current.get()
    while call is not None and call.settings is settings:
        call = call.previous
    _current.set(call)


def track_calls(module: nn.Module, settings: CallSettings, aside: StandAside, undo: Undo) -> None:
    """Makes `current_call` return a call of `module` while its forward runs, and the patched modules stand aside if it
    generates; also an exception ends the call."""
    before = module.register_forward_pre_hook(
        functools.partial(_enter, settings, aside), with_kwargs=True, prepend=True
    )  # fmt: skip
    after = module.register_forward_hook(functools.partial(_leave, aside), always_call=True)
    undo.add(before.remove)
    undo.add(after.remove)
