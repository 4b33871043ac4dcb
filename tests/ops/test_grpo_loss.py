"""grpo_loss and fused_linear_grpo_loss against their references: every loss type, level, option and mask.

That the formula itself is TRL's is tested with TRL's own trainer, in tests/training.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ops import (
    GrpoOptions,
    fused_linear_grpo_loss,
    fused_linear_grpo_loss_reference,
    grpo_loss,
    grpo_loss_reference,
    linear_logprob_reference,
)
from npu_trainer_kernels.ops.head import grpo_formula
from npu_trainer_kernels.ops.head.grpo_formula import LEVELS, LOSS_TYPES, GrpoTokens
from npu_trainer_kernels.ops.launch import _run, use_launcher
from tests.closeness import assert_op_close

B, T, H, V = 4, 33, 20, 131
TEMPERATURE = 0.9
LENGTHS = [T, 14, 0, 21]


def make(device, dtype=torch.float32):
    x = torch.randn(B, T, H, device=device, dtype=dtype).requires_grad_()
    weight = (0.5 * torch.randn(V, H, device=device)).to(dtype).requires_grad_()
    return x, weight, torch.randint(0, V, (B, T), device=device)


def batch(device, inputs, off_policy=True, beta=0.0, loss_type="dapo"):
    """Masks with completions of several lengths, one of them empty; ratios on both sides of the clip, none of them so
    large that one token's rounding decides the whole comparison."""
    lengths = torch.tensor(LENGTHS, device=device)
    given = {"completion_mask": (torch.arange(T, device=device) < lengths.unsqueeze(1)).long()}
    x, weight, ids = inputs
    with torch.no_grad():
        log_prob = linear_logprob_reference(x.float(), weight.float(), ids, temperature=TEMPERATURE).log_prob
    if off_policy:
        given["old_log_prob"] = log_prob + 0.3 * torch.randn(B, T, device=device)
    if beta:
        given["ref_log_prob"] = log_prob + 0.3 * torch.randn(B, T, device=device)
    if loss_type == "dr_grpo":
        given["max_completion_length"] = 11
    return given


def check(device, backend, options, inputs, given, advantages=None, entropy=False):
    x, weight, ids = inputs
    if advantages is None:
        # Of both signs, but no loss whose terms cancel: what is left of such a one is their rounding.
        advantages = torch.tensor([1.1, -0.4, 0.7, 0.9], device=device)
    common = {**given, "options": options, "temperature": TEMPERATURE, "entropy": entropy}

    def loss_first(outputs):
        return 3.0 * outputs[0]

    def only_tensors(fn):
        return lambda *a, **k: [t for t in fn(*a, **k) if t is not None]

    # The fp64 run of the reference keeps the fp32 numbers of the batch: they are data, not rounding.
    assert_op_close(
        only_tensors(lambda x, w, i: fused_linear_grpo_loss(x, w, i, advantages, backend=backend, **common)),
        only_tensors(lambda x, w, i: fused_linear_grpo_loss_reference(x, w, i, advantages, **common)),
        [x, weight, ids],
        loss_first,
    )
    logits = torch.nn.functional.linear(x, weight).detach().requires_grad_()
    assert_op_close(
        only_tensors(lambda z, i: grpo_loss(z, i, advantages, backend=backend, **common)),
        only_tensors(lambda z, i: grpo_loss_reference(z, i, advantages, **common)),
        [logits, ids],
        loss_first,
    )


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types_and_levels(device, loss_type, level, off_policy):
    inputs = make(device)
    given = batch(device, inputs, off_policy, loss_type=loss_type)
    check(device, "torch", GrpoOptions(loss_type, level), inputs, given)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (GrpoOptions(), torch.float32),
        (GrpoOptions("grpo", "sequence", beta=0.1, bias_corrected_kl=True), torch.float32),
        # Loss types without a clip: at one, rounding of a bf16 logit decides which side a token is on.
        (GrpoOptions("sapo", entropy_coef=0.1), torch.bfloat16),
        (GrpoOptions("vespo"), torch.float16),
    ],
    ids=str,
)
def test_kernels(device, options, dtype):
    inputs = make(device, dtype)
    check(device, "triton", options, inputs, batch(device, inputs, beta=options.beta))


