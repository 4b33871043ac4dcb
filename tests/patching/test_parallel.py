"""What transformers' plans set on modules: which of it is known, served and put back. No ranks are needed for that."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from transformers.distributed import tensor_parallel as plans

from npu_trainer_kernels.patching.classes import subclass_with_forward
from npu_trainer_kernels.patching.parallel import (
    gathered_over,
    instead_of,
    mixes_tokens,
    plain_inside,
    serve_inside,
    serve_instead,
)
from npu_trainer_kernels.patching.undo import Undo

MESH = SimpleNamespace(ndim=1)


class OfOnesOwn(plans.ColwiseParallel):
    pass


def planned(style, module=None):
    style = plans.ALL_PARALLEL_STYLES[style] if isinstance(style, str) else style
    return style.install_forward(nn.Linear(4, 6) if module is None else module, MESH)


def wrapped():
    module = planned("colwise_gather_output")
    inner = module.forward
    module.forward = lambda x: 2 * inner(x)
    return module


def around_another():
    module = nn.Linear(4, 6)
    module.forward = lambda x: x
    return planned("colwise_gather_output", module)


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (lambda: planned("colwise_gather_output"), True),
        (lambda: planned("colwise_rep"), True),
        (lambda: planned("colwise"), False),
        (lambda: planned("rowwise"), False),
        (lambda: planned(plans.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())), False),
        (lambda: planned(plans.ColwiseParallel(output_layouts=Replicate(), use_local_output=False)), False),
        (lambda: planned(OfOnesOwn(output_layouts=Replicate())), False),
        (lambda: nn.Linear(4, 6), False),
        (wrapped, False),
        (around_another, False),
    ],
)
def test_a_head_whose_logits_a_plan_gathers(module, known):
    assert gathered_over(module()) is (MESH if known else None)


@pytest.mark.parametrize(
    ("style", "mixes"),
    [
        ("colwise", False),
        ("rowwise", False),
        ("moe_tp_experts", False),
        ("replicated_with_grad_allreduce", False),
        (plans.SequenceParallel(), True),
        (plans.RowwiseParallel(output_layouts=Shard(1)), True),
        (OfOnesOwn(), True),
    ],
)
def test_a_plan_that_may_split_sequences(style, mixes):
    # This one makes DTensors of parameters, for which there are no ranks here.
    module = nn.Identity() if isinstance(style, plans.SequenceParallel) else nn.Linear(4, 6)
    assert mixes_tokens(planned(style, module)) == ("its plan may split sequences" if mixes else None)


def test_what_others_have_set_may_do_anything():
    module = wrapped()
    assert "set on the instance" in mixes_tokens(module)
    assert not plain_inside(module)
    assert mixes_tokens(nn.Linear(4, 6)) is None


def ours(module):
    return subclass_with_forward(type(module), lambda self, x: x + 10 + self.eps)


def test_the_norm_inside_is_exchanged_and_put_back():
    """What the plan does around it stays: a gradient is still to be added up over the ranks."""
    module = planned("replicated_with_grad_allreduce", nn.RMSNorm(4, eps=0.5))
    forward, x, undo = module.forward, torch.ones(1, 4), Undo()
    before = module(x)
    assert plain_inside(module)
    serve_inside(module, ours(module), undo)
    serve_inside(module, ours(module), undo)
    assert module.forward is forward
    assert torch.equal(module(x), x + 10.5)
    assert module.weight._post_accumulate_grad_hooks
    assert plain_inside(module)
    undo.restore()
    assert torch.equal(module(x), before)
    assert plain_inside(module)


def test_a_head_is_served_in_place_of_its_plan_and_put_back():
    module = planned("colwise_gather_output")
    module.eps = 0.0
    forward, x, undo = module.forward, torch.ones(1, 4), Undo()
    serve_instead(module, ours(module), undo)
    assert instead_of(module) is forward
    assert gathered_over(module) is MESH
    assert torch.equal(module(x), x + 10)
    undo.restore()
    assert module.forward is forward


def test_no_record_keeps_a_module_alive():
    undo = Undo()
    head, norm = planned("colwise_gather_output"), planned("replicated_with_grad_allreduce", nn.RMSNorm(4))
    serve_instead(head, ours(head), undo)
    serve_inside(norm, ours(norm), undo)
    there = weakref.ref(head), weakref.ref(norm)
    del head, norm
    gc.collect()
    assert [each() for each in there] == [None, None]
    undo.restore()
