"""Trains a small mixture of experts under transformers' expert parallelism, on the ranks that torchrun has started,
without the kernels and with its experts replaced.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.experts FILE {all_to_all,all_reduce,auto}...

Each rank has half of the experts. Where ranks exchange rows they have batches of their own; where they add up results
they have the same one, and the rows of the other rank's experts have no expert here. Rank 0 writes to FILE, per way:
how far the parameters have moved without the kernels, how far those with the kernels are from them, how often each
rank's experts were the op's, and what it has declined.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.support.foreign import at_least
from tests.distributed.ranks import by_rank, end_ranks
from tests.distributed.run import Parameters, apart, whole
from tests.models import batch, small_model

STEPS = 3


def trained(way: str, kernels: bool) -> tuple[Parameters, Any]:
    """The parameters after some steps, with a forward without gradients before each; and the report."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model: Any = small_model("qwen3-moe", output_router_logits=False, experts_implementation="grouped_mm")
    experts = init_device_mesh("cpu", (ranks,))
    same = experts if way == "all_reduce" else init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))["tp"]
    plan = {}
    for path in (f"model.layers.{i}.mlp.experts" for i in range(2)):
        plan.update({f"{path}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")})
        plan[path] = "ep_dispatch_experts"
    named = [way] if at_least("transformers", "5.23") else []  # before, ranks exchange rows, and that has no name
    apply_expert_parallelism(model, experts, same, plan, *named)
    before = [type(module) for module in model.modules()]
    handle = apply_npu_kernels(model, ops=["moe_experts"]) if kernels else None
    if handle is not None:
        handle.refresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    inputs = batch(rows=4)
    if way != "all_reduce":
        inputs = {name: value.chunk(ranks)[rank] for name, value in inputs.items()}
    for _ in range(STEPS):
        with torch.no_grad():
            model(**inputs)
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = None
    if handle is not None:
        report = handle.report()
        ran = report.ran["moe_experts"]
        handle.restore()
        assert [type(module) for module in model.modules()] == before
        model(**inputs)
        assert report.ran["moe_experts"] == ran, "the op ran after restore"
    return whole(model), report


def main(target: str, *ways: str) -> None:
    PartialState(cpu=True)
    found = {}
    for way in ways:
        start = dict(small_model("qwen3-moe").named_parameters())
        plain, _ = trained(way, False)
        ours, report = trained(way, True)
        mine = (apart(plain, start), apart(plain, ours), report.ran["moe_experts"], [d.reason for d in report.declined])
        moved, distance, served, declined = zip(*by_rank(mine), strict=True)
        found[way] = {"moved": min(moved), "apart": max(distance), "served": served, "declined": declined}
    if torch.distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
