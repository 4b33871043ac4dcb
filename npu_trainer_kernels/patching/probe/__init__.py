"""Finds out what a module computes. Nothing here depends on an op or a kind of module.

1. `agreement.py`: whether two functions have the same values and gradients.
2. `source.py`: the source of the code that runs, the parts of it that no small probe covers, and functions made from it
   with one expression exchanged; `wrappers.py`: the decorators around such a function.
3. `settings.py`: the numbers, names and functions that a module's code reads, and whether they have changed since.
4. `miniature.py`: a tiny model of a class, from the configuration of a large one.
5. `traces.py`: whether a run of code may leave a trace, so that it must not be run to find anything out.
6. `kept_state.py`: puts back what a look has changed.
"""

from .agreement import MODES, agree, repeatable
from .kept_state import kept_state, remembered
from .miniature import VOCABULARY, miniature, miniature_around, small_config
from .settings import Settings, changed, replaced_functions, settings_of, unseen
from .source import beyond_one_run, called_on_self, plain_forward, rewritten_forward, self_attribute, source_of
from .traces import TRACE, trace_of, trace_of_all, trace_of_class, trace_of_function, trace_of_operators, traces_within

__all__ = [
    "MODES",
    "TRACE",
    "VOCABULARY",
    "Settings",
    "agree",
    "beyond_one_run",
    "called_on_self",
    "changed",
    "kept_state",
    "miniature",
    "miniature_around",
    "plain_forward",
    "remembered",
    "repeatable",
    "replaced_functions",
    "rewritten_forward",
    "self_attribute",
    "settings_of",
    "small_config",
    "source_of",
    "trace_of",
    "trace_of_all",
    "trace_of_class",
    "trace_of_function",
    "trace_of_operators",
    "traces_within",
    "unseen",
]
