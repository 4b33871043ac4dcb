"""Trains a small model on the ranks that torchrun has started, without the kernels, and with its MLPs over slices.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.tiled FILE WRAPPER...

Rank 0 writes to FILE, per case: how far the parameters have moved without the kernels, how far those with the kernels
are from them, and on each rank how many calls ran in slices, why others did not, and the most often that a parameter's
gradient was added up in one backward.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from npu_trainer_kernels import apply_npu_kernels
from tests.distributed.ranks import by_rank, compare_cases
from tests.distributed.run import ZERO3, Parameters, apart, whole
from tests.models import batch, small_model

STEPS = 2
# wrapper -> when the kernels are applied, and how layers are checkpointed (None: not, else whether reentrant).
CASES: dict[str, list[tuple[str, bool | None]]] = {
    "ddp": [("before", None), ("before", False), ("before", True)],
    "fsdp2": [("before", None), ("after", False), ("before", True)],
    "fsdp2, MLPs": [("before", False), ("after", None)],
    "fsdp2, projections": [("after", False)],
    "zero3": [("before", None)],
    "zero3, MLPs whole": [("before", None), ("after", False), ("before", True)],
}


def wrapped(model: Any, wrapper: str) -> Any:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper.startswith("zero3"):
        import deepspeed

        if wrapper.endswith("whole"):
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 4}
        return deepspeed.initialize(model=model, optimizer=optimizer, config={**ZERO3, **sizes})[0]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        if wrapper.endswith("MLPs"):
            fully_shard(layer.mlp, mesh=mesh)
        if wrapper.endswith("projections"):
            for projection in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                fully_shard(projection, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(wrapper: str, patch: str | None, reentrant: bool | None) -> tuple[Parameters, Any]:
    """The parameters after some steps; and of the MLPs in slices how many calls, why others were not, and how often a
    gradient came."""
    model: Any = small_model("llama")
    zero3 = wrapper.startswith("zero3")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    kernels = apply_npu_kernels(model, ops=["swiglu"], tiled_mlp=5) if patch == "before" else None
    step = wrapped(model, wrapper)
    if patch == "after":
        kernels = apply_npu_kernels(model, ops=["swiglu"], tiled_mlp=5)
    optimizer = step if zero3 else torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {name: value.chunk(2)[torch.distributed.get_rank()] for name, value in batch(rows=4).items()}
    came: Counter[str] = Counter()
    if wrapper == "ddp":
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.update([name]))
    for _ in range(STEPS):
        loss = step(**inputs).loss
        (step.backward if zero3 else torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
    if kernels is None:
        return whole(model), None
    (progress,) = (site.progress for site in kernels.report().sites)
    return whole(model), (progress.ran, dict(progress.whole), sorted(set(came.values())))


def compared(wrapper: str, patch: str, reentrant: bool | None) -> dict[str, Any]:
    start = dict(small_model("llama").named_parameters())
    plain, _ = trained(wrapper, None, reentrant)
    ours, mine = trained(wrapper, patch, reentrant)
    return {"moved": apart(plain, start), "apart": apart(plain, ours), "ranks": by_rank(mine)}


if __name__ == "__main__":
    compare_cases(sys.argv[1], sys.argv[2:], CASES, compared)
