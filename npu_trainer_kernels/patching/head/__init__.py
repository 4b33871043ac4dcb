"""The LM head and the loss after it.

In training a patched head returns promised logits instead of logits:

1. `lm_head.py`: the patch of the head; its forward makes a `HeadCall` and a promise of its logits.
2. `head_call.py`: one call of the head keeps hidden states, weight and bias, and computes logits or a loss later.
3. `promise.py`: the tensor that stands for the logits. `promise_records.py` lists the PyTorch functions that it records
   (views, scaling, soft cap) and `cross_entropy`, which runs the fused op. Every other use computes the logits.
4. `trl_seam.py`: the second way in: TRL's trainers call one function of TRL's with hidden states and the head's weight.
5. `graphs.py`: under `torch.compile` the head and its loss stay outside of the graphs.
"""

from . import promise_records  # noqa: F401  sets `PromisedLogits.answer`
from .head_call import is_partitioned, labelled_rows
from .lm_head import LmHeadPatch, causal_lm, promised_by_teachers
from .promise import PromisedLogits
from .trl_seam import TrlHeadPatch

__all__ = [
    "LmHeadPatch",
    "PromisedLogits",
    "TrlHeadPatch",
    "causal_lm",
    "is_partitioned",
    "labelled_rows",
    "promised_by_teachers",
]
