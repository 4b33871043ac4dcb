"""Ranks that a launcher has started, and that do not know of each other."""

import os
from collections.abc import Mapping

from transformers import TrainingArguments

__all__ = ["unconnected_ranks"]


def unconnected_ranks(args: TrainingArguments, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns on the first of a launcher's processes that each trains by itself, and what connects them; else None.

    On a machine without an accelerator, torchrun and `accelerate launch` start the ranks, but accelerate connects ranks
    on CPUs only if the Trainer is told to use the CPU.
    """
    started = int(environment.get("WORLD_SIZE", "1"))
    if started == 1 or args.world_size > 1 or environment.get("RANK", "0") != "0":
        return None
    return (
        f"{started} processes were started, and each of them trains the whole model by itself, into the same "
        "output_dir: there is no accelerator that connects them; --use_cpu (use_cpu=True) connects them on CPUs"
    )
