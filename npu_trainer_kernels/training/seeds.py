"""Ranks that share a model have to draw the same random numbers: completions that they generate, and what dropout
drops.

TRL's trainers that generate give every rank a seed of its own. Under tensor parallelism each rank then computes its
heads and columns for other tokens than the next rank does. Plain PyTorch adds these up without a word; kernels that
know how many tokens are live have different numbers of them to exchange.
"""

from typing import Any

import torch
from torch import distributed

from ..patching.head import causal_lm
from ..patching.parallel import gathered_over

__all__ = ["differing_seeds"]


def differing_seeds(model: Any) -> str | None:
    """What is wrong with the seeds of ranks that share a model, or None. All of these ranks have to ask."""
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
