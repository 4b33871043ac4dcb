"""Models that transformers' tensor-parallel plans have split, without and with the kernels, on the ranks that torchrun
has started; and the head of a vocabulary that ranks share out (`head_slices.py`).

Usage: torchrun --nproc_per_node 2 -m tests.distributed.tensor_parallel FILE

Rank 0 writes to FILE, per model: how far its parameters have moved without the kernels and how far those with the
kernels are from them, what the ops have served and declined, and of a step without and with the kernels how often the
ranks gather and the most numbers that one hands to the others; and to unseen.json beside FILE the faults of
`head_slices.py` that were not seen.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # the kernels, too; nothing else is served by them on a CPU

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from trl import GRPOConfig
from trl import GRPOTrainer as TrlGRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from npu_trainer_kernels import GRPOTrainer, NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.ops.head import engine
from npu_trainer_kernels.training.seeds import differing_seeds
from tests.closeness import assert_as_close, rounded_if_needed
from tests.distributed.head_slices import Said, checked
from tests.distributed.ranks import by_rank, end_ranks
from tests.distributed.run import apart
from tests.models import batch, in_double, small_model
from tests.training.test_grpo import reward, tokenizer


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def forwards(model: Any) -> list[Any]:
    """What is called when modules are, down to what plans call inside."""
    found: list[Any] = []
    for module in model.modules():
        forward = vars(module).get("forward")
        cells = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
        found.append((type(module), forward, [c for c in cells if callable(c)]))
    return found


def loaded(folder: Path, dtype: torch.dtype = torch.float32, experts: int = 1) -> Any:
    config = DistributedConfig(tp_size=distributed.get_world_size(), ep_size=experts)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=dtype).train()


def saved(folder: Path, name: str, **overrides: Any) -> tuple[Path, Any]:
    """A small model in a folder that all ranks read from."""
    model = small_model(name, **overrides)
    if distributed.get_rank() == 0:
        model.save_pretrained(folder / name)
    distributed.barrier()
    return folder / name, model


def padded() -> dict[str, torch.Tensor]:
    given = batch(rows=4)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][1, 9:] = 0
    given["labels"][1, 9:] = -100
    return given


@contextlib.contextmanager
def patched(model: Any, kernels: bool) -> Iterator[Any]:
    """All ops, also those that models on a CPU do without; the forwards are what they were afterwards."""
    if not kernels:
        yield None
        return
    before = forwards(model)
    with apply_npu_kernels(model, ops=OPS) as handle:
        handle.refresh()
        yield handle
    assert forwards(model) == before


OPS = ("rms_norm", "add_rms_norm", "swiglu", "rope", "moe_experts", "varlen_attention", "linear_cross_entropy",
       "linear_logprob")  # fmt: skip


def by_hand(folder: Path, name: str, task: str, experts: int, kernels: bool) -> tuple[Any, Any, list[Any]]:
    """The parameters after three steps, the report, and what ranks have said in the last of them."""
    model, given = loaded(folder, experts=experts), padded()
    if task == "trl":
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with patched(model, kernels) as handle:
        for _ in range(3):
            with Said() as said:
                if task == "trl":
                    out = model(**given, fused_lm_head=True)
                    loss = out.loss + 0.01 * out.entropy.sum()
                else:
                    out = model(**given, use_cache=False)
                    loss = out.loss
                    if task == "logits":
                        # Somebody reads them, those of live tokens: they are formed after all.
                        live = given["attention_mask"].unsqueeze(-1)
                        loss = loss + 1e-3 * (out.logits.square() * live).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            model(**given)
        report = None if handle is None else handle.report()
    return parameters(model), report, said.calls


def models(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases = [
        ("llama", "labels", 1), ("llama-tied", "trl", 1), ("qwen3", "labels", 1), ("qwen3-moe", "labels", 1),
        ("qwen3-moe", "labels", 2), ("gemma2", "logits", 1),
    ]  # fmt: skip
    for name, task, experts in (case for case in cases if not names or " ".join(map(str, case)) in names):
        options = {"router_aux_loss_coef": 1.0, "experts_implementation": "grouped_mm"} if "moe" in name else {}
        path, start = saved(folder, name, **options)
        plain, _, before = by_hand(path, name, task, experts, False)
        ours, report, after = by_hand(path, name, task, experts, True)
        declined = [f"{d.op}: {d.reason}" for d in report.declined]
        mine = (apart(plain, dict(start.named_parameters())), apart(plain, ours), dict(report.ran), declined)
        moved, distance, ran, reasons = zip(*by_rank(mine), strict=True)
        assert (ran[0], reasons[0]) == (ran[1], reasons[1])
        found[f"{name} {task} {experts}"] = {
            "moved": min(moved), "apart": max(distance), "ran": ran[0], "declined": reasons[0],
            "gathers": [sum(kind == "allgather" for kind, _ in said) for said in (before, after)],
            "largest": [max(numbers for _, numbers in said) for said in (before, after)],
        }  # fmt: skip
    return found


def in_bf16(folder: Path) -> None:
    """Loss and gradients of a step, beside the model's own, and the truth of a whole model."""
    path, start = saved(folder, "llama-tied")
    given = padded()

    def outcome(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(**given, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(whole(p.grad) for p in model.parameters())]

    with in_double():
        exact = small_model("llama-tied").double()
        exact.load_state_dict({n: t.to(torch.bfloat16).double() for n, t in start.state_dict().items()})
        truth = outcome(exact)
    plain = outcome(loaded(path, torch.bfloat16))
    model = loaded(path, torch.bfloat16)
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as handle:
        ours = outcome(model)
        assert handle.report().ran == {"linear_cross_entropy": 1}
    # A rank that needs it computes the whole model, because rounding does not change DTensors.
    unsplit = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).train()
    moved = rounded_if_needed(lambda: outcome(unsplit))
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for i, (name, a, r, t) in enumerate(zip(names, ours, plain, truth, strict=True)):
        assert_as_close(a, r, t, name, moved(i))


