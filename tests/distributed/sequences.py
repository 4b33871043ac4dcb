"""Trains a small model on rows that are spread over the ranks that torchrun has started, without the kernels and with.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.sequences FILE CASE...

Each rank has a part of the columns of every row: DeepSpeed's Ulysses gives the first half to the first rank, PyTorch's
context parallelism the first and the last quarter. In each step one micro-batch has labels on one rank alone, and one
has padding. What they train is compared, by the rule of `tests/closeness.py`, with one process that sees whole rows, in
fp64. Rank 0 writes to FILE, per case: how far the parameters have moved without the kernels, how far those with the
kernels are from them, what each rank's ops have served, and what they have declined.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig, DistributedType
from datasets import Dataset
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import SFTConfig, SFTTrainer

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.support.rounding import SEEDS, Rounded
from tests.closeness import assert_as_close
from tests.distributed.ranks import by_rank, end_ranks, without_compiled_operators
from tests.distributed.run import FSDP2, ZERO3, Parameters, apart, whole
from tests.models import SMALL, byte_tokenizer, in_double, small_model

STEPS, MICRO_BATCHES, ROWS, LENGTH = 3, 2, 2, 16
RATE = 0.1


class LossOutside(Trainer):
    """Its loss is of logits that the model has returned, as in a loop of one's own."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        targets = inputs.pop("shift_labels").flatten()
        count = targets.ne(-100).sum()
        torch.distributed.all_reduce(count)
        logits = model(**inputs).logits.float().flatten(0, 1)
        # Gradients are averaged over ranks.
        return functional.cross_entropy(logits, targets, reduction="sum") * ranks() / count


# name -> (the trainer, DeepSpeed's stage of ZeRO; None: context parallelism). With fewer stages than 3 DeepSpeed 0.19
# gives as many times the gradient of one process as there are ranks, without the kernels as with them: that is compared
# with itself alone.
CASES: dict[str, tuple[type[Trainer], int | None]] = {
    "Trainer, Ulysses": (Trainer, 3),
    "Trainer, Ulysses, ZeRO-2": (Trainer, 2),
    "loss outside, Ulysses": (LossOutside, 3),
    "SFTTrainer, Ulysses": (SFTTrainer, 3),
    "Trainer, context": (Trainer, None),
    "SFTTrainer, context": (SFTTrainer, None),
}


