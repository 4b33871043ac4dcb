"""Faults that would be easy to make, planted one by one: the ops' own tests must fail.

A fault sits in the op, or in what it has in common with its reference. Which test it is that sees it is said beside it;
that the same test passes without the fault is that test's own business.
"""

from importlib import import_module

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from npu_trainer_kernels import ops
from npu_trainer_kernels.ops.head import chunks as chunks_module
from npu_trainer_kernels.ops.head import divergence, engine, gradient, statistics
from npu_trainer_kernels.ops.head import head_options as options_module
from npu_trainer_kernels.ops.head.head_options import HeadOptions
from npu_trainer_kernels.ops.head.linear_logprob import OUTPUTS
from npu_trainer_kernels.ops.norms import rms_kernels
from tests.ops import (
    test_head,
    test_linear_cross_entropy,
    test_linear_divergence,
    test_linear_logprob,
    test_linear_topk_divergence,
    test_rms_norm,
    test_rope,
)

# The package's names for these are the functions.
cross_entropy, linear_divergence, topk, rms_norm, rope = (
    import_module(f"npu_trainer_kernels.ops.{name}")
    for name in (
        "head.linear_cross_entropy",
        "head.linear_divergence",
        "head.linear_topk_divergence",
        "norms.rms_norm",
        "rope",
    )
)
USUAL_SIZE = 128


# ---------------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------------


def sum_in_16_bits(monkeypatch):
    original = chunks_module._accumulate

    def accumulate(total, a, b):
        original(total, a, b)
        total.copy_(total.to(a.dtype))

    monkeypatch.setattr(chunks_module, "_accumulate", accumulate)


def sum_in_the_result(monkeypatch):
    original = chunks_module._WeightSum.__init__
    monkeypatch.setattr(
        chunks_module._WeightSum, "__init__", lambda self, weight, in_result: original(self, weight, True)
    )


def temperature_twice(monkeypatch):
    original = HeadOptions.factors.fget

    def factors(self):
        inner, outer = original(self)
        return (inner / self.temperature, outer) if self.softcap is None else (inner, outer / self.temperature)

    monkeypatch.setattr(HeadOptions, "factors", property(factors))


def scale_after_the_cap(monkeypatch):
    def factors(self):
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return 1.0 / self.softcap, self.logit_scale * self.softcap / self.temperature

    monkeypatch.setattr(HeadOptions, "factors", property(factors))


def slope_without_temperature(monkeypatch):
    """d/dl of cap tanh(l / cap) instead of that over T, in both kernels that form a gradient and in torch."""

    def wrapped(original, options_at):
        def step(logits, *args):
            result = original(logits, *args)
            options = args[options_at]
            if options.softcap is not None:
                logits.mul_(options.temperature)
            return result

        return step

    monkeypatch.setattr(engine, "gradient_in_place", wrapped(engine.gradient_in_place, -3))
    monkeypatch.setattr(engine, "statistics_and_gradient", wrapped(engine.statistics_and_gradient, -3))


def smoothing_without_its_mean(monkeypatch):
    original = engine.coefficients
    monkeypatch.setattr(engine, "coefficients", lambda *args: original(*args)._replace(c=None))


def smoothing_over_one_id_too_few(monkeypatch):
    original = engine.coefficients
    monkeypatch.setattr(engine, "coefficients", lambda d, like, u: original(d, like, u and 1 / (1 / u - 1)))


def smoothing_halved(monkeypatch):
    original = cross_entropy._Loss.of_rows

    def of_rows(self, s, chunk):
        if not self.label_smoothing:
            return original(self, s, chunk)
        plain = -s.log_prob if self.targets.weights is None else -s.log_prob * self.targets.weights[chunk]
        return 0.5 * (plain + original(self, s, chunk))

    monkeypatch.setattr(cross_entropy._Loss, "of_rows", of_rows)


def in_divergence_step(change):
    """Changes the arguments of the step that computes divergences and their gradients, in both backends; `change` may
    return a function that is called with the logits afterwards."""

    def plant(monkeypatch):
        original = divergence._divergence_step

        def step(*args):
            given = list(args)
            after = change(given)
            found = original(*given)
            if after is not None and args[5] is not None:
                after(args[0])
            return found

        monkeypatch.setattr(divergence, "_divergence_step", step)

    return plant