def trainers(folder: Path) -> dict[str, Any]:
    """Trainer and TRL's GRPOTrainer, which has to draw the same completions on all ranks of a model."""
    found = {}
    for task in ("sft", "grpo"):
        path, start = saved(folder, "qwen3")
        plain, _ = trained(path, task, False)
        with mock.patch.object(engine, "_recomputed", wraps=engine._recomputed) as again:
            ours, ran = trained(path, task, True)
        found[task] = {
            "moved": apart(plain, dict(start.named_parameters())), "apart": max(by_rank(apart(plain, ours))),
            "ran": ran, "again": again.call_count,
        }  # fmt: skip
    return found


def trained(path: Path, task: str, kernels: bool) -> tuple[Any, Any]:
    common: dict[str, Any] = {
        "output_dir": str(path), "max_steps": 3, "per_device_train_batch_size": 4, "optim": "sgd",
        "learning_rate": 1e-1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "bf16": False, "max_grad_norm": 0.0, "seed": 3,
    }  # fmt: skip
    if task == "grpo":
        common |= {"num_generations": 4, "max_completion_length": 6, "gradient_checkpointing": False}
    args = TrainingArguments(**common) if task == "sft" else GRPOConfig(**common)
    _ = args.device  # which sets the state up
    # accelerate knows of tensor parallelism on accelerators alone; everything else stays on the CPU.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    model = loaded(path)
    trainer: Any
    if task == "sft":
        data = batch(rows=24)
        rows = [{name: values[i].tolist() for name, values in data.items()} for i in range(24)]
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[NpuKernelsCallback()] if kernels else [])
    else:
        prompts = Dataset.from_dict({"prompt": ["1+2=", "3+44=", "5+6=", "71+8="] * 4})
        trainer = (GRPOTrainer if kernels else TrlGRPOTrainer)(
            model, reward_funcs=reward, args=args, train_dataset=prompts, processing_class=tokenizer()
        )
    assert (differing_seeds(model) is None) == (task == "sft")
    set_seed(3)  # TRL has given each rank another one
    assert differing_seeds(model) is None
    trainer.train()
    found = parameters(model)
    handle = next((c.handle for c in trainer.callback_handler.callbacks if isinstance(c, NpuKernelsCallback)), None)
    return found, None if handle is None else dict(handle.report().ran)


def main(target: str, *names: str) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    PartialState(cpu=True)
    folder = Path(target).parent
    unseen = checked()
    found = models(folder, names)
    if not names:
        in_bf16(folder)
        found |= trainers(folder)
    if distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
        (folder / "unseen.json").write_text(json.dumps(unseen))
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
