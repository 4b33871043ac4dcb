"""Generates with weights that ranks hold parts of, on the ranks that torchrun has started.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.rollouts FILE {fsdp2,zero3}...

Rank 0 writes to FILE, per case: the number of rows (`moved`), how many of them have other tokens than the whole model
makes of each prompt alone (`apart`), and of each rank how many rollouts were made by captured steps, why others were
not, and whether weights are spread over ranks again.
"""

import contextlib
import copy
import sys
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from npu_trainer_kernels import apply_npu_kernels, serve_rollouts
from npu_trainer_kernels.rollouts import ranks
from tests.distributed.ranks import by_rank, compare_cases
from tests.models import batch, small_model
from tests.rollouts.common import alone, greedy, padded, prompts

from .run import ZERO3

CASES = {
    "fsdp2": [("whole",), ("in 16 bits",), ("lora",), ("trained",), ("another rank cannot",), ("no room",)],
    "zero3": [("gathered",), ("not gathered",)],
}


def _fsdp2(model: Any, case: str) -> Any:
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),))}
    if case == "in 16 bits":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _zero3(model: Any) -> Any:
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "train_batch_size": 8}
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**ZERO3, **sizes})[0]


def _lora(model: Any) -> Any:
    torch.manual_seed(3)
    made = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False))
    return made.eval()


def _step(model: Any, optimizer: Any) -> None:
    model.train()
    model(**batch(rows=4)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def compared(wrapper: str, case: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    model: Any = small_model("llama", use_cache=True).eval()
    plain: Any = small_model("llama", use_cache=True).eval()
    if case == "lora":
        model, plain = _lora(model), _lora(plain)
    given = prompts(seed=rank)
    # Ranks end after other numbers of tokens.
    config = greedy(12, eos_token_id=alone(plain, given, greedy(12))[rank][3 + 4 * rank])
    if case in ("another rank cannot", "no room", "not gathered"):
        config.eos_token_id = None  # `generate` itself would have ranks wait for others for ever
    asked = copy.deepcopy(config)
    if (case, rank) == ("another rank cannot", 1):
        asked.output_scores = asked.return_dict_in_generate = True
    step = _zero3(model) if wrapper == "zero3" else _fsdp2(model, case)
    kernels = apply_npu_kernels(model, backend="torch")
    rollouts = serve_rollouts(kernels, keep=True)
    assert rollouts is not None
    if case == "in 16 bits":
        plain = plain.to(torch.bfloat16)
        serve_rollouts(apply_npu_kernels(plain, backend="torch"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)] if case == "trained" else []
    around: Any = contextlib.nullcontext()
    if case == "gathered":
        from trl.models.utils import remove_hooks

        remove_hooks(step)
        around = sys.modules["deepspeed"].zero.GatheredParameters(model.parameters())
    room = 0 if case == "no room" and rank == 1 else None
    apart, rows = 0, 0
    for _ in range(1 if case == "gathered" else 2):
        with around, mock.patch.object(ranks, "free_bytes", return_value=room), torch.no_grad():
            found = model.generate(**padded(given), generation_config=asked)
        found = found if isinstance(found, torch.Tensor) else found.sequences
        width = max(map(len, given))
        if case == "in 16 bits":
            expected = plain.generate(**padded(given), generation_config=config)[:, width:].tolist()
        else:
            expected = alone(plain, given, config)
        for row, each in zip(found[:, width:].tolist(), expected, strict=True):
            apart += row[: len(each)] != each or any(row[len(each) :])
            rows += 1
        for each, optimizer in zip((model, plain), optimizers, strict=False):
            _step(each, optimizer)
    spread = all(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
    seen = rollouts.engine.rollouts, dict(rollouts.engine.reasons), spread, rollouts.engine.step is None
    return {"moved": float(rows), "apart": float(sum(by_rank(apart))), "ranks": by_rank(seen)}


if __name__ == "__main__":
    compare_cases(sys.argv[1], sys.argv[2:], CASES, compared)
