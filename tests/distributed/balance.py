"""Trains GRPO on the ranks that torchrun has started, whose completions differ in length, and sends rows of made-up
batches from rank to rank.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.balance FILE {ddp,fsdp2,zero3}...

Each case is trained by TRL's trainer in fp64 (which DeepSpeed has not) and by ours with balance in fp32, some by ours
without it, too, and held to the rule of closeness. Rank 0 writes to FILE, per case: how far the parameters have moved,
how far those with balance are from TRL's, how many rows micro-batches had, how many of the first rank's another had
generated, whether each step had the rows that it has in TRL's, what was logged of the imbalance, what of TRL's own logs
differs, what the report says of rows that stay, and whether the trainer is as it was. And what was not as it should be
in rows of made-up batches that went from rank to rank.
"""

import contextlib
import functools
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsArguments
from npu_trainer_kernels.support.rounding import SEEDS, Rounded
from npu_trainer_kernels.training.balance import Completion
from npu_trainer_kernels.training.exchange import Holding, agreed, exchanged, holdings, stays_here
from npu_trainer_kernels.training.grpo_groups import Arranger
from tests.closeness import assert_as_close
from tests.distributed.ranks import by_rank, end_ranks
from tests.distributed.run import ZERO3, Parameters, apart, on_ranks, whole
from tests.models import small_model
from tests.training.test_grpo import reward, tokenizer
from tests.training.test_grpo_runs import Both

# A prompt's rows on one rank, on both, and in numbers that do not divide a micro-batch; with prompts short enough that
# sharing them is not worth while, and long enough; in steps of all that is generated at a time, and of parts of it.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.1, "gradient_accumulation_steps": 1},
    "sapo": {"loss_type": "sapo", "num_generations": 8, "steps_per_generation": 4},
    "luspo": {"loss_type": "luspo", "num_generations": 2, "long": True},
    "dr_grpo": {"loss_type": "dr_grpo", "long": True, "num_generations": 16},
    "dapo": {"loss_type": "dapo", "num_iterations": 2, "long": True},
    "cispo": {"loss_type": "cispo", "num_generations": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "vespo": {"loss_type": "vespo", "sampler": True, "vllm_importance_sampling_mode": "token_truncate"},
    "dapo, of sequences": {"loss_type": "dapo", "sampler": True, "vllm_importance_sampling_mode": "sequence_truncate"},
    "columns of its own": {"loss_type": "dapo", "own": True},
}
UNDER = {"ddp": list(CASES), "fsdp2": ["dapo"], "zero3": ["dapo"]}
# For these the same in fp32 without balance is the reference of the rule of closeness.
RULE = ("dapo, ddp", "vespo, ddp")
SEEN: list[list[tuple[Any, ...]]] = []


class MadeUp:
    """Completions of made-up tokens: short ones on the first rank, long ones on the others."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        rank = torch.distributed.get_rank()
        if not hasattr(self, "dice"):
            self.dice = random.Random(rank)
        lengths = [self.dice.choice((9, 16, 22) if rank else (1, 3, 7, 11)) for _ in prompt_ids]
        return [[self.dice.randrange(4, 16) for _ in range(n)] + [2] for n in lengths], None


class Seen:
    """Keeps prompt, completion and advantage of the rows of every micro-batch whose loss is computed."""

    @functools.wraps(TrlGRPOTrainer.compute_loss)
    def compute_loss(self, model, inputs, *args, **kwargs):
        live = (inputs[f"{part}_ids"].masked_fill(inputs[f"{part}_mask"] == 0, -1) for part in ("prompt", "completion"))
        parts = [[tuple(i for i in ids if i >= 0) for ids in each.tolist()] for each in live]
        SEEN.append(list(zip(*parts, inputs["advantages"].tolist(), strict=True)))
        return TrlGRPOTrainer.compute_loss(self, model, inputs, *args, **kwargs)


class Own:
    """A number for each token that only a subclass knows how to pad."""

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        return {**made, "own": made["completion_mask"].float()}


class RoundedRank(Rounded):
    """Changes what a rank computes by itself.

    It leaves alone what ranks send, which is written while they wait, and what is written in place, because the
    parameters of all ranks must stay the same.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, in_place=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def train(
    folder: Path, wrapper: str, kernels: NpuKernelsArguments | None, options: dict[str, Any],
    rounding: Rounded | None = None,
) -> Any:  # fmt: skip
    """A trained trainer; without kernels in fp64, which DeepSpeed has not. `rounding` changes that of its steps."""
    long, sampler, own = (options.get(name, False) for name in ("long", "sampler", "own"))
    options = {name: value for name, value in options.items() if name not in ("long", "sampler", "own")}
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_generations": 4, "max_completion_length": 30, "optim": "sgd", "learning_rate": 1e-1, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False,
        "gradient_checkpointing": False, "max_grad_norm": 0.0, "seed": 3,
        "deepspeed": ZERO3 if wrapper == "zero3" else None,
    }  # fmt: skip
    args = on_ranks(GRPOConfig(**{**common, **options}), wrapper)
    dtype = torch.float64 if kernels is None and wrapper != "zero3" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    mixins = [*([Own] if own else []), *([Both] if sampler else []), MadeUp]
    cls = TrlGRPOTrainer if kernels is None else GRPOTrainer
    trainer = type(cls.__name__, (*mixins, cls), {})(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict(
            {"prompt": [p * 6 if long else p for p in ("1+2=", "3+44=", "5+6=", "71=")] * 8}
        ),
        processing_class=tokenizer(),
        **({} if kernels is None else {"npu_kernels": kernels}),
    )
    trainer.compute_loss = Seen.compute_loss.__get__(trainer)
    SEEN.clear()
    torch.manual_seed(0)
    with rounding or contextlib.nullcontext():
        trainer.train()
    return trainer


