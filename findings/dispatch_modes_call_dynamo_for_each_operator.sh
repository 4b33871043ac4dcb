#!/usr/bin/env bash
# Guess: an operator under a TorchDispatchMode costs one call of Python more, that of the mode's `__torch_dispatch__`.
# Seen with torch 2.13.0: the class of a mode has its method wrapped by `torch._disable_dynamo` when it is made, so that four
# of the nine functions that run for one operator are of `torch._compile`, `torch._dynamo.eval_frame` and `torch.compiler`,
# also where nothing is compiled. A mode whose class method `_should_skip_dynamo` returns False is not wrapped.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Wrapped(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Bare(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def calls(mode):
    """The modules whose functions run for one operator, each with the number of calls."""
    x, found = torch.ones(2), Counter()

    def see(frame, event, arg):
        if event == "call":
            found[frame.f_globals["__name__"]] += 1

    with mode():
        torch.add(x, x)  # what happens once has happened
        sys.setprofile(see)
        torch.add(x, x)
        sys.setprofile(None)
    return found


found = {mode.__name__: calls(mode) for mode in (Wrapped, Bare)}
for name, of in found.items():
    print(torch.__version__, name, sum(of.values()), "calls:", dict(of))
dynamo = {name: sum(n for module, n in of.items() if module.startswith(("torch._dynamo", "torch._compile", "torch.compiler")))
          for name, of in found.items()}
assert dynamo == {"Wrapped": 4, "Bare": 0}, f"no longer as described: {dynamo}"
PYTHON
