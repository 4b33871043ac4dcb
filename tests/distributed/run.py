"""Trains small models on the ranks that torchrun has started, in every case without and with the kernels.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.run FILE {ddp,fsdp2,zero3,by-hand}...

Rank 0 writes to FILE, per case: how far the parameters have moved without the kernels, how far those with the kernels
are from them, what wrapped the model, how often the fused head and loss ran, what has formed logits all the same, and
how often ranks have spoken in a step, and of how many bytes, without and with the kernels.
"""

import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments
from trl import GRPOConfig
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernels, NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.head import head_call
from tests.distributed.ranks import end_ranks, without_compiled_operators
from tests.models import batch, small_model
from tests.training.test_grpo import reward, tokenizer

# As `accelerate launch` sets it for `fsdp_version: 2`.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
# Every parameter is partitioned, also the small ones that it would keep whole by itself.
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
Parameters = dict[str, torch.Tensor]


def whole(model: nn.Module) -> Parameters:
    """The parameters, unsharded."""
    named = dict(model.named_parameters())
    with contextlib.ExitStack() as gathered:
        if any(hasattr(p, "ds_id") for p in named.values()):
            import deepspeed

            gathered.enter_context(deepspeed.zero.GatheredParameters(list(named.values())))
        return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named.items()}


class Fused:
    """Counts the calls of the fused head and loss that train: some rows are compared without gradients."""

    def __init__(self) -> None:
        self.calls = 0
        self.original = head_call.fused_linear_cross_entropy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += torch.is_grad_enabled()
        return self.original(*args, **kwargs)

    def since(self) -> int:
        calls, self.calls = self.calls, 0
        return calls


FUSED = Fused()
head_call.fused_linear_cross_entropy = FUSED


def formed(kernels: NpuKernels | None) -> list[str]:
    """What has formed logits, as the report says."""
    return [] if kernels is None else [d.reason for d in kernels.report().declined if d.reason.startswith("logits")]


def apart(a: Parameters, b: Parameters) -> float:
    """The largest difference."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


# ---------------------------------------------------------------------------------------------------------------------
# Trainers, wrapped by accelerate
# ---------------------------------------------------------------------------------------------------------------------


def on_ranks(args: TrainingArguments, wrapper: str) -> TrainingArguments:
    """Makes accelerate wrap as it would on accelerators: for ranks on CPUs it does not look for FSDP's settings
    (`AcceleratorState.__init__`), so they pass for ranks of another kind. Everything else stays on the CPU."""
    _ = args.device  # which sets the state up
    for name, value in FSDP2.items():
        if wrapper == "fsdp2":
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    if wrapper == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    if wrapper == "zero3":
        import deepspeed

        without_compiled_operators()
        deepspeed.init_distributed("gloo")
    return args


def train(folder: Path, task: str, wrapper: str, kernels: bool) -> tuple[Parameters, str]:
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "optim": "sgd",
        "learning_rate": 1e-1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.0, "seed": 3,
        "deepspeed": ZERO3 if wrapper == "zero3" else None,
    }  # fmt: skip
    if task != "sft":
        # Entropies of the whole batch: what no plan can know.
        common |= {"num_generations": 4, "max_completion_length": 6}
        common |= {"top_entropy_quantile": 0.5} if task == "grpo unplanned" else {}
    # The settings come before the model: under ZeRO-3 it is partitioned as it is loaded.
    args = on_ranks(TrainingArguments(**common) if task == "sft" else GRPOConfig(**common), wrapper)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    trainer: Trainer
    if task == "sft":
        data = batch(rows=24)
        rows = [{name: values[i].tolist() for name, values in data.items()} for i in range(24)]
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[NpuKernelsCallback()] if kernels else [])
    else:
        trainer = (GRPOTrainer if kernels else TrlGRPOTrainer)(
            model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["1+2=", "3+44=", "5+6=", "71+8="] * 4}),
            processing_class=tokenizer(),
        )
    trainer.train()
    wrapped = trainer.model_wrapped
    return whole(wrapped if wrapper == "fsdp2" else wrapped.module), type(wrapped).__name__


def trainers(folder: Path, wrapper: str) -> dict[str, Any]:
    """Tied embeddings where the plan serves GRPO under a wrapper that shards, untied elsewhere."""
    found = {}
    for task in ("sft", "grpo", "grpo unplanned"):
        start = small_model("qwen3", tie_word_embeddings=task == "grpo" and wrapper != "ddp")
        if PartialState().is_main_process:
            start.save_pretrained(folder)
        PartialState().wait_for_everyone()
        plain, _ = train(folder, task, wrapper, False)
        kernels, kind = train(folder, task, wrapper, True)
        moved = apart(plain, dict(start.named_parameters()))
        found[f"{task} {wrapper}"] = {
            "moved": moved, "apart": apart(plain, kernels), "wrapped": kind, "fused": FUSED.since(),
        }  # fmt: skip
    return found


# ---------------------------------------------------------------------------------------------------------------------
# A plain loop, sharded by hand
# ---------------------------------------------------------------------------------------------------------------------


def shard(model: Any, unit: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if unit == "own":
        # Tied weights may not be in two units.
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        fully_shard([model.model.embed_tokens, model.lm_head] if tied else model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True if unit == "resharded root" else None)


def loss_outside(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a trainer's own loss: after the model's forward, where FSDP2 may have given the head's weight away."""
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


