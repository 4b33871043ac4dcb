"""Changes to a Trainer while it trains. `NpuKernelsCallback` makes them, in this order, and undoes them at the end.

1. `seeds`: finds ranks that share a model and would draw different random numbers.
2. `grpo_groups`: puts the rows of a GRPO batch in another order, by the arithmetic of `balance` and, between ranks, the
   collectives of `exchange`.
3. `grpo_plan`: plans the gradient of GRPO's loss for each batch, so that the head computes it in forward.
4. `held_models`: finds the trainer's other models (reference, teacher), which get the kernels as well.
5. `distillation`: serves the losses between a student's and a teacher's head; `top_tokens`: those on some tokens.
6. `repeats`, `loss_filter`: what the Trainer does on the host at each micro-batch takes fewer steps, or does not wait.
7. `warmup`: compiles the kernels of the first step before it. `step_times`: divides the time of the run by steps.
"""

from . import warmup
from .distillation import rehearsal, serve_divergence
from .exchange import agreed
from .grpo_groups import Arranger, never_arranged, stays_on_rank, stays_shuffled
from .grpo_plan import Planner, is_grpo
from .held_models import held_models
from .loss_filter import LossFilter
from .repeats import Repeats
from .seeds import differing_seeds
from .step_times import StepTimes
from .unconnected import unconnected_ranks

__all__ = [
    "Arranger", "LossFilter", "Planner", "Repeats", "StepTimes", "agreed", "differing_seeds", "held_models", "is_grpo",
    "never_arranged", "rehearsal", "serve_divergence", "stays_on_rank", "stays_shuffled", "unconnected_ranks",
    "warmup",
]  # fmt: skip