def rows() -> list[dict[str, list[int]]]:
    """Of all micro-batches, in order: labels on one rank alone (the second's, or the first's with context parallelism)
    or a few padded columns, of which one row has so many that a rank has no token of it."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(STEPS * MICRO_BATCHES * ROWS):
        ids = torch.randint(3, SMALL["vocab_size"], (LENGTH,), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        if i // ROWS % 2 == 0:
            labels[:13] = -100
        else:
            end = (6, 12)[i % ROWS]
            labels[:3] = labels[end:] = -100
            ids[end:] = mask[end:] = 0
        columns = {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": torch.arange(LENGTH)}
        made.append({name: column.tolist() for name, column in columns.items()})
    return made


def one_process(by_tokens: bool, rounding: Rounded | None = None) -> tuple[Parameters, list[torch.Tensor]]:
    """Parameters and losses where one process sees whole rows, in fp64.

    Args:
        by_tokens: the losses of a step's tokens are averaged; else those of its micro-batches.
        rounding: trains in fp32 with this rounding instead.
    """
    data, losses, model = rows(), [], small_model("llama").to(torch.float32 if rounding else torch.float64)
    with rounding or in_double():
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(STEPS):
            begins = range(step * MICRO_BATCHES * ROWS, (step + 1) * MICRO_BATCHES * ROWS, ROWS)
            batches = [default_data_collator(data[begin : begin + ROWS]) for begin in begins]
            counts = [batch["labels"][:, 1:].ne(-100).sum() for batch in batches]
            total = torch.zeros(())
            for batch, count in zip(batches, counts, strict=True):
                targets = batch.pop("labels")[:, 1:].flatten()
                logits = model(**batch).logits[:, :-1].flatten(0, 1)
                loss = functional.cross_entropy(logits, targets, reduction="sum")
                loss = loss / (sum(counts) if by_tokens else count * MICRO_BATCHES)
                loss.backward()
                total += loss.detach()
            losses.append(total)
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, losses


# ---------------------------------------------------------------------------------------------------------------------
# What spreads rows
# ---------------------------------------------------------------------------------------------------------------------


class Gathered(torch.autograd.Function):
    """Keys or values of all ranks, one rank's columns after the other's."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(ranks())]
        torch.distributed.all_gather(parts, mine.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> torch.Tensor:
        d = d.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(d)
        return d.chunk(ranks(), 2)[torch.distributed.get_rank()]


def ranks() -> int:
    return torch.distributed.get_world_size()


def gathering_attention(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Stands for PyTorch's ring, which has no operator for CPUs: every rank gathers all keys and values."""

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        assert attn_mask is None
        assert is_causal
        # Of twice as many chunks as ranks each has one from the front and one from the back.
        chunks = torch.arange(query.shape[2] * ranks()).chunk(2 * ranks())
        columns = [torch.cat((chunks[r], chunks[2 * ranks() - 1 - r])) for r in range(ranks())]
        key, value = Gathered.apply(key), Gathered.apply(value)
        seen = columns[torch.distributed.get_rank()][:, None] >= torch.cat(columns)
        return original(query, key, value, seen, dropout_p, scale=scale, enable_gqa=enable_gqa)

    return attention


def with_a_stand_in() -> None:
    """Has PyTorch's context parallelism put `gathering_attention` where it would put its ring."""
    original = functional.scaled_dot_product_attention

    def enable(**_: Any) -> None:
        functional.scaled_dot_product_attention = gathering_attention(original)

    def disable() -> None:
        functional.scaled_dot_product_attention = original

    _attention._enable_context_parallel_dispatcher_impl = enable
    _attention._disable_context_parallel_dispatcher_impl = disable


def settings(stage: int | None) -> dict[str, Any]:
    """Arguments of a Trainer."""
    if stage is None:
        os.environ |= FSDP2 | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
        return {"parallelism_config": ParallelismConfig(cp_size=2)}
    import deepspeed

    without_compiled_operators()
    deepspeed.init_distributed("gloo")
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    zero = ZERO3["zero_optimization"] | {"stage": stage}
    return {
        "parallelism_config": ParallelismConfig(sp_size=2, sp_handler=handler),
        "deepspeed": ZERO3 | {"zero_optimization": zero, "gradient_clipping": 0.0},
    }


def release(attention: Any) -> None:
    """Takes Ulysses out again, which DeepSpeed leaves in its place."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups

    groups._release_sequence_parallel_groups()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def trained(folder: Path, case: str, kernels: bool) -> tuple[Parameters, list[torch.Tensor], Any]:
    """Parameters, losses and the report."""
    kind, stage = CASES[case]
    sft, attention = kind is SFTTrainer, ALL_ATTENTION_FUNCTIONS["sdpa"]
    AcceleratorState._reset_state(reset_partial_state=True)
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES, "optim": "sgd", "learning_rate": RATE,
        "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "bf16": False,
        "gradient_checkpointing": False, "max_grad_norm": 0.0, **settings(stage),
    }  # fmt: skip
    if sft:
        # gloo gathers no rows of other lengths for Ulysses.
        multiple = 4 if stage is None else LENGTH
        common |= {"pad_to_multiple_of": multiple, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    args = (SFTConfig if sft else TrainingArguments)(**common)
    _ = args.device  # which sets the state up
    if stage is None:
        # For ranks on CPUs accelerate does not look for FSDP's settings (`AcceleratorState.__init__`), so they pass for
        # ranks of another kind. Everything else stays on the CPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    model = small_model("llama", attn_implementation="sdpa")
    callback = NpuKernelsCallback(ops=tuple(PATCHES))
    callbacks = [callback] if kernels else []
    data = rows()
    trainer: Trainer
    if sft:
        # TRL pads, and says where tokens stand.
        live = [sum(row["attention_mask"]) for row in data]
        names = ("input_ids", "labels")
        short = [{name: row[name][:end] for name in names} for row, end in zip(data, live, strict=True)]
        trainer = SFTTrainer(model, args=args, train_dataset=Dataset.from_list(short), callbacks=callbacks,
                             processing_class=byte_tokenizer())  # fmt: skip
    else:
        trainer = Trainer(model, args, train_dataset=data, callbacks=callbacks, data_collator=default_data_collator)
    try:
        trainer.train()
    finally:
        for name in FSDP2:
            os.environ.pop(name, None)
        if stage is not None:
            release(attention)
    losses = [torch.tensor(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    wrapped: Any = trainer.model_wrapped
    return whole(wrapped if stage is None else wrapped.module), losses, callback.report()


def compare(folder: Path, case: str) -> dict[str, Any]:
    """Both ways of a case, and one process."""
    stage = CASES[case][1]
    start: Parameters = dict(small_model("llama").named_parameters())
    plain, losses, _ = trained(folder, case, False)
    ours, found, report = trained(folder, case, True)
    if stage in (None, 3):
        truth, exact = one_process(by_tokens=stage is None)

        # In one process, because a rank that needs it cannot train without the other, and DTensors are not changed. Not
        # in place: there the optimizer would change what it adds zero to.
        @functools.cache
        def moved() -> list[tuple[Parameters, list[torch.Tensor]]]:
            return [one_process(stage is None, Rounded(seed, in_place=False)) for seed in range(SEEDS)]

        for name in plain:
            each = functools.partial(lambda name: [parameters[name] for parameters, _ in moved()], name)
            assert_as_close(ours[name], plain[name], truth[name], f"{case}: {name}", each)
        assert_as_close(*map(torch.stack, (found, losses, exact)), f"{case}: losses",
                        lambda: [torch.stack(of_steps) for _, of_steps in moved()])  # fmt: skip
    mine = report.ran, [(declined.op, declined.reason) for declined in report.declined]
    served, declined = zip(*by_rank(mine), strict=True)
    return {"moved": apart(plain, start), "apart": apart(plain, ours), "served": served, "declined": declined}


def main(target: str, *cases: str) -> None:
    PartialState(cpu=True)
    with_a_stand_in()
    found = {case: compare(Path(target).with_suffix(""), case) for case in cases}
    if torch.distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