@in_divergence_step
def divergence_gradient_without_temperature(args):
    return lambda logits: logits.mul_(args[6].options.temperature)


@in_divergence_step
def beta_on_the_wrong_side(args):
    args[6] = args[6]._replace(beta=1.0 - args[6].beta)


@in_divergence_step
def teacher_shifted_by_a_row(args):
    args[1] = args[1].roll(1, 0)


@in_divergence_step
def teacher_with_the_students_temperature(args):
    args[6] = args[6]._replace(teacher=args[6].options)


@in_divergence_step
def gradient_without_its_row_sum(args):
    args[4] = None if args[4] is None else torch.zeros_like(args[4])


def masked_tokens_counted(monkeypatch):
    monkeypatch.setattr(linear_divergence, "valid_rows", lambda mask, ignored: None)


def masked_tokens_in_the_mean(monkeypatch):
    original = linear_divergence.Reduction.scale
    monkeypatch.setattr(linear_divergence.Reduction, "scale", lambda self, rows, *others: original(self, None, *others))


def mixture_of_one_side(monkeypatch):
    """log m = log((1 - beta) p), without the teacher's side."""
    original = divergence.Mixture.logs.fget
    monkeypatch.setattr(divergence.Mixture, "logs", property(lambda self: (-1e4, original(self)[1])))


def on_support(change):
    """Changes the arguments of the divergence on a support: log p, log q, the members, beta, and the tail."""

    def plant(monkeypatch):
        original = topk._on_support
        monkeypatch.setattr(topk, "_on_support", lambda *args: original(*change(*args)))

    return plant


def tail_forgotten(log_p, log_q, member, beta, add_tail):
    return log_p, log_q, member, beta, False


def padding_counted(log_p, log_q, member, *others):
    return log_p, log_q.clamp(min=-20.0), torch.ones_like(member), *others


def tail_without_its_gradient(monkeypatch):
    original = topk._rest
    monkeypatch.setattr(topk, "_rest", lambda total: original(total).detach())


def duplicates_counted_twice(monkeypatch):
    monkeypatch.setattr(topk, "first_places", lambda ids: torch.arange(ids.shape[1]).expand_as(ids))


def padding_before_its_id(monkeypatch):
    """The first id of its kind is one that is left out."""
    original = topk.first_places
    monkeypatch.setattr(topk, "first_places", lambda ids: original(ids.clamp(min=0)))


def duplicates_overwritten(monkeypatch):
    monkeypatch.setattr(gradient, "_added_up", lambda b, columns: b)


def topk_gradient_without_temperature(monkeypatch):
    original = engine.gradient_in_place

    def gradient_in_place(logits, ids, weights, softmax, k, options, *others):
        original(logits, ids, weights, softmax, k, options, *others)
        logits.mul_(options.temperature)

    monkeypatch.setattr(engine, "gradient_in_place", gradient_in_place)


def epsilon_in_bf16(factor):
    """In the op alone."""

    def plant(monkeypatch):
        original = rms_norm.norm_forward

        def norm_forward(x, residual, weight, eps, *args):
            return original(x, residual, weight, eps * factor if x.dtype == torch.bfloat16 else eps, *args)

        monkeypatch.setattr(rms_norm, "norm_forward", norm_forward)

    return plant


def shared_epsilon_in_bf16(factor):
    """In op and reference alike."""

    def plant(monkeypatch):
        original = rms_kernels._normed

        def normed(s, weight, eps, *args):
            return original(s, weight, eps * factor if s.dtype == torch.bfloat16 else eps, *args)

        monkeypatch.setattr(rms_kernels, "_normed", normed)

    return plant


def rotation_of_the_usual_size(name):
    """Where heads have 128 elements the last of them is not rotated."""

    def plant(monkeypatch):
        original = getattr(rope, name)

        def rotated(x, *args):
            found = original(x, *args)
            if x.shape[-1] == USUAL_SIZE:
                for y, given in zip(found, (x, args[0]), strict=True) if isinstance(found, tuple) else [(found, x)]:
                    y[..., -1] = given[..., -1]
            return found

        monkeypatch.setattr(rope, name, rotated)

    return plant


# ---------------------------------------------------------------------------------------------------------------------
# The tests that see them
# ---------------------------------------------------------------------------------------------------------------------


