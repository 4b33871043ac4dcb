"""How ranks begin, tell one another and end, of whatever has launched them."""

import gc
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

__all__ = ["by_rank", "compare_cases", "end_ranks", "without_compiled_operators"]


def without_compiled_operators() -> None:
    """DeepSpeed's operator for ranks that share memory would be compiled at its first use, which needs a C++ compiler
    and a minute; gloo does the same."""
    import deepspeed

    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))


def _start_ranks(wrappers: Iterable[str]) -> None:
    """On CPUs, with DeepSpeed where a wrapper's name begins with zero3."""
    PartialState(cpu=True)
    if any(wrapper.startswith("zero3") for wrapper in wrappers):
        import deepspeed

        without_compiled_operators()
        deepspeed.init_distributed("gloo")


def by_rank(value: Any) -> list[Any]:
    """Every rank's."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, value)
    return every


def end_ranks() -> None:
    """Ends the process group of this rank, if it has one; what was wrapped must not be referred to any more.

    gloo's threads live as long as a wrapped model does, and may hold tensors of Python. Without this, one process of
    twenty that left its interpreter aborted in them ("terminate called without an active exception"), with the kernels
    and without; PyTorch asks every script for the call.
    """
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def compare_cases(
    target: str, wrappers: Iterable[str], cases: Mapping[str, Iterable[tuple[Any, ...]]], compared: Callable[..., Any]
) -> None:
    """A program of ranks: `compared(wrapper, *case)` of each case of each wrapper, which rank 0 writes to a file."""
    wrappers = list(wrappers)
    _start_ranks(wrappers)
    found = {}
    for wrapper in wrappers:
        for case in cases[wrapper]:
            found[", ".join(map(str, (wrapper, *case)))] = compared(wrapper, *case)
    if torch.distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    end_ranks()
