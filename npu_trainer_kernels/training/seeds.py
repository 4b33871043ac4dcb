"""Ranks that share a model must draw the same random numbers, for completions that they generate and for dropout.

TRL's trainers that generate give every rank a seed of its own. Under tensor parallelism each rank then computes its
heads and columns for other tokens than the next rank does. Plain PyTorch adds these up without an error; kernels that
skip padding exchange tensors of different lengths.
"""

from typing import Any

import torch
from torch import distributed

from ..patching.head import causal_lm
from ..patching.parallel import gathered_over

__all__ = ["differing_seeds"]


def differing_seeds(model: Any) -> str | None:
    """Returns how the seeds of ranks that share a model differ, or None. All of these ranks must call it."""
    owner = causal_lm(model)[1]
    mesh = None if owner is None else gathered_over(owner.get_output_embeddings())
    if mesh is None:
        return None
    seeds: list[Any] = [None] * mesh.size()
    distributed.all_gather_object(seeds, torch.initial_seed(), group=mesh.get_group())
    if len(set(seeds)) == 1:
        return None
    return (
        f"the ranks that share this model have different seeds ({', '.join(map(str, seeds))}), so that completions and "
        "dropout differ between them, and the run may stop in an error of a collective or wait forever; call "
        "accelerate.utils.set_seed(args.seed) on all of them before train()"
    )
