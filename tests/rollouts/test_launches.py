"""The number of kernels of a captured step, for each layer."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_trainer_kernels import apply_npu_kernels, completions, serve_rollouts
from npu_trainer_kernels.ops import launch
from npu_trainer_kernels.ops.checks import values_unread
from npu_trainer_kernels.patching import call
from npu_trainer_kernels.rollouts import decode
from tests.conftest import DEVICE
from tests.models import small_model

from .common import greedy, prompts


class Kernels(TorchDispatchMode):
    """Counts what a device would launch: operators that compute something, and kernels of ours."""

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self._inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            name = func._schema.name.removeprefix("aten::")
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            # An operator without a tensor for a result (a promotion of dtypes) launches nothing either.
            views = not func._schema.is_mutable and all(t.untyped_storage()._cdata in given for t in made)
            if not views and not name.startswith(("empty", "new_empty")):
                self.found[name] += 1
        return out

    def launch(self, kernel, grid, args, constexprs):
        self.found[kernel.__name__] += 1
        self._inside = True
        try:
            launch._run(kernel, grid, args, constexprs)
        finally:
            self._inside = False


class Counted(Exception):
    """Ends a rollout when its step has been counted."""


def step_of(family, layers, monkeypatch, autocast=False, **overrides):
    """The kernels of one step of a model with so many layers, in bf16 or as TRL trains: fp32 weights under autocast."""
    kinds = Counter()

    def counted(step, inputs, parameters, fixed, recorder, known, watch):
        # As in a capture: ops do not stand aside, no check reads values, and autocast keeps no cast.
        with values_unread(), Kernels() as kernels, launch.use_launcher(kernels.launch):
            step()
        kinds.update(kernels.found)
        raise Counted

    model = small_model(family, num_hidden_layers=layers, **overrides).eval()
    model = model if autocast else model.to(torch.bfloat16)
    serve_rollouts(apply_npu_kernels(model, backend="triton"))
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patch.setattr(decode, "capture", counted)
        patch.setattr(call, "recording_now", lambda: True)
        with pytest.raises(Counted):
            completions(model, prompts(), greedy(4))
    return kinds


def per_layer(*args, **kwargs):
    more, fewer = (step_of(args[0], layers, *args[1:], **kwargs) for layers in (3, 2))
    return more - fewer


# Two norms of hidden states (one of them with the addition before it) and the gate, whose kernel has the same name; the
# other addition; four products; the preparation of a token; attention.
LAYER = {"_forward_kernel": 3, "add": 1, "mm": 4, "_prepare_kernel": 1, "_attend_kernel": 1}
# Autocast converts the two normed hidden states, which are fp32.
UNDER_AUTOCAST = {**LAYER, "_to_copy": 2}


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels are interpreted on the CPU alone")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_kernels_of_a_layer(family, autocast, monkeypatch):
    assert per_layer(family, monkeypatch, autocast=autocast) == (UNDER_AUTOCAST if autocast else LAYER)
