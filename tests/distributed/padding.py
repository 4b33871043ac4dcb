"""Trains small models on padded batches, on the ranks that torchrun has started, without and with a packed body; the
one with experts also with its experts replaced, of which each rank's rows choose others.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.padding FILE {ddp,fsdp2,zero3}[, experts]...

The ranks' batches have other numbers of live tokens, and in every second step one of them has no padding. Rank 0 writes
to FILE, per case: how far the parameters have moved without the kernels, how far those with the kernels are from them,
how often each rank's body was handed live tokens alone, how often its experts were the op's, and what it has declined.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from npu_trainer_kernels import apply_npu_kernels
from tests.distributed.ranks import by_rank, compare_cases
from tests.distributed.run import ZERO3, Parameters, apart, whole
from tests.models import SMALL, small_model

STEPS = 3
# wrapper -> when the kernels are applied, and how layers are checkpointed (None: not, else whether reentrant).
CASES: dict[str, list[tuple[str, bool | None]]] = {
    "ddp": [("before", None), ("before", False), ("before", True)],
    "fsdp2": [("before", None), ("after", None), ("before", True), ("after", False)],
    "fsdp2, kept": [("after", None)],
    "zero3": [("before", None), ("after", None), ("before", False), ("after", True)],
    "ddp, experts": [("before", None), ("before", True)],
    "fsdp2, experts": [("before", None), ("after", None), ("before", True), ("after", False)],
    "zero3, experts": [("before", None), ("after", None), ("before", False), ("after", True)],
}
OPS = ("varlen_attention", "moe_experts")


def made(wrapper: str) -> Any:
    """With experts a token routed by rounding alone would go another way: there are none in these steps."""
    if wrapper.endswith("experts"):
        return small_model("qwen3-moe", router_aux_loss_coef=1.0, experts_implementation="grouped_mm")
    return small_model("llama")


def padded(step: int, rank: int) -> dict[str, Any]:
    """Rows that begin alike; the second rank's have more padding, or none at all."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    ids = torch.randint(3, SMALL["vocab_size"], (4, 19), generator=generator)
    ids[:, :9] = ids[0, :9]
    mask = torch.zeros_like(ids)
    for row, (begin, end) in enumerate(((2, 19), (2, 14), (2, 11), (5, 19)) if rank == 0 else ((7, 9), (7, 17)) * 2):
        mask[row, begin:end] = 1
    if rank == 1 and step % 2 == 0:
        mask = torch.ones_like(mask)
        ids[:, 0] = torch.arange(3, 7)  # nothing to share either
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :8] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def wrapped(model: Any, wrapper: str) -> Any:
    wrapper = wrapper.removesuffix(", experts")
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "zero3":
        import deepspeed

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "train_batch_size": 8}
        return deepspeed.initialize(model=model, optimizer=optimizer, config={**ZERO3, **sizes})[0]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=wrapper == "fsdp2")
    fully_shard(model, mesh=mesh)
    return model


def trained(wrapper: str, patch: str | None, reentrant: bool | None) -> tuple[Parameters, Any]:
    """The parameters after some steps, with a forward that scores before each of them; and the report."""
    model, zero3 = made(wrapper), wrapper.startswith("zero3")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    kernels = apply_npu_kernels(model, ops=OPS) if patch == "before" else None
    step = wrapped(model, wrapper)
    if patch == "after":
        kernels = apply_npu_kernels(model, ops=OPS)
    optimizer = step if zero3 else torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(STEPS):
        batch = padded(i, torch.distributed.get_rank())
        with torch.no_grad():
            step(**batch)
        loss = step(**batch).loss
        (step.backward if zero3 else torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), None if kernels is None else kernels.report()


def compared(wrapper: str, patch: str, reentrant: bool | None) -> dict[str, Any]:
    start = dict(made(wrapper).named_parameters())
    plain, _ = trained(wrapper, None, reentrant)
    ours, report = trained(wrapper, patch, reentrant)
    mine = (*(report.ran.get(op, 0) for op in OPS), [d.reason for d in report.declined])
    ranks = by_rank(mine)
    return {
        "moved": apart(plain, start), "apart": apart(plain, ours),
        "served": [served for served, *_ in ranks], "experts": [experts for _, experts, _ in ranks],
        "declined": [reasons for *_, reasons in ranks],
    }  # fmt: skip


if __name__ == "__main__":
    compare_cases(sys.argv[1], sys.argv[2:], CASES, compared)
