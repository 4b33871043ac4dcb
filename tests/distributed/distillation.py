"""Distillation on the ranks that torchrun has started, without and with the kernels: under DDP and FSDP2, where
each rank counts labels of its own, and with heads whose vocabulary ranks share out by transformers' tensor-parallel
plans.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.distillation FILE

Rank 0 writes to FILE, per case: how far the parameters have moved without the kernels, how far those with the kernels
are from them, how many calls the op has served, and what the ops of heads have declined.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from trl import DistillationConfig
from trl.trainer import distillation_trainer

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.training import distillation
from tests.distributed.ranks import by_rank, end_ranks
from tests.distributed.run import apart, on_ranks, whole
from tests.models import small_model
from tests.training.test_distillation import Given
from tests.training.test_gkd import KINDS, MESSAGES, tokens
from tests.training.test_grpo import tokenizer

# Of the models, whose head's vocabulary ranks share.
BOTH, STUDENT = ("student", "teacher"), ("student",)
# The student's parameters are sharded, and ranks have other tokens.
FSDP2 = ("fsdp2",)
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "distillation, DDP": ("distillation", (), {"beta": 0.25, "temperature": 1.5}),
    "distillation, DDP, micro-batches": ("distillation", (), {"beta": 1.0, "gradient_accumulation_steps": 2}),
    "gkd, DDP": ("gkd", (), {"beta": 0.5, "gradient_accumulation_steps": 2}),
    "iw-opd, DDP, some tokens": ("iw-opd", (), {"distillation_objective": "jsd", "beta": 0.25, "loss_top_k": 3}),
    "distillation, FSDP2": ("distillation", FSDP2, {"beta": 0.25}),
    "gkd, FSDP2": ("gkd", FSDP2, {"beta": 0.5}),
    "gkd, both shared": ("gkd", BOTH, {"beta": 0.25}),
    "gkd, forward KL, both shared": ("gkd", BOTH, {"beta": 0.0}),
    "gkd, the student's shared": ("gkd", STUDENT, {"beta": 1.0}),
    "iw-opd, some tokens, both shared": (
        "iw-opd", BOTH, {"distillation_objective": "jsd", "beta": 0.25, "loss_top_k": 3}),
}  # fmt: skip


class Uneven(Given):
    """Its rollouts are of other lengths on each rank."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rank = distributed.get_rank()
        return [[4 + (i * 7 + j * 3) % 12 for j in range(1 + (i + 2 * rank) % 4)] for i in range(len(prompt_ids))]


def loaded(folder: Path, shared: bool) -> Any:
    config = {"distributed_config": DistributedConfig(tp_size=distributed.get_world_size())} if shared else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config)


def trained(folder: Path, kind: str, shared: tuple[str, ...], options: dict[str, Any], kernels: bool) -> Any:
    common: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 2, "report_to": "none", "use_cpu": True, "bf16": False,
        "save_strategy": "no", "optim": "sgd", "learning_rate": 1.0, "disable_tqdm": True, "seed": 3,
        "max_grad_norm": 0.0, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    cls, config = (Uneven, DistillationConfig) if kind == "distillation" else KINDS[kind]
    if kind == "distillation":
        common |= {"max_completion_length": 6}
        words, data = tokenizer(), Dataset.from_dict({"prompt": ["12", "345", "6", "78901"] * 8})
    else:
        common |= {"lmbda": 0.0, "max_length": 32} | ({} if kind == "gkd" else {"max_completion_length": 16})
        words, data = tokens(), Dataset.from_dict({"messages": MESSAGES})
    args = config(str(folder / f"out{distributed.get_rank()}"), **common)
    on_ranks(args, "fsdp2" if shared == FSDP2 else "ddp")
    if shared:
        # accelerate knows of tensor parallelism on accelerators alone; everything else stays on the CPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    models = [loaded(folder / name, name in shared) for name in ("student", "teacher")]
    callback = NpuKernelsCallback(audit="off")
    trainer = cls(
        *models, args=args, train_dataset=data, processing_class=words, callbacks=[callback] if kernels else []
    )
    set_seed(3)
    trainer.train()
    assert type(trainer.model_wrapped).__name__.startswith("FSDP") == (shared == FSDP2)
    report = callback.report() if kernels else None
    return whole(trainer.model_wrapped if shared == FSDP2 else trainer.model), report


def of_shared_weights() -> None:
    """Raises unless TRL's function, as this package replaces it, does with weights that ranks share what TRL's own does
    with whole ones: the value, and the gradients of hidden states and of this rank's rows."""
    drawn = torch.Generator().manual_seed(3)
    x, its_x = (torch.randn(2, 7, size, generator=drawn) for size in (24, 8))
    weights = [torch.randn(101, size, generator=drawn) for size in (24, 8)]
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]])
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    trls = distillation_trainer._chunked_divergence_loss
    site = distillation.Site("linear_divergence", Given, (), None)

    def outcome(function: Any, shared: bool) -> list[torch.Tensor]:
        mine = x.clone().requires_grad_()
        w, its_w = (distribute_tensor(t, mesh, [Shard(0)]) if shared else t.clone() for t in weights)
        w.requires_grad_()
        loss, entropy, count = function(mine, its_x, w, its_w, mask, 0.25, temperature=1.5)
        loss.backward()
        return [loss, entropy, count, mine.grad, w.grad.full_tensor() if shared else w.grad]

    torch.testing.assert_close(
        outcome(functools.partial(distillation._divergence_loss, site, trls), True), outcome(trls, False)
    )
    assert site.ran == 1


def main(target: str, *names: str) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    PartialState(cpu=True)
    folder = Path(target).parent
    start = {"student": small_model("qwen3"), "teacher": small_model("llama", hidden_size=64, intermediate_size=40)}
    for name, model in start.items():
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(8)  # distributions that differ
        if distributed.get_rank() == 0:
            model.save_pretrained(folder / name)
            tokens().save_pretrained(folder / name)
    distributed.barrier()
    of_shared_weights()
    found = {}
    for name in names or CASES:
        kind, shared, options = CASES[name]
        plain, _ = trained(folder, kind, shared, options, False)
        ours, report = trained(folder, kind, shared, options, True)
        declined = [f"{d.op}: {d.reason}" for d in report.declined if d.op.startswith("linear")]
        first = dict(start["student"].named_parameters())
        mine = apart(plain, first), apart(plain, ours), report.ran.get("linear_divergence"), declined
        moved, distance, ran, reasons = zip(*by_rank(mine), strict=True)
        assert (ran[0], reasons[0]) == (ran[1], reasons[1])
        found[name] = {"moved": min(moved), "apart": max(distance), "ran": ran[0], "declined": reasons[0]}
    if distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
