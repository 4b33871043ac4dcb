"""Distributes the rows of a GRPO generation batch over micro-batches and ranks.

TRL shuffles the rows of a generation batch over the micro-batches of the rank that generated them. The place of a row
does not matter to the optimizer's step if two conditions hold: the row stays in the step, and its part of the loss
depends on no other row of its micro-batch. Then the rows of a prompt are put together, so the prompt is computed once
for as many as possible, and live tokens are spread evenly (`balance`); otherwise nothing changes.

The first condition holds for groups of consecutive micro-batches whose number divides both a generation batch's and a
step's. The second is read from TRL's `_compute_loss`, for B rows i of T_i tokens t in each of A micro-batches, and the
loss l_it of a token:

    grpo, sapo           sum_i (sum_t l_it / T_i) / (B A)           rows alone
    luspo                sum_i (sum_t l_it) / (B A)                 rows alone
    dr_grpo              sum_i sum_t l_it / (B A max_length)        rows alone
    dapo, cispo, vespo   sum_i sum_t l_it R / N                     rows alone: N is counted over the generation batch
    bnpo                 sum_i sum_t l_it / (A sum_i T_i)           the T_i of the other rows

Data-parallel ranks (DDP, FSDP, ZeRO) average their gradients. With the same B and A on each of the R ranks, and an N
that TRL counts over all of them, the sums over ranks do not change either when rows change ranks.

TRL reads its options at every micro-batch, and callbacks change them while training goes on. So both conditions are
asked again for each generation batch, and for each step: where one does not hold, the step gets the rows that TRL has
shuffled into it.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType

from ..patching.undo import Undo
from .balance import Completion, arranged, imbalance, live
from .exchange import Holding, agreed, exchanged, holdings, stays_here
from .grpo_plan import TRL_MODULE, loss_options

__all__ = ["Arranger", "compares_rows", "never_arranged", "stays_on_rank", "stays_shuffled"]

_ROWS_ALONE = ("grpo", "sapo", "luspo", "dr_grpo", "dapo", "cispo", "vespo")
# Here ranks may share more than data.
_NOT_DATA = (DistributedType.MEGATRON_LM, DistributedType.XLA)


def _same_step(trainer: Any) -> int:
    """Returns how many consecutive micro-batches are in one optimizer step, wherever in a generation batch they begin:
    generation batches and steps begin at multiples of this number."""
    return math.gcd(trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation)


_LOSS_METHODS = (
    "_compute_loss", "compute_loss", "_get_per_token_logps_and_entropies", "_prepare_inputs", "training_step",
)  # fmt: skip
"""The methods of TRL's trainer by which a loss and its rows are made."""


def stays_shuffled(trainer: Any, across: bool) -> str | None:
    """Returns why an optimizer step of TRL's GRPOTrainer depends on which rows share a micro-batch, or None. `across`:
    whether rows may change ranks, which leaves them in their step."""
    return never_arranged(trainer, across) or compares_rows(trainer)


def never_arranged(trainer: Any, across: bool) -> str | None:
    """Returns why no generation batch of this training can be arranged, or None.

    Called when training begins, at the first micro-batch of a window of accumulation. An epoch has a whole number of
    generation batches, so the windows after a short one begin where a generation batch does.
    """
    args, trl = trainer.args, sys.modules[TRL_MODULE].GRPOTrainer
    for name in _LOSS_METHODS:
        # Other code may have replaced a method on the trainer or on TRL's class. A replacement that states that it
        # wraps TRL's (functools.wraps) is taken for an observer.
        method = vars(trainer).get(name, getattr(trl, name))
        theirs = method.__module__.partition(".")[0] in ("trl", "transformers")
        if getattr(type(trainer), name) is not getattr(trl, name) or not theirs:
            return f"{type(trainer).__name__} has a {name} of its own"
    if args.use_liger_kernel:
        return "Liger's loss takes the place of TRL's in some versions"
    window, slices = args.gradient_accumulation_steps, args.steps_per_generation
    if _same_step(trainer) == 1 and not across:
        return f"an optimizer step takes {window} micro-batches of the {slices} that are generated at a time"
    if trainer._step % _same_step(trainer):
        return f"training goes on with micro-batch {trainer._step % slices + 1} of the {slices} generated at a time"
    return None


