"""What a model gets: ops, padding left out, a captured body, rollouts; and what is lost of it on versions that were not
tested, or that serve less than another one by `evidence/families.json`.

- `small_family`: a small model of a family's default configuration.
- `look`: what a patched model gets, and what a family gets on the installed versions.
- `lost`: what a user's model loses, and what that is worth.
"""

from .look import look_at_family, look_at_model, served_of
from .lost import Losses, advice, installed_versions, losses_of, lost_between, worth_of

__all__ = [
    "Losses",
    "advice",
    "installed_versions",
    "look_at_family",
    "look_at_model",
    "losses_of",
    "lost_between",
    "served_of",
    "worth_of",
]
