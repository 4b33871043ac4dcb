"""Trains a small model under DDP and FSDP2 on the ranks that torchrun has started, with captured layers and without.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.captured FILE CASE...

Rank 0 writes to FILE, per case: how far the parameters have moved without capture, how far those with captured layers
are from them, and on each rank how many calls were replayed, and why others were not.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from npu_trainer_kernels import apply_npu_kernels
from tests.distributed.ranks import by_rank, compare_cases
from tests.distributed.run import Parameters, apart, whole
from tests.models import batch, small_model
from tests.patching.padded import of_torch

STEPS = 4
CASES = {
    "ddp": [("kept",), ("unused parameters looked for",), ("checkpointed",)],
    "fsdp2": [
        ("kept",), ("gathered",), ("in 16 bits",), ("checkpointed",), ("checkpointed, gathered",),
        ("checkpointed with hooks",), ("checkpointed with hooks, in 16 bits",), ("checkpointed by torch",),
    ],
}  # fmt: skip


@contextlib.contextmanager
def of_older_transformers() -> Iterator[None]:
    """Before 5.23 transformers' checkpoint repeats the call of a layer with its hooks (FSDP2's among them); since then
    it repeats its forward."""
    if "__call__" in vars(GradientCheckpointingLayer):
        yield
        return

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        function = functools.partial(nn.Module.__call__, layer, **kwargs)
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(function, *args)
        return function(*args)

    forward: Any = LlamaDecoderLayer.forward
    with (
        mock.patch.object(GradientCheckpointingLayer, "__call__", call),
        mock.patch.object(GradientCheckpointingLayer, "__init_subclass__", classmethod(lambda cls, **_: None)),
        mock.patch.object(LlamaDecoderLayer, "forward", forward.__wrapped__),
    ):
        yield


def wrapped(model: Any, wrapper: str, case: str) -> Any:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=case.startswith("unused"))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": "gathered" not in case}
    if "in 16 bits" in case:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def trained(wrapper: str, case: str, capture: str) -> tuple[Parameters, Any]:
    """The parameters after some steps, the number of replays, and why calls were not replayed."""
    model: Any = small_model("llama", use_cache=False)
    if case == "checkpointed by torch":
        of_torch(CheckpointImpl.NO_REENTRANT, "DecoderLayer")(model)
    elif case.startswith("checkpointed"):
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
    parameters = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in whole(model).items()}
    return parameters, (found["replayed"], sorted(found["reasons"]))


def compared(wrapper: str, case: str) -> dict[str, Any]:
    start = dict(small_model("llama").named_parameters())
    with of_older_transformers() if "with hooks" in case else contextlib.nullcontext():
        eager, _ = trained(wrapper, case, "off")
        captured, replays = trained(wrapper, case, "on")
    return {"moved": apart(eager, start), "apart": apart(eager, captured), "ranks": by_rank(replays)}


if __name__ == "__main__":
    compare_cases(sys.argv[1], sys.argv[2:], CASES, compared)