def flat(parameters: Parameters) -> torch.Tensor:
    return torch.cat([value.flatten() for value in parameters.values()])


def assert_all_as_close(ours: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor,
                        again: Callable[[int], torch.Tensor]) -> None:  # fmt: skip
    """The rule of closeness, with the results of `again` under each rounding if one rank needs them: all ranks have to
    train again together."""
    try:
        assert_as_close(ours, plain, truth, "parameters", ())
        needed = False
    except AssertionError:
        needed = True
    moved = [again(seed) for seed in range(SEEDS)] if any(by_rank(needed)) else []
    assert_as_close(ours, plain, truth, "parameters", moved)


def differing(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """What TRL logs, times apart, and is not the same."""
    return sorted({
        name for before, after in zip(stock, ours, strict=True) for name, value in before.items()
        if "time" not in name and "per_second" not in name and abs(value - after[name]) > 1e-5 * (1 + abs(value))
    })  # fmt: skip


def trained(folder: Path, wrapper: str, options: dict[str, Any], reference: bool) -> dict[str, Any]:
    parameters, seen, logs, trainer = [], [], [], None

    def under(balance: bool | None, rounding: Rounded | None = None) -> tuple[Any, Parameters]:
        kernels = None if balance is None else NpuKernelsArguments(
            use_npu_kernels=True, npu_kernels_ops=["varlen_attention"], npu_kernels_balance=balance
        )  # fmt: skip
        trainer = train(folder, wrapper, kernels, options, rounding)
        wrapped = trainer.model_wrapped
        return trainer, whole(wrapped if wrapper == "fsdp2" else wrapped.module)

    for balance in (None, False, True) if reference else (None, True):
        trainer, after = under(balance)
        parameters.append(after)
        seen.append(by_rank(list(SEEN)))
        logs.append(trainer.state.log_history)
    truth, balanced = parameters[0], parameters[-1]
    if reference:
        assert_all_as_close(*map(flat, (balanced, parameters[1], truth)),
                            lambda seed: flat(under(False, RoundedRank(seed))[1]))  # fmt: skip
    window = options.get("gradient_accumulation_steps", 2)
    steps = [[Counter(itertools.chain(*(rank[i] for rank in each for i in range(at, at + window))))
              for at in range(0, len(each[0]), window)] for each in (seen[0], seen[-1])]  # fmt: skip
    mine = [Counter(itertools.chain(*each[0])) for each in (seen[0], seen[-1])]
    logged = [log for log in trainer.state.log_history if "imbalance/ranks" in log]
    start = dict(small_model("qwen3").named_parameters())
    report = trainer.npu_kernels_report()
    return {
        "moved": apart(truth, start),
        "apart": apart(truth, balanced),
        "rows": sorted({len(rows) for rank in seen[-1] for rows in rank}),
        "same": steps[0] == steps[1],
        "came": (mine[1] - mine[0]).total(),
        "imbalance": [[log[f"imbalance/ranks{name}"] for log in logged] for name in ("", "_shuffled")],
        "notes": [note for note in report.notes if "stay" in note],
        "logs": differing(logs[0], logs[-1]),
        "undone": "_prepare_inputs" not in vars(trainer),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Made-up batches
# ---------------------------------------------------------------------------------------------------------------------


def made_up(rank: int, width: int) -> dict[str, Any]:
    """Three rows, of which each number says from where it is: 100 for the rank, 10 for the row, 1 for the token."""
    row = 100 * rank + 10 * torch.arange(3)[:, None] + torch.arange(1, width + 1)
    return {
        "prompt_ids": row, "prompt_mask": torch.ones_like(row), "completion_ids": row + 1000,
        "completion_mask": torch.ones_like(row), "tool_mask": torch.zeros_like(row), "advantages": row[:, 0].double(),
        "old_per_token_logps": row.float(), "importance_sampling_ratio": row.bfloat16() / 4,
        "ref_per_token_logps": None, "sampling_per_token_logps": row.float()[:, :1], "extra": row[:, 0] > 10,
        "texts": [f"{rank}{i}" for i in range(3)], "num_items_in_batch": torch.tensor(7),
    }  # fmt: skip


FILL = {"prompt_ids": -9, "completion_ids": -9, "tool_mask": 1, "importance_sampling_ratio": 1}


def as_wide(name: str, numbers: Any) -> Any:
    """A row's numbers, as many as the wider rank has: prompts end where they ended, all else begins where it began."""
    if not isinstance(numbers, list) or name == "sampling_per_token_logps":
        return numbers
    missing = [FILL.get(name, 0)] * (4 - len(numbers))
    return missing + numbers if name.startswith("prompt") else numbers + missing


def gathered(batch: dict[str, Any], rows: int) -> list[Holding]:
    return [holding for holding in holdings(Holding.of(batch, [Completion(0, 1, 1)] * rows)) if holding is not None]


def received(wanted: list[list[tuple[int, int]]]) -> list[str]:
    """What is not as it should be in the batches of two ranks, of widths 2 and 4, after an exchange."""
    rank = torch.distributed.get_rank()
    batches = [made_up(each, 2 * each + 2) for each in (0, 1)]
    every = gathered(batches[rank], 3)
    wrong = [] if stays_here(every) is None else [str(stays_here(every))]
    batch = exchanged(batches[rank], every, wanted, padding=-9)
    if batch["ref_per_token_logps"] is not None or batch["num_items_in_batch"].tolist() != 7:
        wrong.append("what rows have in common")
    if [str(value.dtype) for value in batch.values() if isinstance(value, torch.Tensor)] != [
        str(value.dtype) for value in batches[rank].values() if isinstance(value, torch.Tensor)
    ]:
        wrong.append("dtypes")
    for name in batch.keys() - {"ref_per_token_logps", "num_items_in_batch"}:
        columns = [each[name] if isinstance(each[name], list) else each[name].tolist() for each in batches]
        right = [as_wide(name, columns[source][place]) for source, place in wanted[rank]]
        got = batch[name] if isinstance(batch[name], list) else batch[name].tolist()
        if got != right:
            wrong.append(f"{name}: {got} instead of {right}")
    return wrong


def refused() -> list[str | None]:
    """Why these batches stay where they are, as this rank says."""
    rank = torch.distributed.get_rank()
    found = []
    for names in (("own",), ("old_per_token_logps",)):
        batch = {"prompt_ids": torch.ones(2, 3), **{name: torch.ones(2, 3) for name in names if rank or name == "own"}}
        found.append(stays_here(gathered(batch, 2)))
    # The second rank's rows have pictures.
    batches = [{"pixel_values": torch.ones(1)} if rank else made_up(0, 3)]
    found.append("left" if Arranger(None, True, True, print).arrange(batches) is batches else "moved")
    return [*found, agreed("only one" if rank else None), agreed(None)]


def main(target: str, *wrappers: str) -> None:
    PartialState(cpu=True)
    folder = Path(target).with_suffix("")
    if PartialState().is_main_process:
        small_model("qwen3").save_pretrained(folder)
    PartialState().wait_for_everyone()
    found: dict[str, Any] = {}
    for wrapper in wrappers:
        for name in UNDER[wrapper]:
            case = f"{name}, {wrapper}"
            found[case] = trained(folder, wrapper, CASES[name], case in RULE)
    crossed = [[(1, 2), (0, 1), (1, 0)], [(0, 2), (1, 1), (0, 0)]]
    nothing = [[(0, 2), (0, 0), (0, 1)], [(1, 0), (1, 1), (1, 2)]]
    # `on_two_ranks` asks of everything how far it has moved.
    made = {
        "moved": 1.0,
        "apart": 0.0,
        "wrong": by_rank([received(crossed), received(nothing)]),
        "refused": by_rank(refused()),
    }
    if torch.distributed.get_rank() == 0:
        Path(target).write_text(json.dumps({**found, "made up": made}))
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