def compares_rows(trainer: Any) -> str | None:
    """Returns why the loss of a micro-batch, by the options that TRL reads for it, is no sum over its rows, or None."""
    if trainer.loss_type not in _ROWS_ALONE:
        return f"loss_type={trainer.loss_type!r} divides by the tokens of a micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over the tokens of a micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return f"top_entropy_quantile={trainer.top_entropy_quantile} compares the tokens of a micro-batch"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of the experts looks at a micro-batch as a whole"
    return None


def stays_on_rank(trainer: Any) -> str | None:
    """Returns why rows cannot go to other ranks, if there are several, or None."""
    args, accelerator = trainer.args, trainer.accelerator
    if accelerator.distributed_type in _NOT_DATA:
        return f"ranks under {accelerator.distributed_type.value} may share more than data"
    alone = trainer._train_batch_size * args.gradient_accumulation_steps
    if trainer.get_total_train_batch_size(args) != alone * accelerator.num_processes:
        return "some ranks have parts of the same rows (tensor, context or sequence parallel)"
    return None


def _joined(parts: list[Any]) -> Any:
    """Joins a batch's value from its slices; numbers and None are the same in each."""
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]


def _in_order(value: Any, order: list[int]) -> Any:
    if isinstance(value, list):
        return [value[i] for i in order]
    return value[order] if isinstance(value, torch.Tensor) and value.dim() else value


def _rows(batch: dict[str, Any]) -> list[Completion]:
    """Returns the rows of a batch. Only here the host waits for the device."""
    counts = torch.stack([batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)], 1)
    known = torch.cat([counts, batch["prompt_ids"]], 1).tolist()
    # A prompt is padded on the left, to its rank's width. Python's hash of numbers is the same on all ranks.
    return [Completion(hash(tuple(ids[len(ids) - prompt :])), prompt, completion) for prompt, completion, *ids in known]