class Collectives(TorchDispatchMode):
    """Counts the collectives inside the `with` block, and the bytes that they are handed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.calls += 1
            self.bytes += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        return function(*args, **(kwargs or {}))


def loop(
    tied: bool, head: str, unit: str | None = None, patch: str | None = None
) -> tuple[Parameters, list[str], list[int]]:
    """A few steps: the parameters, what has formed logits, and the collectives of the last step. `unit`: where the head
    is, sharded, or how DDP wraps; None: the whole batch on every rank, nothing sharded. With tied weights the layers
    are checkpointed, too."""
    model: Any = small_model("qwen3", tie_word_embeddings=tied)
    if tied:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if head == "trl":
        trl_utils.add_fused_lm_head(model)
    kernels = apply_npu_kernels(model, ops=PATCHES) if patch == "patched, then sharded" else None
    step = model
    if unit in DDP:
        step = nn.parallel.DistributedDataParallel(model, **{unit: True})
    elif unit is not None:
        shard(model, unit)
    if patch == "sharded, then patched":
        kernels = apply_npu_kernels(model, ops=PATCHES)
    inputs: dict[str, Any] = batch(rows=4)
    if unit is not None:
        inputs = {name: value.chunk(2)[torch.distributed.get_rank()] for name, value in inputs.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with Collectives() as sent:
            if head == "trl":
                with torch.no_grad():
                    model(**inputs, fused_lm_head=True)
                if (unit, tied) == ("own", False):
                    assert isinstance(model.lm_head.weight, DTensor), "the head's own unit was left unsharded"
                out = model(**inputs, fused_lm_head=True)
                # Not uniform, so not learned: backward forms the logits a second time.
                loss = -(out.log_probs * torch.linspace(0.5, 1.5, out.log_probs.shape[1])).sum() / out.label_mask.sum()
            elif head == "outside":
                loss = loss_outside(step(input_ids=inputs["input_ids"]).logits, inputs["labels"])
            else:
                loss = step(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if kernels is not None:
        kernels.restore()
    return whole(model), formed(kernels), [sent.calls, sent.bytes]


# What DDP has of its own to do with outputs: `nn.parallel.DistributedDataParallel(model, **{name: True})`.
DDP = ("find_unused_parameters", "static_graph")


def loops() -> dict[str, Any]:
    """Beside the unsharded model: where the head is its own unit, TRL's own gradient lacks the other ranks' tokens."""
    found = {}
    orders = ("patched, then sharded", "sharded, then patched")
    cases = [*itertools.product(("model's", "trl"), ("root", "own"), orders)]
    cases += [("outside", unit, orders[0]) for unit in ("root", "own", "resharded root", *DDP)]
    for tied in (False, True):
        start = dict(small_model("qwen3", tie_word_embeddings=tied).named_parameters())
        plain = {head: loop(tied, head)[0] for head in ("model's", "trl", "outside")}
        for head, unit, patch in cases:
            if tied and unit in DDP:
                continue  # DDP's hooks and checkpointed layers need each other's words
            name = f"{head} head, {'tied' if tied else 'untied'}, in {unit} unit, {patch}"
            FUSED.since()
            kernels, notes, sent = loop(tied, head, unit, patch)
            found[name] = {
                "moved": apart(plain[head], start), "apart": apart(plain[head], kernels),
                "fused": FUSED.since(), "formed": notes,
            }  # fmt: skip
            if patch == orders[0]:
                found[name]["sent"] = [loop(tied, head, unit)[2], sent]
    return found


def main(target: str, *cases: str) -> None:
    PartialState(cpu=True)
    found: dict[str, Any] = {}
    for case in cases:
        found |= loops() if case == "by-hand" else trainers(Path(target).with_suffix(""), case)
    if torch.distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
