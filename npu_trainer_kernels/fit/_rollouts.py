"""Holds what a rollout allocates: the engine's own cache, rows and copies, made of tensors without memory.

All of it is given back before the update, unless `serve_rollouts(keep=True)` keeps it.
"""

from typing import Any

import torch

from ..patching.head import causal_lm
from ..rollouts import (
    AT_ONCE,
    RolloutCache,
    Rows,
    Sampling,
    Weights,
    arguments_of,
    cache_name,
    logits_of,
    places_for,
)
from ._ledger import Ledger
from ._setup import Setup

__all__ = ["generate"]


def generate(model: Any, setup: Setup, ledger: Ledger) -> None:
    """Allocates what the completions of one rollout need, in the engine's order, and frees it.

    TRL draws with temperature, without other processors. Every row counts as if it had a prompt of its own.

    Raises:
        Unserved: the model writes to its cache in a way that the engine does not serve.
    """
    rows, completion = setup.rows * setup.rollouts, setup.length - setup.prompt
    trains, checkpoints = model.training, [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in checkpoints:
        module.gradient_checkpointing = False  # TRL switches it off while it generates
    model.eval()
    try:
        with torch.no_grad(), ledger.within("rollouts"):
            _rollout(causal_lm(model)[1], setup, ledger, rows, completion)
    finally:
        model.train(trains)
        for module in checkpoints:
            module.gradient_checkpointing = True


def _rollout(model: Any, setup: Setup, ledger: Ledger, rows: int, completion: int) -> None:
    cache, copies = RolloutCache(model), Weights()
    at_once = max(1, min(rows, AT_ONCE // setup.prompt))
    names, tokens = arguments_of(model), at_once * setup.prompt
    given: dict[str, Any] = {
        "input_ids": torch.empty(1, tokens, dtype=torch.long),
        "position_ids": torch.empty(1, tokens, dtype=torch.long),
    }
    given.update((name, torch.empty(at_once, dtype=torch.long)) for name in names if name.endswith("logits_to_keep"))
    with copies.looking(model), ledger.within("activations"):
        out = model(**given, **{cache_name(names): cache}, use_cache=True, return_dict=True)
    assert copies.uses is not None
    copies.make(model, copies.uses, (setup.memory - ledger.total) // 4)
    logits = logits_of(out)[0, -at_once:]
    vocabulary, dtype = logits.shape[-1], logits.dtype
    found = logits.float()
    del out, logits
    cache.next_prompt()
    length = places_for(setup.length)
    # The caches get half of the free memory at most. One row is counted in any case: a model without room for one row
    # does not fit.
    rows = max(1, min(rows, cache.rows_in(length, (setup.memory - ledger.total) // 2)))
    cache.allocate(rows, length)
    state = Rows.make(rows, completion, Sampling(True, eos=(0,)), vocabulary, False, torch.device("cpu"))
    first = found.new_zeros(rows, vocabulary)
    # The graph's own logits, and what is made of them when a token is chosen.
    last = torch.empty(rows, vocabulary, dtype=dtype).float()
    state.choose(last, state.alive.clone(), Sampling(True, eos=(0,)))
    del first, last
