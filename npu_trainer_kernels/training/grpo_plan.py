"""Plans for a batch of TRL's GRPOTrainer which gradient its loss will send back to the head.

TRL's own `_compute_loss` still computes the loss, and backward compares its real gradient with the plan. A wrong or
missing plan costs time, and a warning. TRL reads its options at every micro-batch, and so does a plan.
"""

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..ops.attention import uploaded
from ..ops.head import GIVE_UP, GrpoOptions, GrpoPlan, GrpoTokens, batch_tokens, planned
from ..patching.call import Scored, use_plan
from ..patching.undo import Undo

__all__ = ["TRL_MODULE", "BatchPlan", "PlanRehearsal", "Planner", "is_grpo", "loss_options"]

TRL_MODULE = "trl.trainer.grpo_trainer"

_OF_TRAINER = (
    "loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta", "temperature",
    "top_entropy_quantile", "off_policy_mask_threshold", "_entropy_bonus_enabled", "aux_loss_enabled",
    "max_completion_length", "use_vllm", "vllm_importance_sampling_correction",
)  # fmt: skip
_OF_ARGUMENTS = (
    "delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos",
    "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip


def loss_options(trainer: Any) -> dict[str, Any]:
    """Returns the options of a GRPOTrainer that TRL reads for the loss of each micro-batch, as they are now; some
    versions of TRL have fewer. The coefficient of the entropy bonus is none of them: TRL changes it by itself."""
    given = ((vars(trainer), _OF_TRAINER), (vars(trainer.args), _OF_ARGUMENTS))
    return {name: options[name] for options, names in given for name in names if name in options}


def is_grpo(trainer: Any) -> bool:
    """Whether a trainer is TRL's GRPOTrainer, or derives from it. TRL is not imported for it."""
    trl = sys.modules.get(TRL_MODULE)
    return trl is not None and isinstance(trainer, trl.GRPOTrainer)


class Planner:
    """Plans the batches of one trainer (`is_grpo`), as long as its plans hold.

    Attributes:
        trainer: the trainer.
        off: why no batch is planned any more, or None.
        unplanned: the numbers of batches that were not planned, by reason.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.off: str | None = None
        self.unplanned: Counter[str] = Counter()
        if type(trainer)._compute_loss is not sys.modules[TRL_MODULE].GRPOTrainer._compute_loss:
            self.off = f"{type(trainer).__name__} computes a loss of its own (_compute_loss)"

    def why_not(self) -> str | None:
        """Returns why the next batch is not planned, or None: a loss other than TRL's, or one of a whole batch's
        statistics, by the options as they are now."""
        t = self.trainer
        if self.off is not None:
            return self.off
        if t.top_entropy_quantile < 1.0:
            return f"top_entropy_quantile={t.top_entropy_quantile} selects tokens by the whole batch's entropies"
        if t.off_policy_mask_threshold is not None:
            return "off_policy_mask_threshold drops completions by the whole completion's log-probabilities"
        return None

    def whys(self) -> dict[str, int]:
        """Returns why batches were not planned, with their number."""
        reason = self.why_not()
        return dict(self.unplanned) | ({} if reason is None or reason in self.unplanned else {reason: 0})

    def plan_losses(self, undo: Undo) -> None:
        """Passes plans to the trainer's head from now on, so that it can compute the gradient while the logits are in
        memory. The loss stays TRL's, and its real gradient decides."""
        undo.set_attribute(
            self.trainer, "_compute_loss", functools.partial(self.compute_loss, self.trainer._compute_loss)
        )

    def compute_loss(self, loss: Callable[..., Any], model: Any, inputs: dict[str, Any]) -> Any:
        """Computes TRL's loss of a batch, while the head has the batch's plan."""
        reason = self.why_not()
        plan = BatchPlan(self, inputs) if reason is None and torch.is_grad_enabled() else None
        if reason is not None and torch.is_grad_enabled():
            self.unplanned[reason] += 1
        with use_plan(plan):
            return loss(model, inputs)

    def rehearsal(self) -> "PlanRehearsal | None":
        """Returns the plan for a batch of fake tensors, or None."""
        return None if self.why_not() is not None else PlanRehearsal(self, {})

    @property
    def corrects_sampler(self) -> bool:
        """Whether batches have importance ratios that correct for vLLM's sampler."""
        return self.trainer.use_vllm and self.trainer.vllm_importance_sampling_correction

    @property
    def max_completion_length(self) -> int | None:
        """The divisor of dr_grpo's loss."""
        length: int | None = self.trainer.max_completion_length
        return length

    def describe(self) -> str:
        """Returns the options that shape the loss, for the warning."""
        options = loss_options(self.trainer)
        names = ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "delta", "beta")
        return ", ".join(f"{name}={options[name]!r}" for name in names if name in options)

    def give_up(self, share: float) -> None:
        """Stops planning, with one warning."""
        self.off = f"the gradient of TRL's loss was not the planned one for {share:.0%} of the tokens"
        warnings.warn(
            f"GRPOTrainer: {self.off} ({self.describe()}). The result is right all the same; from now on the head's "
            "backward forms the logits a second time.",
            stacklevel=2,
        )

    def options(self) -> GrpoOptions:
        """Returns the trainer's numbers as the op takes them."""
        t, args = self.trainer, self.trainer.args
        bonus = 0.0
        if t._entropy_bonus_enabled:
            adaptive_off = t.use_adaptive_entropy and t._last_world_entropy > args.entropy_target
            bonus = 0.0 if adaptive_off else t.entropy_coef
        clips = t.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
        return GrpoOptions(
            loss_type=t.loss_type,
            importance_level=t.importance_sampling_level,
            epsilon_low=t.epsilon_low,
            epsilon_high=t.epsilon_high,
            delta=args.delta if clips else None,
            beta=t.beta,
            bias_corrected_kl=args.use_bias_correction_kl and t.beta != 0.0,
            entropy_coef=bonus,
            sapo_temperature_pos=args.sapo_temperature_pos,
            sapo_temperature_neg=args.sapo_temperature_neg,
            vespo_k_pos=args.vespo_k_pos,
            vespo_lambda_pos=args.vespo_lambda_pos,
            vespo_k_neg=args.vespo_k_neg,
            vespo_lambda_neg=args.vespo_lambda_neg,
        )

    def scale(self, inputs: dict[str, Any]) -> tuple[torch.Tensor | float, float]:
        """Returns the divisors of the policy terms, beyond the tokens' own weights, and of the entropy bonus."""
        t = self.trainer
        accumulation = t.current_gradient_accumulation_steps
        if t.loss_type in ("cispo", "dapo", "vespo"):
            items = inputs["num_items_in_batch"].clamp(min=1.0) / t.accelerator.num_processes
            return items * accumulation / t.args.steps_per_generation, accumulation
        return accumulation, accumulation


