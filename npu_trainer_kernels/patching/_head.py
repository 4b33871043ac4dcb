"""The LM head and loss of a causal language model that `transformers.Trainer` trains.

When a model's loss function is called, its logits exist already; so the loss is computed one step earlier, in the
head's forward, from the labels that `_call` has noted, and the loss function only hands it over. The head then returns
logits of width zero: nothing in a training step reads them, and full logits are what this is about.

What the model does to the logits between head and loss function (a soft cap, a scale) is measured, not looked up: the
model's own forward is run once with its backbone and its head replaced by constants, and the probe values that reach
the loss function tell the transform. A model whose forward does anything else with its logits is left alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._opaque import opaque
from ..ops.linear_cross_entropy import fused_linear_cross_entropy
from ._call import current_call
from ._classes import original_class, subclass_with_forward
from ._undo import Undo

__all__ = ["HeadForm", "patch_head", "recognise_head"]

IGNORE_INDEX = -100
# Zero, small values (the slope), moderate ones, and one far beyond any soft cap in use.
_PROBES = (0.0, 1e-3, -1e-3, -0.5, 3.0, -20.0, 45.0, 1e6, -1e6)
_REL = 1e-5


@dataclass(frozen=True)
class HeadForm:
    """From a head's output l to the logits of the loss: `softcap * tanh(logit_scale * l / softcap)`."""

    logit_scale: float
    softcap: float | None

    def __str__(self) -> str:
        parts = [] if self.logit_scale == 1.0 else [f"logit_scale={self.logit_scale:g}"]
        return ", ".join(parts + ([] if self.softcap is None else [f"softcap={self.softcap:g}"]))


class _BackboneOutput(dict[str, Any]):
    """Stands for a backbone's output: one hidden state; every other field is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else dict.get(self, key)


class _ReachedLoss(Exception):
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def _probe_tail(model: Any, head: nn.Linear) -> torch.Tensor | str:
    """The probe values as they reach the model's loss function, or why they do not."""
    backbone = getattr(model, "base_model", None)
    if backbone is None or backbone is model:
        return "it has no backbone apart from the model itself"
    values = torch.tensor(_PROBES, dtype=torch.float32, device="cpu")
    hidden = torch.zeros(1, 2, head.in_features, dtype=torch.float32, device="cpu")

    def loss_function(*args: Any, logits: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        raise _ReachedLoss(args[0] if logits is None else logits)

    undo = Undo()
    undo.silence(backbone)
    undo.silence(head)
    undo.set_attribute(backbone, "forward", lambda *a, **k: _BackboneOutput(last_hidden_state=hidden))
    undo.set_attribute(head, "forward", lambda x: values.expand(*x.shape[:-1], -1).clone())
    undo.set_attribute(model, "_loss_function", loss_function)
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu")
    try:
        with torch.no_grad():
            type(model).forward(model, input_ids=ids, labels=ids)
    except _ReachedLoss as reached:
        logits = reached.logits
        if logits.shape != (1, 2, len(_PROBES)):
            return f"its logits change shape on the way to the loss ({list(logits.shape)})"
        return logits[0, -1].double()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        return f"its forward cannot be probed ({type(error).__name__}: {error})"
    finally:
        undo.restore()
    return "its forward does not call its loss function"


def recognise_head(model: Any) -> tuple[nn.Linear, HeadForm] | str:
    """The LM head of a causal language model and the transform of its logits, or why the model is left alone."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return "it has no output embeddings"
    if not isinstance(head, nn.Linear) or original_class(head).forward is not nn.Linear.forward:
        return f"its head is a {type(head).__name__}, not a plain nn.Linear"
    if not hasattr(type(model), "loss_function"):
        return "it has no loss_function"
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        return f"its loss is {model.loss_type}, not ForCausalLM"
    reached = _probe_tail(model, head)
    if isinstance(reached, str):
        return reached
    probes = torch.tensor(_PROBES, dtype=torch.float64, device="cpu")
    scale = float(reached[1] / probes[1])
    scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-6) else scale
    cap = float(reached[-2].abs())
    softcap = None if math.isclose(cap, abs(scale) * _PROBES[-2], rel_tol=_REL) else cap
    expected = scale * probes if softcap is None else softcap * torch.tanh(scale * probes / softcap)
    if not torch.allclose(reached, expected, rtol=_REL, atol=1e-9) or scale == 0.0:
        return "what it does to its logits is not a scale and a soft cap"
    return head, HeadForm(scale, softcap)


@opaque
def _fused_loss(head: nn.Linear, hidden: torch.Tensor, form: HeadForm, backend: str | None) -> torch.Tensor | None:
    """Computes the loss of the call that is running, if it is to be fused here, and returns logits of width zero."""
    call = current_call()
    if call is None or not call.wants_loss or call.loss is not None:
        return None
    if call.shift_labels is not None:
        target = call.shift_labels
    else:
        assert call.labels is not None
        # Tokens before n predict n; the last one predicts nothing.
        target = nn.functional.pad(call.labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    if target.shape != hidden.shape[:-1]:
        # `logits_to_keep`, or a wrapper that added positions: the model's own path knows what to do.
        return None
    loss = fused_linear_cross_entropy(
        hidden, head.weight, target.to(hidden.device), head.bias,
        ignore_index=IGNORE_INDEX, num_items=call.num_items_in_batch,
        softcap=form.softcap, logit_scale=form.logit_scale, backend=backend,
    )  # fmt: skip
    assert isinstance(loss, torch.Tensor)
    call.loss = loss
    return _NoLogits.apply(loss, hidden)


class _NoLogits(torch.autograd.Function):
    """Logits of width zero that the loss is added to: no value, but a place in the graph.

    Whoever wraps the head looks at its output to learn that its backward begins: FSDP2 and DeepSpeed's ZeRO-3 gather
    its parameters then. With these logits in the loss that is before the loss's own backward, as with full logits.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_empty(*hidden.shape[:-1], 0)

    @staticmethod
    def backward(ctx: Any, d_logits: torch.Tensor) -> tuple[None, None]:
        return None, None


@functools.cache
def _forward(cls: Any, form: HeadForm, backend: str | None) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        logits = _fused_loss(self, input, form, backend)
        return cls.forward(self, input) if logits is None else logits

    return forward


def patch_head(model: Any, head: nn.Linear, form: HeadForm, backend: str | None, undo: Undo) -> None:
    """Moves the loss of `model` into the forward of its head; `_call.track_calls` must be on for the model."""
    cls: Any = original_class(head)
    undo.set_class(head, subclass_with_forward(cls, _forward(cls, form, backend)))
    original = model.loss_function

    @functools.wraps(original)
    def loss_function(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = current_call()
        if call is not None and call.loss is not None:
            loss, call.loss = call.loss, None
            logits = kwargs["logits"] if "logits" in kwargs else args[0]
            return loss + logits.sum(dtype=loss.dtype)
        return original(*args, **kwargs)

    undo.set_attribute(model, "_loss_function", loss_function)
