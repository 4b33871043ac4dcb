"""Predicts the peak memory of a training step and its parts, by running the step on tensors without memory."""

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