@dataclass
class Arranger:
    """Arranges the generation batches of a trainer for which `never_arranged` returns None, while `compares_rows`
    returns None too. TRL's own list of micro-batches stays as TRL has made it.

    Attributes:
        trainer: the trainer.
        balance: whether lengths are balanced; otherwise the rows of a prompt are put together, prompt by prompt in the
            order of TRL's shuffling.
        across: whether rows may change ranks; all ranks agree on it.
        note: called with the reason why rows stay on their rank, or in the micro-batches of TRL's.
        draws: returns whether training draws random numbers for each token, so that no prompt is shared.
        stays: why the rows of the running step are those of TRL's, or None.
    """

    trainer: Any
    balance: bool
    across: bool
    note: Callable[[str], None]
    draws: Callable[[], bool] = lambda: False
    stays: str | None = None
    _shuffled: Any = None  # TRL's list of micro-batches, and the same rows arranged, or None
    _arranged: list[dict[str, Any]] | None = None
    _options: Any = None  # those of the running step
    _beginning: Any = None  # what must stay for the whole training

    def start(self, undo: Undo) -> None:
        """Arranges the trainer's micro-batches from now on."""
        prepare = functools.partial(self._prepared, self.trainer._prepare_inputs)
        undo.set_attribute(self.trainer, "_prepare_inputs", prepare)

    def _prepared(self, prepare: Callable[[Any], Any], batch: Any) -> Any:
        trainer = self.trainer
        inputs = prepare(batch)
        shuffled = trainer._buffered_inputs
        if not trainer.model.training or not shuffled:  # evaluation buffers nothing
            return inputs
        if self._beginning is None:
            self._beginning = self._lasting()
        begins = trainer._step % self._beginning[0] == 0
        if shuffled is not self._shuffled:
            self._shuffled, self._arranged, self.stays = shuffled, None, self._asked()
            if self.stays is None:
                self._arranged = self.arrange(shuffled)
        elif begins:
            self.stays = self._asked()
        if begins:
            self._options = loss_options(trainer)
        if self._arranged is None or self.stays is not None:
            return inputs
        self._look_within_a_step()
        return self._arranged[trainer._step % trainer.args.steps_per_generation]

    def _lasting(self) -> tuple[Any, ...]:
        """Returns the sizes of steps, and the methods of the loss as they are while this package trains."""
        args, own = self.trainer.args, vars(self.trainer)
        methods = [(own.get(name), getattr(type(self.trainer), name)) for name in _LOSS_METHODS]
        return _same_step(self.trainer), args.gradient_accumulation_steps, args.steps_per_generation, methods

    def _asked(self) -> str | None:
        """Returns why the rows of the coming step stay as TRL has shuffled them, or None; all ranks agree on it."""
        reason = compares_rows(self.trainer)
        if self._lasting() != self._beginning:
            reason = "the sizes of steps, or the methods of the loss, have been changed since training began"
        elif reason is None and self.draws():
            reason = "something is dropped out"
        if self.across:
            reason = agreed(reason)
        if reason is not None and reason != self.stays:
            step = self.trainer.state.global_step + 1
            self.note(f"from step {step} on the rows of a prompt stay spread over micro-batches: {reason}")
        return reason

    def _look_within_a_step(self) -> None:
        """Warns if an option was changed between two micro-batches of a step, whose rows have been arranged."""
        now = loss_options(self.trainer)
        changed = [name for name, value in now.items() if value != self._options.get(name, value)]
        if changed:
            warnings.warn(
                f"GRPOTrainer: {', '.join(changed)} was changed between two micro-batches of step "
                f"{self.trainer.state.global_step + 1}. Its rows had been arranged anew, so the rows that have got the "
                "new value are not those of TRL's shuffling. Change options where a step begins (on_step_begin).",
                stacklevel=2,
            )
            self._options = now

    def arrange(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows of a generation batch in as many micro-batches as before, each with as many rows."""
        # Rows with pictures share no prefix, since pictures are no ids. Other ranks may have them, too.
        pictures = "pixel_values" in batches[0]
        whole = {} if pictures else {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
        mine = None if pictures else Holding.of(whole, _rows(whole))
        asked = holdings(mine) if self.across else [mine]
        every = [holding for holding in asked if holding is not None]
        if mine is None or len(every) < len(asked):
            return batches
        stays = stays_here(every)
        if self.across and stays is not None:
            self.note(f"rows stay on their rank: {stays}")
            every = [mine]
        wanted = self._wanted(every, len(batches))
        if self.balance:
            self._log(every, wanted, len(batches))
        if len(every) > 1:
            whole = exchanged(whole, every, wanted, self.trainer._tokenizer.pad_token_id)
        else:
            whole = {name: _in_order(value, [place for _, place in wanted[0]]) for name, value in whole.items()}
        split: Callable[..., list[dict[str, Any]]] = sys.modules[TRL_MODULE].split_tensor_dict
        return split(whole, len(batches))

    def _wanted(self, every: list[Holding], slices: int) -> list[list[tuple[int, int]]]:
        """Returns for each rank the rank and the index there of each row that it gets."""
        wanted: list[list[tuple[int, int]]] = [[] for _ in every]
        together, size = _same_step(self.trainer), len(every[0].rows) // slices
        for first in range(0, slices, together):
            places = range(first * size, (first + together) * size)
            pool = [(rank, place) for rank in range(len(every)) for place in places]
            rows = [every[rank].rows[place] for rank, place in pool]
            if not self.balance:
                rows = [Completion(row.prompt, 0, 0) for row in rows]
            for micro_batch in arranged(rows, len(every), together):
                for mine, bin_ in zip(wanted, micro_batch, strict=True):
                    mine += [pool[i] for i in bin_]
        return wanted

    def _log(self, every: list[Holding], wanted: list[list[tuple[int, int]]], slices: int) -> None:
        """Logs the imbalance, and that of TRL's shuffling, as TRL logs: means over the generation batches since.

        The names that end in `_shuffled` cost one more pass of the same loop; without them a user could not see what
        the arrangement brings to a run.
        """
        size = len(wanted[0]) // slices
        as_they_were = [[(rank, place) for place in range(len(h.rows))] for rank, h in enumerate(every)]
        for suffix, rows in (("", wanted), ("_shuffled", as_they_were)):
            loads = [
                [live(every[rank].rows[place] for rank, place in mine[i : i + size]) for mine in rows]
                for i in range(0, size * slices, size)
            ]
            ranks, micro_batches = imbalance(loads)
            metrics = self.trainer._metrics["train"]
            if len(every) > 1:
                metrics[f"imbalance/ranks{suffix}"].append(ranks)
            metrics[f"imbalance/micro_batches{suffix}"].append(micro_batches)