@pytest.mark.parametrize(
    "options",
    [
        GrpoOptions(epsilon_low=0.1, epsilon_high=0.4),
        GrpoOptions(delta=1.5),
        GrpoOptions("grpo", beta=0.05),
        GrpoOptions("grpo", beta=0.05, bias_corrected_kl=True),
        GrpoOptions("grpo", "sequence", beta=0.05, bias_corrected_kl=True),
        GrpoOptions("cispo", "sequence", epsilon_high=2.0),
        GrpoOptions("bnpo", entropy_coef=0.2),
        GrpoOptions("sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=0.5),
        GrpoOptions("vespo", vespo_k_pos=1.0, vespo_lambda_neg=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("off_policy", [False, True])
def test_options(device, options, off_policy):
    inputs = make(device)
    check(device, "torch", options, inputs, batch(device, inputs, off_policy, options.beta), entropy=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_masks_ratios_and_advantages_per_token(device, level, off_policy, loss_type):
    options = GrpoOptions(loss_type, level, entropy_coef=0.1)
    inputs = make(device)
    given = batch(device, inputs, off_policy)
    given["completion_mask"] = given["completion_mask"].bool()
    given["tool_mask"] = (torch.rand(B, T, device=device) > 0.3).to(torch.uint8)
    given["entropy_mask"] = (torch.rand(B, T, device=device) > 0.5).float()
    given["importance_ratio"] = torch.rand(B, T, device=device) + 0.5
    given["num_items"] = 17
    check(device, "torch", options, inputs, given, torch.randn(B, T, device=device))
    given["importance_ratio"] = torch.rand(B, device=device) + 0.5
    check(device, "torch", options, inputs, given, torch.randn(B, 1, device=device))


def test_masked_tokens_are_not_projected(device, monkeypatch):
    from npu_trainer_kernels.ops.head import chunks

    rows = []
    original = chunks._project

    def project(x, *args):
        rows.append(x.shape[0])
        return original(x, *args)

    monkeypatch.setattr(chunks, "_project", project)
    x, weight, ids = make(device)
    given = batch(device, (x, weight, ids))
    out = fused_linear_grpo_loss(x, weight, ids, torch.randn(B, device=device), **given)
    out.loss.backward()
    assert rows == [sum(LENGTHS)]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_needs_no_second_projection_at_any_chunk_size(device, monkeypatch, loss_type, level):
    """The gradient is right although chunks end inside completions."""
    from npu_trainer_kernels.ops.head import chunks

    rows = []
    original = chunks._project

    def project(x, *args):
        rows.append(x.shape[0])
        return original(x, *args)

    monkeypatch.setattr(tiling, "head_chunk", lambda *args: 20)
    monkeypatch.setattr(chunks, "_project", project)
    options = GrpoOptions(loss_type, level)
    x, weight, ids = make(device)
    advantages = torch.randn(B, T, device=device)
    given = batch(device, (x, weight, ids), off_policy=False, loss_type=loss_type)
    assert_op_close(
        lambda *a: fused_linear_grpo_loss(*a, advantages, options=options, **given).loss,
        lambda *a: fused_linear_grpo_loss_reference(*a, advantages, options=options, **given).loss,
        [x, weight, ids],
        lambda outputs: outputs[0],
    )
    assert rows == [20, 20, 20, 8]


class Spy:
    """A launcher that notes the kernels and, unless told otherwise, runs them."""

    def __init__(self, runs=True):
        self.launched, self.runs = [], runs

    def __call__(self, kernel, *launch):
        self.launched.append(kernel.__name__)
        if self.runs:
            _run(kernel, *launch)


# Below, between and above the bounds and deltas below; one ratio is exactly 1.
RATIOS = (0.3, 0.7, 0.85, 1.0, 1.2, 1.35, 1.5, 1.9, 3.0)


def token_numbers(device, old=True, reference=True, policy_weight=True, times=2):
    """log_prob, advantage, weight, old, reference and policy_weight: every ratio with advantages of both signs and
    0, several times. Some tokens have no weight."""
    pairs = list(itertools.product(RATIOS, (-1.3, 0.0, 0.7)))
    ratio, advantage = torch.tensor(pairs * times, device=device).unbind(1)
    n = len(ratio)
    log_prob = -3 * torch.rand(n, device=device)
    # The logarithm of 1 is exactly 0.
    return [
        log_prob, advantage, torch.rand(n, device=device) * (torch.arange(n, device=device) % 5 > 0),
        log_prob - ratio.log() if old else None, log_prob + torch.randn(n, device=device) if reference else None,
        2 * torch.rand(n, device=device) if policy_weight else None,
    ]  # fmt: skip


def token_gradient(options, backend):
    """`token_gradient` as a function of what `token_numbers` gives."""

    def gradient(log_prob, advantage, weight, old, reference, policy_weight):
        nothing = torch.zeros(len(log_prob), dtype=torch.long, device=log_prob.device)
        tokens = GrpoTokens(
            advantage, weight, torch.ones_like(weight), old, reference, policy_weight, None, None, nothing,
            nothing[:1] + len(nothing),
        )  # fmt: skip
        return grpo_formula.token_gradient(log_prob, tokens, options, backend)

    return gradient


FORMS = [
    GrpoOptions("grpo", epsilon_high=0.4),
    # Less than the upper bound: the delta, too, takes the gradient away.
    GrpoOptions("dapo", epsilon_high=0.4, delta=1.3),
    GrpoOptions("bnpo", epsilon_high=0.4, delta=1.7),
    # A ratio of 1 is on every bound, where the gradient passes; or beyond delta, where the clipped one's does.
    GrpoOptions("dapo", epsilon_low=0.0, delta=1.0),
    GrpoOptions("dapo", epsilon_low=0.0, delta=0.5),
    GrpoOptions("cispo", epsilon_high=1.4),
    GrpoOptions("sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=0.5),
]


@pytest.mark.parametrize("policy_weight", [False, True])
@pytest.mark.parametrize("kl", [None, "plain", "corrected"])
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_the_kernel_for_the_arithmetic_is_the_formula(device, options, off_policy, kl, policy_weight):
    options = replace(options, beta=0.3 if kl else 0.0, bias_corrected_kl=kl == "corrected")
    numbers = token_numbers(device, off_policy, kl is not None, policy_weight)
    spy = Spy()
    with use_launcher(spy):
        assert_op_close(token_gradient(options, "triton"), token_gradient(options, "torch"), numbers)
    assert spy.launched == ["_token_kernel"]


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("n", [1, 16, 45])
def test_blocks_and_tails_of_the_kernel_for_the_arithmetic(device, monkeypatch, n, programs):
    """Blocks are shared out to fewer programs, as on an NPU."""
    monkeypatch.setattr(tiling, "programs", lambda tasks, spec: programs)
    monkeypatch.setattr(tiling, "token_block", lambda spec: tiling.Block(16))
    options = GrpoOptions(beta=0.3, delta=1.7)
    # Every third number: strided, as a column of a tensor is.
    numbers = [t[:n] if i % 2 else t.repeat_interleave(3)[::3][:n] for i, t in enumerate(token_numbers(device))]
    assert_op_close(token_gradient(options, "triton"), token_gradient(options, "torch"), numbers)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_kernel_for_the_arithmetic_is_for_losses_of_a_token(device, loss_type, level):
    spy = Spy(runs=False)
    with use_launcher(spy):
        token_gradient(GrpoOptions(loss_type, level), "triton")(*token_numbers(device, reference=False))
    assert spy.launched == ["_token_kernel"] * (level == "token" and loss_type != "vespo")


@pytest.mark.parametrize(
    ("options", "off_policy", "each_chunk"),
    [
        (GrpoOptions("grpo", beta=0.1, bias_corrected_kl=True), True, 1),
        # One ratio for a completion, which on-policy is its tokens' own.
        (GrpoOptions("grpo", "sequence"), False, 1),
        (GrpoOptions("grpo", entropy_coef=0.1), True, 0),
    ],
    ids=str,
)
def test_one_launch_does_the_arithmetic_of_a_chunk(device, monkeypatch, options, off_policy, each_chunk):
    monkeypatch.setattr(tiling, "head_chunk", lambda *args: 20)
    inputs = make(device)
    given = batch(device, inputs, off_policy, options.beta)
    advantages, spy = torch.randn(B, device=device), Spy()
    with use_launcher(spy):
        assert_op_close(
            lambda *a: fused_linear_grpo_loss(*a, advantages, options=options, backend="triton", **given).loss,
            lambda *a: fused_linear_grpo_loss_reference(*a, advantages, options=options, **given).loss,
            inputs,
            lambda outputs: outputs[0],
        )
    assert spy.launched.count("_token_kernel") == each_chunk * len(range(0, sum(LENGTHS), 20))


def test_everything_masked_is_a_zero_that_can_be_differentiated(device, backend):
    x, weight, ids = make(device)
    nothing = torch.zeros(B, T, device=device)
    out = fused_linear_grpo_loss(x, weight, ids, torch.ones(B, device=device), completion_mask=nothing, backend=backend)
    gx, gw = torch.autograd.grad(out.loss, (x, weight))
    assert out.loss.item() == 0.0
    assert not gx.any()
    assert not gw.any()


def test_logits_of_a_masked_token_may_be_anything(device, backend):
    logits = torch.randn(B, T, V, device=device)
    mask = torch.arange(T, device=device).expand(B, T) < 5
    clean, dirty = (logits.where(mask.unsqueeze(-1), value).requires_grad_() for value in (0.0, math.inf))
    ids, advantages = torch.randint(0, V, (B, T), device=device), torch.randn(B, device=device)
    for z in (clean, dirty):
        grpo_loss(z, ids, advantages, completion_mask=mask, backend=backend).loss.backward()
    assert clean.grad.any()
    assert torch.equal(clean.grad, dirty.grad)


def test_logits_that_share_memory(device, backend):
    one = torch.randn(1, 1, V, device=device).requires_grad_()
    ids, advantages = torch.zeros(B, 1, dtype=torch.long, device=device), torch.randn(B, device=device)
    grads = []
    for z in (one.expand(B, 1, V), one.repeat(B, 1, 1)):
        loss = grpo_loss(z, ids, advantages, backend=backend).loss
        grads.append(torch.autograd.grad(loss, one)[0])
    assert grads[0].any()
    assert torch.equal(*grads)


BAD = [
    ({"options": {"loss_type": "ppo"}}, "loss_type must be one of grpo, .*; got 'ppo'"),
    ({"options": {"importance_level": "word"}}, "importance_level must be one of token, sequence"),
    ({"options": {"delta": 2.0, "loss_type": "sapo"}}, "delta=2.0 has no effect with loss_type='sapo'"),
    ({"options": {"bias_corrected_kl": True}}, "bias_corrected_kl=True has no effect with beta=0.0"),
    ({"options": {"beta": 0.1}}, "ref_log_prob must be given exactly when beta is not 0; got beta=0.1"),
    ({"options": {"loss_type": "dr_grpo"}}, "max_completion_length must be given exactly for"),
    ({"options": {"loss_type": "grpo"}, "num_items": 3}, "num_items has no effect with loss_type='grpo'"),
    ({"completion_mask": torch.ones(B, T - 1)}, r"completion_mask must have ids' shape \[4, 33\]; got \[4, 32\]"),
    ({"old_log_prob": torch.ones(B)}, r"old_log_prob must have shape \[4, 33\]; got \[4\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input(change, message):
    x, weight, ids = make(torch.device("cpu"))
    rest = {k: v for k, v in change.items() if k != "options"}
    with pytest.raises(ValueError, match=message):
        fused_linear_grpo_loss(x, weight, ids, torch.ones(B), options=GrpoOptions(**change.get("options", {})), **rest)


def test_vespo_reads_no_ratio_of_padding(device, backend):
    """Its ratios are multiplied over a completion: what stands at padding is no part of that."""
    logits = torch.randn(B, T, V, device=device).requires_grad_()
    ids, advantages = torch.randint(0, V, (B, T), device=device), torch.randn(B, device=device)
    mask = (torch.arange(T, device=device) < torch.tensor(LENGTHS, device=device).unsqueeze(1)).long()
    ratio = torch.rand(B, T, device=device) + 0.5
    runs = []
    for at_padding in (1.0, 5.0):
        given = torch.where(mask.bool(), ratio, torch.full_like(ratio, at_padding))
        loss = grpo_loss(
            logits, ids, advantages, completion_mask=mask, importance_ratio=given,
            options=GrpoOptions(loss_type="vespo"), backend=backend,
        ).loss  # fmt: skip
        runs.append([loss, *torch.autograd.grad(loss, logits)])
    assert runs[0][1].any()
    assert all(map(torch.equal, *runs))
