"""Attention by a model's own code to the places of a cache, for models whose attention takes no `PackedMask`.

Some models add their mask to scores themselves (Bloom, GPT-J), some have biases by position (alibi), and some have a
mask that is neither causal nor a window (the chunks of Llama 4). Their code is left as it is: the keys that it gets are
those of all places of the cache, and the mask says which of them a row's token sees:

    seen_bj = allowed(b, written_b, j) and j <= written_b

for the row b, the place j, the number `written_b` of the row's keys before this token, and the function `allowed` of
queries' and keys' positions that transformers asks about. Nothing of it is read on the host, so a captured step makes
the mask of each token anew. A key that is not seen weighs nothing, so places have to hold finite numbers.

transformers' own functions make these masks, with each row's position in the place of the one that they count for all
rows. For a step the entries of `ALL_MASK_ATTENTION_FUNCTIONS` are exchanged; on other threads they call what they
stand for.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from ..patching.body import Unserved
from .rollout_cache import Decoding

__all__ = ["MaskedDecoding", "masks_of_rows"]

_TENSORS = ("eager", "sdpa")
"""The attentions that transformers makes tensors for, which say of each key whether it is seen."""


class MaskedDecoding(Decoding):
    """One token of each row on its way through a body whose own code attends.

    Attributes:
        written: [B] int32, the number of a row's keys before this token, which is the token's position.
    """

    written: torch.Tensor

    def seen(self) -> int:
        """Returns as many tokens as make all places the keys of the next one: code that counts keys shall count those
        of the mask. Positions are given apart; of code that takes them from here, the comparison with the model's own
        forward knows."""
        return self.longest - 1

    def masked_places(self) -> int:
        return self.longest

    def mask(self) -> torch.Tensor:
        """Returns which places hold the tokens of each row, [B, L] of zeros and ones, as `generate` says which ids of
        its prompts are no padding. A row that has ended sees its last token again, since a softmax over nothing is NaN.
        """
        places = torch.arange(self.longest, device=self.written.device)
        return (places <= self.written[:, None]).long()


_decoding: contextvars.ContextVar[MaskedDecoding | None] = contextvars.ContextVar("npu_kernels_masked", default=None)
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def masks_of_rows(decoding: MaskedDecoding) -> Iterator[None]:
    """Inside the `with` block masks that transformers makes on this thread are those of the rows' next tokens."""
    with _one_at_a_time:
        before = ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
        ALL_MASK_ATTENTION_FUNCTIONS._local_mapping = {
            name: functools.partial(_make, name, function) for name, function in ALL_MASK_ATTENTION_FUNCTIONS.items()
        }
        token = _decoding.set(decoding)
        try:
            yield
        finally:
            _decoding.reset(token)
            ALL_MASK_ATTENTION_FUNCTIONS._local_mapping = before


def _make(
    name: str, function: Callable[..., Any], *args: Any, mask_function: Callable[..., Any] = causal_mask_function,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Makes a mask, by the function of this name."""
    decoding = _decoding.get()
    if decoding is None:
        return function(*args, mask_function=mask_function, **kwargs)
    if name not in _TENSORS:
        raise Unserved(f"its own attention ({name}) takes no mask of each row")

    def of_rows(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, decoding.written[batch], key)

    return function(*args, mask_function=of_rows, **{**kwargs, "allow_is_causal_skip": False})
