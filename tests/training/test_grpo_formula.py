"""The ops' GRPO loss against TRL's own function, called as it is: values and gradients, scale and all.

Op and reference have the formula and the batch's arithmetic in common, and a plan is compared with TRL's gradient up to
a factor only. Here is where a fault in them shows. TRL's `_compute_loss` gets log-probabilities and entropies by
`log_softmax`, and a trainer that has nothing but options.
"""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels.ops import GrpoOptions, fused_linear_grpo_loss, fused_linear_grpo_loss_reference, grpo_loss
from npu_trainer_kernels.ops.head import grpo_formula
from npu_trainer_kernels.ops.head.grpo_formula import LEVELS, LOSS_TYPES
from tests.closeness import assert_op_close

B, T, H, V, LONGEST = 4, 9, 16, 41, 12
TEMPERATURE = 0.8
LENGTHS = (T, 5, 0, 7)
# Of both signs, but no loss whose terms cancel: what is left of such a one is their rounding. Several, because a single
# number of the one side or the other may be right by luck.
ADVANTAGES = ((1.7, -0.2, 0.4, 1.2), (-0.9, -1.3, 0.1, 0.3), (1.1, 0.8, -1.0, -0.2))
CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class Accelerator(SimpleNamespace):
    """One process that is in no hurry."""

    num_processes = 1
    sync_gradients = False

    @staticmethod
    def gather(t):
        return t

    @staticmethod
    def reduce(t, reduction):
        return t


def trl_loss(options, batch):
    """TRL's loss as a function of hidden states, weight and ids."""

    def loss(x, weight, ids):
        def log_probs_and_entropies(*args, **kwargs):
            log_p = torch.log_softmax(torch.nn.functional.linear(x, weight) / TEMPERATURE, -1)
            log_prob = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            return log_prob, -(log_p.exp() * log_p).sum(-1), None

        names = ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
                 "vespo_lambda_neg", "delta")  # fmt: skip
        trainer = SimpleNamespace(
            args=SimpleNamespace(
                **{name: getattr(options, name) for name in names},
                use_bias_correction_kl=options.bias_corrected_kl, steps_per_generation=1,
            ),
            loss_type=options.loss_type, importance_sampling_level=options.importance_level, beta=options.beta,
            epsilon_low=options.epsilon_low, epsilon_high=options.upper, entropy_coef=options.entropy_coef,
            _entropy_bonus_enabled=options.entropy_coef != 0.0, use_adaptive_entropy=False, aux_loss_enabled=False,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, current_gradient_accumulation_steps=1,
            max_completion_length=LONGEST, use_vllm="importance_sampling_ratio" in batch,
            vllm_importance_sampling_correction=True, model=SimpleNamespace(training=True),
            accelerator=Accelerator(), _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=log_probs_and_entropies,
            get_gamma_weights=TrlGRPOTrainer.get_gamma_weights,
        )  # fmt: skip
        prompt = torch.zeros(B, 1, dtype=torch.long, device=ids.device)
        floats = {k: v.to(x.dtype) if v.is_floating_point() else v for k, v in batch.items()}
        inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": ids, **floats}
        return TrlGRPOTrainer._compute_loss(trainer, None, inputs)

    return loss


def make(device):
    x = torch.randn(B, T, H, device=device, requires_grad=True)
    weight = (0.4 * torch.randn(V, H, device=device)).requires_grad_()
    return x, weight, torch.randint(0, V, (B, T), device=device)


def batch_of(device, inputs, options, off_policy, tools=False, sampler=None):
    """A batch by TRL's names; one of its completions is empty, and ratios lie on both sides of every bound."""
    x, weight, ids = inputs
    mask = (torch.arange(T, device=device) < torch.tensor(LENGTHS, device=device).unsqueeze(1)).long()
    batch = {
        "completion_mask": mask,
        "num_items_in_batch": torch.tensor(17, device=device),
    }
    with torch.no_grad():
        log_p = torch.log_softmax(torch.nn.functional.linear(x, weight) / TEMPERATURE, -1)
        log_prob = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if off_policy:
        batch["old_per_token_logps"] = log_prob + 0.3 * torch.randn(B, T, device=device)
    if options.beta:
        batch["ref_per_token_logps"] = log_prob + 0.3 * torch.randn(B, T, device=device)
    if tools:
        batch["tool_mask"] = (torch.arange(B * T, device=device).view(B, T) % 4 != 1).long()
    if sampler is not None:
        ratio = torch.rand(B, T if sampler == "token" else 1, device=device) + 0.5
        # Where nothing was sampled TRL's ratio is 1.
        trained = mask * batch.get("tool_mask", mask)
        batch["importance_sampling_ratio"] = torch.where(trained > 0, ratio, 1.0) if sampler == "token" else ratio
    return batch


