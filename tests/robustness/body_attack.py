"""A small captured body beside the same body that runs its own code, for attacks on order, state and threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.patching.tiny_body import Body, Replayed, ids_of, own_output

__all__ = ["Layer", "Pair", "Schedule", "grads"]

Run = Callable[[torch.Tensor], torch.Tensor]


class Schedule:
    """A number that code outside of the body sets."""

    value = 1.0


class Layer(GradientCheckpointingLayer):
    """Keeps its input and its result for backward, and reads a number of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.linear(hidden) * Schedule.value + hidden).tanh()


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns copies of all gradients."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _through(run: Run, ids: torch.Tensor) -> torch.Tensor:
    return run(ids)


class Pair:
    """A captured body, and the same body without.

    Attributes:
        body, plain: the two.
        made: the replays of the first.
        losses: the losses of both whose backward may come, the oldest first.
        outputs: the last results of the captured body, with what they should be.
    """

    def __init__(self, layers: int = 3, repeated: bool = False, kind: type[Layer] = Layer) -> None:
        torch.manual_seed(0)
        Schedule.value, self._repeated = 1.0, repeated
        self.body = Body([kind() for _ in range(layers)]).train()
        if repeated:
            for layer in self.body.layers:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = lambda f, *args: checkpoint(f, *args, use_reentrant=False)
        self.plain = copy.deepcopy(self.body)
        self.made = Replayed(self.body)
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def both(self) -> tuple[Body, Body]:
        return self.body, self.plain

    @property
    def _runs(self) -> tuple[Run, Run]:
        return self.made, lambda ids: own_output(self.plain, ids)

    def reset(self) -> None:
        for body in self.both:
            body.zero_grad()

    def forward(
        self, order: Sequence[int] | None = None, through: Callable[[Run, torch.Tensor], torch.Tensor] = _through
    ) -> None:
        """Both run forward, with the same result."""
        ids, made = ids_of(), []
        for body, run in zip(self.both, self._runs, strict=True):
            if order is not None:
                body.order = list(order)
            made.append(through(run, ids))
        assert torch.equal(*made), "results differ"
        self.outputs = [*self.outputs[-1:], (made[0], made[1].detach())]
        self.losses.append((made[0].square().sum(), made[1].square().sum()))

    def backward(self, which: int, keep: bool = False) -> None:
        """Both run a backward of the forward at this place, with the same gradients."""
        losses = self.losses[which] if keep else self.losses.pop(which)
        self.reset()
        for loss in losses:
            loss.backward(retain_graph=keep)
        found, expected = map(grads, self.both)
        for name, value in found.items():
            other = expected[name]
            assert (value is None) == (other is None), f"{name} has a gradient in one of them"
            assert value is None or other is None or torch.equal(value, other), f"the gradient of {name} differs"

    def evaluate(self, thread: bool = False) -> None:
        """Both run without gradients, here or on another thread, and keep their results."""
        ids, made = ids_of(), []

        def run() -> None:
            with torch.no_grad():
                made.extend(each(ids) for each in self._runs)

        if thread:
            other = threading.Thread(target=run)
            other.start()
            other.join()
        else:
            run()
        assert len(made) == 2
        assert torch.equal(*made), "results without gradients differ"

    def set(self, value: float) -> None:
        """Sets the number that layers read. (See `freeze`.)"""
        if self._repeated and self.losses:
            return
        Schedule.value = value

    def freeze(self, layer: int, trained: bool) -> None:
        """Freezes a layer in both, or trains it. (A checkpoint's repetition must run as the call did.)"""
        if self._repeated and self.losses:
            return
        for body in self.both:
            body.layers[layer].requires_grad_(trained)

    def check(self) -> None:
        """What was returned is still what it was."""
        assert all(torch.equal(out, expected) for out, expected in self.outputs), "a result was written to"
