"""The LM head of a causal language model: in training it promises its logits (`_promise`) instead of forming them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._opaque import opaque
from ._classes import original_class, subclass_with_forward
from ._head_call import HeadCall, answer_of, is_asked, is_of_a_wrapper
from ._promise import promise

__all__ = ["HeadForm", "declined", "patched_head_class", "promised_logits", "recognise_head"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadForm:
    """A head whose logits may be promised.

    Attributes:
        head: the module.
        within: the whole model, weakly: what shards it may have to gather the head's parameters for a late use.
    """

    head: nn.Linear
    within: weakref.ref[nn.Module]


def recognise_head(causal_lm: Any, within: nn.Module | None = None) -> HeadForm | str:
    """The LM head of a model, or why it is left alone. `within`: what the model is part of."""
    head = causal_lm.get_output_embeddings() if hasattr(causal_lm, "get_output_embeddings") else None
    if head is None:
        return "it has no output embeddings"
    if not isinstance(head, nn.Linear) or original_class(head).forward is not nn.Linear.forward:
        return f"its head is a {type(head).__name__}, not a plain nn.Linear"
    return HeadForm(head, weakref.ref(causal_lm if within is None else within))


def declined(head: nn.Linear, hidden: torch.Tensor) -> str | None:
    """Why this call of a head forms its logits at once, or None."""
    if is_asked(head):
        return None
    if not (head.training and torch.is_grad_enabled()):
        return "no training with gradients"
    if torch.compiler.is_compiling():
        return "inside torch.compile logits are formed"
    if hidden.dtype not in _DTYPES or isinstance(hidden, DTensor) or isinstance(head.weight, DTensor):
        return f"hidden states of {hidden.dtype}, or a head that is sharded by columns or rows"
    if hidden.dtype != head.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        return f"hidden states of {hidden.dtype} for a weight of {head.weight.dtype}"
    if not any(t is not None and t.requires_grad for t in (hidden, head.weight, head.bias)):
        return "nothing that needs a gradient"
    if torch._C._are_functorch_transforms_active():
        return "inside a transform of torch.func"
    hooks = [*head._forward_hooks.values(), *head._forward_pre_hooks.values(), *head._backward_hooks.values(),
             *head._backward_pre_hooks.values()]  # fmt: skip
    if not all(is_of_a_wrapper(hook) for hook in hooks):
        return "a hook on the head"
    return None


@opaque
def promised_logits(
    head: nn.Linear, hidden: torch.Tensor, backend: str | None, *,
    on_real: Callable[[str], None] | None = None, within: weakref.ref[nn.Module] | None = None,
) -> torch.Tensor:  # fmt: skip
    """What a head returns in training: its logits, promised.

    Args:
        head: whose call `declined` has let through.
        hidden: its input.
        backend: for the fused op; None: the device's own choice.
        on_real: told why, whenever the logits have to be formed after all.
        within: see `HeadForm`.
    """
    answered = answer_of(head)
    if answered is not None:
        return answered
    return promise(HeadCall(head, hidden, backend, on_real, within), hidden, head.weight, head.bias)


def patched_head_class(form: HeadForm, backend: str | None, on_real: Callable[[str], None]) -> type[nn.Module]:
    """The class of a head that promises its logits, call by call."""
    cls: Any = original_class(form.head)

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if declined(self, input) is not None:
            return cls.forward(self, input)
        return promised_logits(self, input, backend, on_real=on_real, within=form.within)

    return subclass_with_forward(cls, forward)
