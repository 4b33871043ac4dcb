"""Ranks that share a model have one seed, or are told of it. The ranks of this test are none: what they gather is said
here; `tests/distributed/tensor_parallel.py` has real ones."""

from types import SimpleNamespace

import pytest
import torch
from transformers.distributed import tensor_parallel as plans

from npu_trainer_kernels.training import seeds
from tests.models import small_model

MESH = SimpleNamespace(ndim=1, size=lambda: 2, get_group=lambda: None)


@pytest.mark.parametrize("of_next", [3, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_with_several_seeds_are_named(monkeypatch, of_next, sharded):
    def gather(found, seed, group):
        found[:] = [seed, of_next]

    monkeypatch.setattr(seeds.distributed, "all_gather_object", gather)
    model = small_model("llama")
    if sharded:
        plans.ALL_PARALLEL_STYLES["colwise_gather_output"].install_forward(model.lm_head, MESH)
    torch.manual_seed(3)
    said = seeds.differing_seeds(model)
    assert (said is None) == (not sharded or of_next == 3)
    if said is not None:
        assert said.startswith("the ranks that share this model have different seeds (3, 4), so that completions")