class BatchPlan:
    """The plan for one batch; made when the head requests it."""

    def __init__(self, planner: Planner, inputs: dict[str, Any]) -> None:
        self._planner, self._inputs = planner, inputs

    def mismatch(self, share: float) -> None:
        """Stops planning if most rows differ: a few are ratios at the edge of a clip, many are another formula."""
        if share > GIVE_UP:
            self._planner.give_up(share)

    def for_rows(self, rows: int, weight: torch.Tensor, itemsize: int, scored: Scored | None) -> GrpoPlan | None:
        """See `HeadPlan`. TRL scores the tokens of `completion_mask`, completion by completion."""
        if not weight.requires_grad:
            # A frozen head needs no plan: two products whatever the loss.
            return None
        completions, length = self._inputs["completion_mask"].shape
        if scored is None:
            # This waits for the device.
            places = np.flatnonzero(self._inputs["completion_mask"].cpu().numpy())
        elif scored.shape[0] != completions or scored.shape[1] < length:
            return None
        else:
            # A completion is the end of a row.
            row, column = np.divmod(scored.read(), scored.shape[1])
            column -= scored.shape[1] - length
            if (column < 0).any():
                return None
            places = row * length + column
        if len(places) != rows:
            return None
        options = self._planner.options()
        on_policy = self._inputs.get("old_per_token_logps") is None

        def lengths() -> list[int]:
            counts: list[int] = np.bincount(places // length, minlength=completions).tolist()
            return counts

        return planned(
            lambda: self._tokens(uploaded(places, weight.device), options), options, on_policy, lengths,
            weight.shape[0], itemsize, weight.device,
        )  # fmt: skip

    def _tokens(self, kept: torch.Tensor, options: GrpoOptions) -> GrpoTokens:
        inputs = self._inputs
        mask = inputs["completion_mask"]
        mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).float()
        divisor, bonus_divisor = self._planner.scale(inputs)
        return batch_tokens(
            options, kept, mask,
            advantages=inputs["advantages"],
            old=inputs.get("old_per_token_logps"),
            reference=inputs["ref_per_token_logps"] if options.beta != 0.0 else None,
            importance_ratio=inputs.get("importance_sampling_ratio") if self._planner.corrects_sampler else None,
            max_completion_length=self._planner.max_completion_length,
            num_items=1,  # the divisor takes its place
            divisor=divisor,
            bonus_divisor=bonus_divisor,
        )  # fmt: skip


class PlanRehearsal(BatchPlan):
    """The plan for a batch of fake tensors, with which its kernels can be compiled before the first batch."""

    def for_rows(self, rows: int, weight: torch.Tensor, itemsize: int, scored: Scored | None) -> GrpoPlan | None:
        """See `HeadPlan`; every row stands for a completion."""
        if not weight.requires_grad:
            return None
        options, args, sampled = self._planner.options(), self._planner.trainer.args, self._planner.corrects_sampler
        # TRL's rule (`_generate_and_score_completions`).
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
        on_policy, vespo = aligned and not sampled, options.loss_type == "vespo"
        values = torch.zeros(rows, dtype=torch.float32, device=weight.device)
        sequence = torch.arange(rows, device=weight.device)

        def given(wanted: bool) -> torch.Tensor | None:
            return values if wanted else None

        tokens = GrpoTokens(
            values, values, values, given(not on_policy), given(options.beta != 0.0), given(sampled and not vespo),
            given(sampled and vespo), given(options.entropy_coef != 0.0), sequence, values,
        )  # fmt: skip
        return planned(lambda: tokens, options, on_policy, lambda: [1] * rows, weight.shape[0], itemsize, weight.device)
