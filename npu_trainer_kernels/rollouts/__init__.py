"""Generates the completions of a training run on the device, with the weights that it trains.

- `engine`: one rollout, from prompts to tokens.
- `cache`: keys and values at fixed places, and attention to them.
- `masked`: masks of rows, for models whose own code attends.
- `decode`: the captured step; `on_device`: what its code would make on the host.
- `sampling`: transformers' logits processors as a part of it.
- `weights`: copies in the dtype that autocast casts to.
- `trial`: the comparison with the model's own forward.
- `serve`: puts the engine in the place of `generate`'s loop.
"""

from .serve import Rollouts, completions, serve_rollouts

__all__ = ["Rollouts", "completions", "serve_rollouts"]
