"""Generates the completions of a training run on the device, with the weights that it trains.

- `rollout_engine`: what generates for one model, and what it remembers; `turns`: one rollout, from prompts to tokens.
- `rollout_cache`: keys and values at fixed places, and attention to them.
- `masked`: masks of rows, for models whose own code attends.
- `decode`: the captured step; `on_device`: what its code would make on the host.
- `sampling`: transformers' logits processors as a part of it.
- `weights`: copies in the dtype that autocast casts to.
- `model_state`: what decides how the model's code makes a token; `other_code`: what a captured step would leave out.
- `generators`: random states; `outputs`: caches that are handed in or returned.
- `logits_trial`: the comparison with the model's own forward.
- `ranks`: weights that ranks hold parts of, whole for the length of a rollout.
- `serve`: puts the engine in the place of `generate`'s loop.
"""

from .decode import Rows, arguments_of, cache_name, logits_of
from .rollout_cache import RolloutCache, places_for
from .sampling import Sampling
from .serve import Rollouts, completions, serve_rollouts
from .turns import AT_ONCE
from .weights import Weights

__all__ = [
    "AT_ONCE",
    "RolloutCache",
    "Rollouts",
    "Rows",
    "Sampling",
    "Weights",
    "arguments_of",
    "cache_name",
    "completions",
    "logits_of",
    "places_for",
    "serve_rollouts",
]