def ours(fn, options, batch, **more):
    """An op, or its reference, as a function of hidden states, weight and ids."""
    names = {
        "completion_mask": "completion_mask", "tool_mask": "tool_mask", "old_per_token_logps": "old_log_prob",
        "ref_per_token_logps": "ref_log_prob", "importance_sampling_ratio": "importance_ratio",
    }  # fmt: skip
    given = {name: batch[key] for key, name in names.items() if key in batch}
    if options.loss_type == "dr_grpo":
        given["max_completion_length"] = LONGEST
    if options.loss_type in ("dapo", "cispo", "vespo"):
        given["num_items"] = batch["num_items_in_batch"]

    def loss(x, weight, ids):
        common = {**given, **more, "options": options, "temperature": TEMPERATURE}
        if fn is grpo_loss:
            return fn(torch.nn.functional.linear(x, weight), ids, batch["advantages"], **common).loss
        return fn(x, weight, ids, batch["advantages"], **common).loss

    return loss


def check(device, options, off_policy, backend="torch", functions=(fused_linear_grpo_loss,), **kinds):
    inputs = make(device)
    batch = batch_of(device, inputs, options, off_policy, **kinds)
    batches = [{**batch, "advantages": torch.tensor(given, device=device)} for given in ADVANTAGES]

    def losses(make_loss):
        return lambda *a: torch.stack([make_loss(batch)(*a) for batch in batches])

    for fn in functions:
        more = {} if fn is fused_linear_grpo_loss_reference else {"backend": backend}
        assert_op_close(
            losses(lambda batch, fn=fn, more=more: ours(fn, options, batch, **more)),
            losses(lambda batch: trl_loss(options, batch)),
            inputs,
            lambda out: (out[0] * torch.tensor([1.0, -0.5, 2.0]).to(out[0])).sum(),
        )


EVERY = (fused_linear_grpo_loss, fused_linear_grpo_loss_reference, grpo_loss)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types_and_levels(device, loss_type, level, off_policy):
    check(device, GrpoOptions(loss_type, level, epsilon_high=0.3), off_policy, functions=EVERY)


OPTIONS = [
    {"beta": 0.1},
    {"beta": 0.1, "bias_corrected_kl": True},
    {"entropy_coef": 0.2},
    {"epsilon_low": 0.1, "epsilon_high": 0.4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_options(device, loss_type, level, options):
    check(device, GrpoOptions(loss_type, level, **options), True)


@pytest.mark.parametrize("delta", [1.1, 1.5])
@pytest.mark.parametrize("loss_type", CLIPS)
def test_two_sided_clips(device, loss_type, delta):
    check(device, GrpoOptions(loss_type, delta=delta), True)


@pytest.mark.parametrize(("tools", "sampler"), [(True, None), (False, "token"), (True, "sequence"), (True, "token")])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tools_and_samplers(device, loss_type, level, tools, sampler):
    check(device, GrpoOptions(loss_type, level, beta=0.05), True, tools=tools, sampler=sampler)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_kernels(device, loss_type, off_policy):
    options = GrpoOptions(loss_type, epsilon_high=0.3, beta=0.1, bias_corrected_kl=True)
    check(device, options, off_policy, backend="triton")


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


def _twice_the_weight(original):
    return lambda *args: 2 * original(*args)


def _no_minimum(original):
    def terms(log_prob, tokens, o):
        found = original(log_prob, tokens, o)
        return found._replace(policy=-found.ratio * tokens.advantage)

    return terms


def _half_the_kl(original):
    def terms(log_prob, tokens, o):
        found = original(log_prob, tokens, o)
        return found._replace(kl=found.kl * 0.5)

    return terms


FAULTS = {
    "every weight doubled": ("_weight_of_each", _twice_the_weight, LOSS_TYPES),
    "the ratio is not clipped": ("grpo_terms", _no_minimum, CLIPS),
    "half of the KL": ("grpo_terms", _half_the_kl, LOSS_TYPES),
}


@pytest.mark.parametrize(
    ("fault", "loss_type"),
    list(itertools.chain.from_iterable(itertools.product([name], on) for name, (_, _, on) in FAULTS.items())),
)
def test_a_fault_that_op_and_reference_share_is_caught(device, monkeypatch, fault, loss_type):
    name, plant, _ = FAULTS[fault]
    monkeypatch.setattr(grpo_formula, name, plant(getattr(grpo_formula, name)))
    with pytest.raises(AssertionError, match="result 0: "):
        check(device, GrpoOptions(loss_type, beta=0.1), True)
