"""Finds out what a module computes. Nothing here depends on an op or a kind of module.

1. `agreement.py`: whether two functions have the same values and gradients.
2. `source.py`: the source of the code that runs, the parts of it that no small probe covers, and functions made from it
   with one expression exchanged; `wrappers.py`: the decorators around such a function.
3. `settings.py`: the numbers, names and functions that a module's code reads, and whether they have changed since.
4. `miniature.py`: a tiny model of a class, from the configuration of a large one.
"""

from .agreement import MODES, agree, repeatable
from .miniature import VOCABULARY, miniature, miniature_around, small_config
from .settings import Settings, changed, settings_of, unseen
from .source import beyond_one_run, called_on_self, plain_forward, rewritten_forward, self_attribute, source_of

__all__ = [
    "MODES",
    "VOCABULARY",
    "Settings",
    "agree",
    "beyond_one_run",
    "called_on_self",
    "changed",
    "miniature",
    "miniature_around",
    "plain_forward",
    "repeatable",
    "rewritten_forward",
    "self_attribute",
    "settings_of",
    "small_config",
    "source_of",
    "unseen",
]