def chunks(device, backend, monkeypatch):
    test_head.test_many_chunks_are_as_exact_as_one(device, monkeypatch, "planned", backend, torch.bfloat16)


def chunks_of_backward(device, backend, monkeypatch):
    test_head.test_many_chunks_are_as_exact_as_one(device, monkeypatch, "recompute", backend, torch.bfloat16)


def log_prob(**options):
    def test(device, backend, monkeypatch):
        test_linear_logprob.test_matches_reference(device, backend, torch.float32, (0,), options)

    return test


def log_prob_in_one_kernel(**options):
    def test(device, backend, monkeypatch):
        test_head.test_gradient_formed_before_its_factor_is_known(device, monkeypatch, False, options)

    return test


def smoothed(**options):
    def test(device, backend, monkeypatch):
        test_linear_cross_entropy.test_matches_reference(device, backend, torch.float32, 8, options)

    return test


def diverged(beta, mask="none", reduction="mean", **options):
    def test(device, backend, monkeypatch):
        sizes = (test_linear_divergence.V,) * 2
        test_linear_divergence.test_matches_reference(
            device, backend, torch.float32, beta, options, reduction, mask, sizes
        )

    return test


def of_support(beta, kind="distinct", tail=True, mask="none", reduction="mean", **options):
    def test(device, backend, monkeypatch):
        test_linear_topk_divergence.test_matches_reference(
            device, backend, beta, tail, kind, options, torch.float32, reduction, mask
        )

    return test


def small_rows(device, backend, monkeypatch):
    test_rms_norm.test_rows_in_which_epsilon_counts(device, backend, torch.bfloat16, {"casting": "llama"}, 1e-6)


def bits_of_small_rows(device, backend, monkeypatch):
    bf16 = (torch.bfloat16, torch.bfloat16)
    test_rms_norm.test_forward_in_torch_has_the_bits_of_transformers(LlamaRMSNorm, {"casting": "llama"}, bf16, 1e-3)


def rotations(device, backend, monkeypatch):
    test_rope.test_matches_reference(device, backend, torch.bfloat16, USUAL_SIZE, 4)


def bits_of_rotations(device, backend, monkeypatch):
    test_rope.test_forward_in_torch_has_the_bits_of_transformers(torch.bfloat16, USUAL_SIZE)


