"""Predicts the peak memory of a training step and its parts, by running the step on tensors without memory.

1. `_setup`: the description of a step (`Setup`) and of a prediction (`Prediction`).
2. `_step`: runs the step as a trainer would; `_rollouts`: what the completions before it allocate.
3. `_ledger`: tracks every storage from its allocation until it is freed.
4. `_card` makes operators on the host allocate as on a card, `_graphs` captures bodies with a recorder that only
   counts, and `_sharding` adds the difference that several devices make.
5. `_search`: the largest micro-batch whose prediction fits.
"""

from ._ledger import PARTS
from ._search import largest_batch, most_tried
from ._setup import SHARDINGS, TRAINERS, VARIANTS, Prediction, Setup
from ._step import predict

__all__ = [
    "PARTS",
    "SHARDINGS",
    "TRAINERS",
    "VARIANTS",
    "Prediction",
    "Setup",
    "largest_batch",
    "most_tried",
    "predict",
]
