"""Describes a training step (`Setup`) and the prediction of its memory (`Prediction`)."""

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["GIB", "SHARDINGS", "TRAINERS", "VARIANTS", "Prediction", "Setup"]

GIB = 1 << 30

TRAINERS = ("trainer", "sft", "grpo", "dpo", "distil")
"""transformers' Trainer, and TRL's for SFT, GRPO, DPO and distillation."""

_PROMPTED = ("grpo", "dpo", "distil")

SHARDINGS = ("none", "ddp", "fsdp2", "zero3")

VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "kernels": {},
    "kernels, tiled MLP": {"tiled_mlp": 8192},
}
"""The ways to run a step, fewest options first: the options of `apply_npu_kernels`; None: without kernels."""


@dataclass(frozen=True)
class Setup:
    """A training step of a model.

    Attributes:
        trainer: one of `TRAINERS`.
        batch: the sequences of a device's micro-batch (`per_device_train_batch_size`); in DPO pairs of sequences.
        length: the tokens of a sequence.
        prompt: the prompt tokens among them, which TRL's GRPO and DPO do not score.
        dtype: the dtype of the weights.
        autocast: the Trainer's `bf16`.
        variant: one of `VARIANTS`.
        checkpointing: the Trainer's `gradient_checkpointing`.
        lora: the rank of an adapter on all linear layers that is trained instead of the model; 0: the model is trained.
        sharding: one of `SHARDINGS`.
        devices: the number of devices over which the weights, or only the batch, are distributed.
        memory: the bytes of a device, by which the kernels choose the sizes of their chunks.
        find_unused: DDP's `find_unused_parameters`; None: as transformers' Trainer sets it.
        capture: whether bodies are captured (`capture="on"`), where the variant has kernels.
        rollouts: GRPO generates by captured steps, for so many micro-batches at a time (TRL's `steps_per_generation`);
            0: the memory of generation is not counted.
        teacher: the config of the teacher of `"distil"`.

    Raises:
        ValueError: a value that is not allowed, or one that has no effect with the others.
    """

    trainer: str = "sft"
    batch: int = 1
    length: int = 1024
    prompt: int = 0
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    variant: str = "plain"
    checkpointing: bool = False
    lora: int = 0
    sharding: str = "none"
    devices: int = 1
    memory: int = 80 * GIB
    find_unused: bool | None = None
    capture: bool = False
    rollouts: int = 0
    teacher: Any = None

    def __post_init__(self) -> None:
        for name, allowed in (("trainer", TRAINERS), ("sharding", SHARDINGS), ("variant", tuple(VARIANTS))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name, least in (("batch", 1), ("length", 2), ("prompt", 0), ("lora", 0), ("devices", 1), ("memory", 1),
                            ("rollouts", 0)):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")
        if self.prompt and self.trainer not in _PROMPTED:
            raise ValueError(
                f"prompt={self.prompt} has no effect with trainer={self.trainer!r}, which scores all tokens"
            )
        if self.prompt >= self.length:
            raise ValueError(f"prompt must be less than length={self.length}; got {self.prompt}")
        if (self.sharding == "none") != (self.devices == 1):
            raise ValueError(
                f"sharding must be 'none' on one device, and another one on several; got {self.sharding!r} "
                f"with devices={self.devices}"
            )
        if self.find_unused is not None and self.sharding != "ddp":
            raise ValueError(f"find_unused={self.find_unused} has no effect with sharding={self.sharding!r}")
        if VARIANTS[self.variant] is None and (self.capture or self.rollouts):
            raise ValueError(f"capture={self.capture} and rollouts={self.rollouts} need a variant with kernels; got "
                             f"{self.variant!r}")  # fmt: skip
        if self.capture and self.sharding != "none":
            raise ValueError(f"capture=True is modelled on one device alone; got sharding={self.sharding!r}")
        if self.rollouts and (self.trainer != "grpo" or not self.prompt):
            raise ValueError(
                f"rollouts={self.rollouts} needs trainer='grpo' and a prompt of at least 1 token; got "
                f"trainer={self.trainer!r} with prompt={self.prompt}"
            )
        if self.rollouts and self.sharding in ("fsdp2", "zero3"):
            raise ValueError(
                f"rollouts={self.rollouts} has no effect with sharding={self.sharding!r}, where generate's own loop "
                "runs"
            )
        if (self.teacher is None) == (self.trainer == "distil"):
            raise ValueError(
                f"teacher must be a config with trainer='distil', and None with others; got {self.teacher!r} with "
                f"trainer={self.trainer!r}"
            )

    @property
    def looks_for_unused(self) -> bool:
        """Whether DDP looks for parameters without a gradient. By the Trainer's rule it does if layers are not
        checkpointed, or if the model is not a transformers class, for example has an adapter around it."""
        return self.find_unused if self.find_unused is not None else not self.checkpointing or self.lora > 0

    @property
    def rows(self) -> int:
        """The number of sequences in a forward."""
        return self.batch * (2 if self.trainer == "dpo" else 1)

    @property
    def scored(self) -> int:
        """The number of tokens in a forward whose log-probability is computed."""
        return self.rows * (self.length - max(self.prompt, 1))


@dataclass(frozen=True)
class Prediction:
    """The peak memory of one device.

    Attributes:
        parts: the bytes at the peak, by `PARTS`.
        generation: the bytes at the peak of generation alone, by `PARTS`; empty if it is not counted.
    """

    parts: dict[str, int]
    generation: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes that are allocated at one time."""
        return sum(self.parts.values())
