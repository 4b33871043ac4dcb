"""Trains a small model under DDP and FSDP2 on the ranks that torchrun has started, with captured bodies and without.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.captured FILE CASE...

Rank 0 writes to FILE, per case: how far the parameters have moved without capture, how far those with captured bodies
are from them, and on each rank how many calls were replayed, and why others were not.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from npu_trainer_kernels import apply_npu_kernels
from tests.distributed.ranks import by_rank, compare_cases
from tests.distributed.run import Parameters, apart, whole
from tests.models import batch, small_model

STEPS = 4
CASES = {
    "ddp": [("kept",), ("unused parameters looked for",), ("checkpointed",)],
    "fsdp2": [("kept",), ("checkpointed",)],
}


def wrapped(model: Any, wrapper: str, case: str) -> Any:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=case.startswith("unused"))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(wrapper: str, case: str, capture: str) -> tuple[Parameters, Any]:
    """The parameters after some steps, the number of replays, and why calls were not replayed."""
    model: Any = small_model("llama", use_cache=False)
    if case == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step = wrapped(model, wrapper, case)
    kernels = apply_npu_kernels(model, backend="torch", capture=capture)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {name: value.chunk(2)[torch.distributed.get_rank()] for name, value in batch(rows=4).items()}
    for _ in range(STEPS):
        step(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            step(**inputs)  # evaluation between steps
    found = kernels.report().as_dict()["capture"] or {"replayed": 0, "reasons": {}}
    return whole(model), (found["replayed"], sorted(found["reasons"]))


def compared(wrapper: str, case: str) -> dict[str, Any]:
    start = dict(small_model("llama").named_parameters())
    eager, _ = trained(wrapper, case, "off")
    captured, replays = trained(wrapper, case, "on")
    return {"moved": apart(eager, start), "apart": apart(eager, captured), "ranks": by_rank(replays)}


if __name__ == "__main__":
    compare_cases(sys.argv[1], sys.argv[2:], CASES, compared)