BOTH = ("torch", "triton")
CAPPED = {"softcap": 3.0, "temperature": 1.7}
# name -> (what plants it, the test that sees it, with which backends)
FAULTS = {
    "sum of chunks in 16 bits": (sum_in_16_bits, chunks, BOTH),
    "sum of chunks in 16 bits, backward": (sum_in_16_bits, chunks_of_backward, ("torch",)),
    "sum of chunks in the result": (sum_in_the_result, chunks, ("torch",)),
    "temperature twice": (temperature_twice, log_prob(temperature=0.7), BOTH),
    "temperature twice, with a cap": (temperature_twice, log_prob(softcap=4.0, temperature=1.3), BOTH),
    "temperature twice, in one kernel": (temperature_twice, log_prob_in_one_kernel(temperature=0.6), ("triton",)),
    "scale after the cap": (scale_after_the_cap, log_prob(logit_scale=0.5, softcap=2.0), BOTH),
    "slope without temperature": (slope_without_temperature, log_prob(softcap=4.0, temperature=1.3), BOTH),
    "slope without temperature, in one kernel": (
        slope_without_temperature, log_prob_in_one_kernel(**CAPPED), ("triton",),
    ),
    "smoothing without its mean": (smoothing_without_its_mean, smoothed(label_smoothing=0.2), BOTH),
    "smoothing over one id too few": (smoothing_over_one_id_too_few, smoothed(label_smoothing=0.2), BOTH),
    "smoothing halved": (smoothing_halved, smoothed(label_smoothing=0.2), BOTH),
    "smoothing halved, of each token": (smoothing_halved, smoothed(reduction="none", label_smoothing=0.1), BOTH),
    **{
        f"{name}, beta {beta}": (plant, diverged(beta, **options), BOTH)
        for beta in (0, 0.3, 1)
        for name, plant, options in (
            ("divergence without its temperature", divergence_gradient_without_temperature, {"temperature": 0.6}),
            ("teacher shifted by a row", teacher_shifted_by_a_row, {}),
            ("teacher with the student's options", teacher_with_the_students_temperature, {"teacher_temperature": 2.0}),
            ("masked tokens counted", masked_tokens_counted, {"mask": "some", "reduction": "sum"}),
            ("masked tokens in the mean", masked_tokens_in_the_mean, {"mask": "some"}),
        )
    },
    **{
        f"{name}, beta {beta}": (plant, of_support(beta, **options), BOTH)
        for beta in (0, 0.3, 1)
        for name, plant, options in (
            ("tail forgotten", on_support(tail_forgotten), {}),
            ("tail without its gradient", tail_without_its_gradient, {}),
            ("duplicates counted twice", duplicates_counted_twice, {"kind": "duplicates"}),
            ("duplicates overwritten", duplicates_overwritten, {"kind": "duplicates", "tail": False}),
            ("padding counted", on_support(padding_counted), {"kind": "padded"}),
            ("padding counted, no tail", on_support(padding_counted), {"kind": "padded", "tail": False}),
            ("padding before its id", padding_before_its_id, {"kind": "padded with id 0 before it"}),
            ("support without its temperature", topk_gradient_without_temperature, {"temperature": 0.6}),
            (
                "support without its temperature, of each token", topk_gradient_without_temperature,
                {"temperature": 0.6, "reduction": "none"},
            ),
        )
    },
    "beta on the wrong side": (beta_on_the_wrong_side, diverged(0.3), BOTH),
    "beta on the wrong side, of one end": (beta_on_the_wrong_side, diverged(1), BOTH),
    "mixture of one side": (mixture_of_one_side, diverged(0.3), BOTH),
    "mixture of one side, of each token": (mixture_of_one_side, diverged(0.5, reduction="none"), BOTH),
    "divergence's gradient without its sum": (gradient_without_its_row_sum, diverged(0.3, reduction="none"), BOTH),
    "epsilon doubled in bf16": (epsilon_in_bf16(2.0), small_rows, BOTH),
    "epsilon dropped in bf16": (epsilon_in_bf16(0.0), small_rows, BOTH),
    "epsilon doubled in bf16, reference too": (shared_epsilon_in_bf16(2.0), bits_of_small_rows, ("torch",)),
    "epsilon dropped in bf16, reference too": (shared_epsilon_in_bf16(0.0), bits_of_small_rows, ("torch",)),
    "rotation of 128": (rotation_of_the_usual_size("_forward"), rotations, BOTH),
    "rotation of 128, reference too": (rotation_of_the_usual_size("_turned"), bits_of_rotations, ("torch",)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "backend"), [(name, b) for name, (_, _, on) in FAULTS.items() for b in on])
def test_a_planted_fault_is_caught(device, monkeypatch, name, backend):
    plant, test, _ = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test(device, backend, monkeypatch)


def test_references_of_the_head_share_nothing_with_it(monkeypatch):
    """They work when all that the engine does with logits is gone."""

    def gone(*args, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr(HeadOptions, "factors", property(gone))
    for module in (engine, options_module, statistics):
        for name, value in list(vars(module).items()):
            own = getattr(value, "__module__", "").startswith("npu_trainer_kernels.ops.head.engine")
            if callable(value) and own and not isinstance(value, type):
                monkeypatch.setattr(module, name, gone)
    x, weight, ids = torch.randn(5, 8), torch.randn(19, 8), torch.arange(5)
    transform = {"softcap": 2.0, "logit_scale": 0.5}
    ops.linear_logprob_reference(x, weight, ids, temperature=0.7, outputs=OUTPUTS, **transform)
    ops.linear_divergence_reference(x, weight, 2 * x, weight, beta=0.5, temperature=0.7, **transform)
    taught = ids.unsqueeze(1), torch.full((5, 1), -1.0)
    ops.linear_topk_divergence_reference(x, weight, *taught, beta=0.5, temperature=0.7, **transform)
    ops.linear_cross_entropy_reference(x, weight, ids, label_smoothing=0.1, z_loss=0.1, **transform)
    one = torch.ones(1)
    ops.fused_linear_grpo_loss_reference(
        x.unsqueeze(0), weight, ids.unsqueeze(0), one, temperature=0.7, **transform, entropy=True
    )
    ops.grpo_loss_reference(torch.randn(1, 5, 19), ids.unsqueeze(0), one, temperature=0.7)
