"""Will it fit? The peak memory of a training step, from a step on tensors without memory."""

from ._ledger import PARTS
from ._step import TRAINERS, Prediction, Setup, predict

__all__ = ["PARTS", "TRAINERS", "Prediction", "Setup", "predict"]
