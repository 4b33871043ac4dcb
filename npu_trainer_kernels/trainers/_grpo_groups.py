"""The rows of a GRPO prompt in one micro-batch, so that the prompt is computed once for as many of them as can be.

TRL shuffles the rows of a generation batch over its micro-batches. Which of these a row is in makes no difference to
the optimizer's step where two things hold: all of them end in the same step, and what a row adds to the loss depends on
no other row of its micro-batch. Then a prompt's rows are brought together; else nothing is touched.

The second is read from TRL's `_compute_loss`, for B rows i of T_i tokens t in each of A micro-batches, and
l_it the loss of a token:

    grpo, sapo           sum_i (sum_t l_it / T_i) / (B A)           rows alone
    luspo                sum_i (sum_t l_it) / (B A)                 rows alone
    dr_grpo              sum_i sum_t l_it / (B A max_length)        rows alone
    dapo, cispo, vespo   sum_i sum_t l_it / N                       rows alone: N is counted over the generation batch
    bnpo                 sum_i sum_t l_it / (A sum_i T_i)           the T_i of the other rows
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..patching._undo import Undo
from ._grpo_plan import TRL_MODULE

__all__ = ["bring_together", "stays_shuffled"]

_ROWS_ALONE = ("grpo", "sapo", "luspo", "dr_grpo", "dapo", "cispo", "vespo")


def stays_shuffled(trainer: Any) -> str | None:
    """Why an optimizer step of TRL's GRPOTrainer depends on which rows share a micro-batch; None where it does not.

    Asked when training begins, at the first micro-batch of a window of accumulation. An epoch has a whole number of
    generation batches, so windows of whole generation batches never begin within one.
    """
    args, trl = trainer.args, sys.modules[TRL_MODULE].GRPOTrainer
    for name in (
        "_compute_loss",
        "compute_loss",
        "_get_per_token_logps_and_entropies",
        "_prepare_inputs",
        "training_step",
    ):
        if getattr(type(trainer), name) is not getattr(trl, name):
            return f"{type(trainer).__name__} has a {name} of its own"
    if args.use_liger_kernel:
        return "Liger's loss takes the place of TRL's in some versions"
    window, slices = args.gradient_accumulation_steps, args.steps_per_generation
    if window % slices or trainer._step % slices:
        return f"an optimizer step takes {window} micro-batches of the {slices} that are generated at a time"
    if trainer.loss_type not in _ROWS_ALONE:
        return f"loss_type={trainer.loss_type!r} divides by the tokens of a micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over the tokens of a micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return f"top_entropy_quantile={trainer.top_entropy_quantile} compares the tokens of a micro-batch"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of the experts looks at a micro-batch as a whole"
    return None


def _joined(parts: list[Any]) -> Any:
    """A batch's value from its slices'; numbers and None are the same in each."""
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]


def _in_order(value: Any, order: list[int]) -> Any:
    if isinstance(value, list):
        return [value[i] for i in order]
    return value[order] if isinstance(value, torch.Tensor) and value.dim() else value


def _together(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in the same number of slices, those of a prompt behind one another; prompts in the order in which
    TRL's shuffling has brought up the first row of each. That is a shuffling of prompts, and draws no random number."""
    if "pixel_values" in batches[0]:
        return batches  # rows with pictures have no beginning to share, since those are no ids
    prompts = [row for batch in batches for row in batch["prompt_ids"].tolist()]
    turns: dict[tuple[int, ...], int] = {}
    turn = [turns.setdefault(tuple(prompt), len(turns)) for prompt in prompts]
    order = sorted(range(len(turn)), key=turn.__getitem__)
    whole = {name: _in_order(_joined([batch[name] for batch in batches]), order) for name in batches[0]}
    split: Callable[..., list[dict[str, Any]]] = sys.modules[TRL_MODULE].split_tensor_dict
    return split(whole, len(batches))


def _prepared(trainer: Any, prepare: Callable[[Any], Any], batch: Any) -> Any:
    before = trainer._buffered_inputs
    inputs = prepare(batch)
    if trainer._buffered_inputs is before:
        return inputs
    trainer._buffered_inputs = _together(trainer._buffered_inputs)
    return trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]


def bring_together(trainer: Any, undo: Undo) -> None:
    """From now on the rows of a prompt follow one another in a trainer's micro-batches."""
    undo.set_attribute(trainer, "_prepare_inputs", functools.partial(_prepared, trainer, trainer._prepare_inputs))
