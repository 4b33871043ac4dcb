"""The noise-floor rule: what it must accept and what it must refuse, on curves made of random numbers."""

import contextlib
import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from npu_trainer_kernels.verify import Curves, K, SummationNoise, judge, judge_samples, variants
from tests.closeness import assert_as_close, rounded

STEPS, TOKENS, EPS = 50, 200, 1e-6


def curves(seed: int, noise: float = EPS, bias: float = 0.0) -> Curves:
    """A run: smooth curves, noise that grows with the steps, and a relative bias."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(values: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        growth = torch.linspace(1, 30, STEPS, dtype=torch.float64).view(-1, *[1] * (values.dim() - 1))
        return values * (1 + bias + noise * drawn * growth)

    steps = torch.linspace(0, 3, STEPS, dtype=torch.float64)
    base = torch.Generator().manual_seed(0)
    log_probs = -4 * torch.rand(STEPS, TOKENS, generator=base, dtype=torch.float64)
    top = torch.arange(TOKENS * 5).view(1, TOKENS, 5).expand(STEPS, -1, -1)
    weight = torch.randn(300, generator=base) * (1 + bias) + 0.1 * noise * torch.randn(300, generator=generator)
    return Curves(
        scalars={
            "loss": noisy(2 + torch.exp(-steps)).tolist(),
            "gradient norm": noisy(1 + 0.3 * torch.sin(9 * steps)).tolist(),
        },
        log_probs=noisy(log_probs).float(),
        top=top,
        gradient_norms=noisy(0.1 + torch.rand(STEPS, 1, generator=base, dtype=torch.float64)),
        parameters={"weight": (weight, torch.finfo(torch.float32).eps)},
    )


UNPATCHED = [curves(seed) for seed in range(6)]


def failed(patched: Curves, precision: str = "fp32") -> set[str]:
    """The names of the checks that fail."""
    return {check.name for check in judge(UNPATCHED, patched, precision).checks if not check.passed}


def test_no_precision_allows_more_than_three_floors() -> None:
    assert set(K) == {"fp32", "bf16", "bf16-autocast"}
    assert all(0 < k <= 3 for k in K.values())


@pytest.mark.parametrize("seed", range(100, 140))
def test_another_run_with_the_same_noise_passes(seed: int) -> None:
    assert not failed(curves(seed))


def test_equal_runs_pass_where_there_is_no_noise_at_all() -> None:
    same = [curves(1, noise=0.0) for _ in range(4)]
    verdict = judge(same[:3], same[3], "fp32")
    assert verdict.passed
    assert verdict.worst.ratio == 0


def test_more_noise_than_the_floor_fails() -> None:
    assert {"loss", "gradient norm", "held-out log-probabilities, by token", "parameters at the end"} <= failed(
        curves(7, noise=30 * EPS)
    )


def test_a_bias_inside_every_steps_noise_is_drift() -> None:
    assert failed(curves(7, noise=0.1 * EPS, bias=40 * EPS)) & {"drift of loss", "drift of gradient norm"}
    small = judge(UNPATCHED, curves(7, bias=25 * EPS), "fp32")
    by_name = {check.name: check for check in small.checks}
    assert by_name["loss"].passed
    assert not by_name["drift of loss"].passed


@pytest.mark.parametrize("name", ["loss", "gradient norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_value_that_is_not_finite_fails(name: str, value: float) -> None:
    patched = curves(7)
    patched.scalars[name][20] = value
    assert name in failed(patched)


def test_a_reference_that_is_not_finite_decides_nothing() -> None:
    reference = curves(0)
    reference.scalars["loss"][3] = math.nan
    verdict = judge([reference, *UNPATCHED[1:]], curves(7), "fp32")
    assert not verdict.passed
    assert "decides nothing" in verdict.failures()[0]


def test_other_top_tokens_fail() -> None:
    patched = curves(7)
    patched.top = patched.top.clone()
    patched.top[30, :5] += 1
    assert failed(patched) == {"held-out top 5"}


def test_one_wrong_parameter_fails_and_is_named() -> None:
    patched = curves(7)
    weight, eps = patched.parameters["weight"]
    patched.parameters["weight"] = (weight + 1e-5, eps)
    verdict = judge(UNPATCHED, patched, "fp32")
    assert any("parameters at the end" in line and "weight" in line for line in verdict.failures())


def test_a_wrong_gradient_of_one_small_parameter_fails_and_is_named() -> None:
    patched = curves(7)
    patched.gradient_norms = patched.gradient_norms * 1.01
    verdict = judge(UNPATCHED, patched, "fp32")
    assert {check.name for check in verdict.checks if not check.passed} == {
        "gradient norm of each parameter",
        "drift of gradient norm of each parameter",
    }
    assert "at weight" in verdict.failures()[0]
    patched.gradient_norms[7] = math.nan
    assert not judge(UNPATCHED, patched, "fp32").passed


def jumped(run: Curves, step: int, size: float) -> Curves:
    """The same run, in which one gradient has jumped at one step by `size` times its noise at the end."""
    norms = run.gradient_norms.clone()
    norms[step] *= 1 + size * EPS * 30
    return replace(run, gradient_norms=norms)


def test_a_jump_of_one_gradient_is_noise_only_where_unpatched_runs_jump_too() -> None:
    name = "gradient norm of each parameter"
    assert name in failed(jumped(curves(7), 40, 20.0))
    alike = [*UNPATCHED[:5], jumped(UNPATCHED[5], 20, 20.0)]
    # The second time it is the reference that has jumped.
    for runs in (alike, alike[::-1]):
        for size, passes in ((20.0, True), (200.0, False)):
            found = {check.name: check for check in judge(runs, jumped(curves(7), 40, size), "fp32").checks}
            assert found[name].passed == passes, (size, str(found[name]))


def test_missing_steps_and_parameters_fail() -> None:
    patched = curves(7)
    patched.scalars["loss"].pop()
    patched.parameters = {}
    assert len(judge(UNPATCHED, patched, "fp32").failures()) == 2


def test_kernels_that_replace_nothing_fail() -> None:
    patched = curves(7)
    patched.replaced = {}
    assert "replaced nothing" in judge(UNPATCHED, patched, "fp32").failures()[0]
    patched.replaced = {"rms_norm": 1}
    assert judge(UNPATCHED, patched, "fp32").passed


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="precision must be one of fp32"):
        judge(UNPATCHED, curves(7), "fp8")
    with pytest.raises(ValueError, match="at least two noisy runs"):
        judge(UNPATCHED[:2], curves(7), "fp32")


def test_variants_begin_with_the_reference_and_end_with_the_kernels() -> None:
    first, *noisy, last = variants(3)
    assert str(first) == "reference"
    assert [v.noise_seed for v in noisy] == [1, 2, 3]
    assert last.patched


def _gradients(dtype: torch.dtype, seed: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 64), nn.SiLU(), nn.Linear(64, 8, bias=False)).to(dtype)
    x, targets = torch.randn(50, 40, dtype=dtype), torch.arange(50) % 8
    with contextlib.nullcontext() if seed is None else SummationNoise(seed):
        y = net(x)
        (y.square().mean(-1).sum() + nn.functional.cross_entropy(y, targets) + y.softmax(-1)[0, 0]).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_changes_rounding_and_nothing_else(dtype: torch.dtype) -> None:
    plain, noisy, again = (_gradients(dtype, seed) for seed in (None, 1, 1))
    for a, b, c in zip(plain, noisy, again, strict=True):
        assert torch.equal(b, c), "the same seed must give the same bits"
        relative = ((a - b).norm() / a.norm()).item()
        assert 0 < relative < 10 * torch.finfo(dtype).eps


def test_noise_reaches_the_loss_itself() -> None:
    logits = torch.randn(60, 700, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(60)
    differing = 0
    for scale in range(1, 9):

        def loss(scale: int = scale) -> torch.Tensor:
            return nn.functional.cross_entropy(scale * logits, targets)

        plain = loss()
        with SummationNoise(1):
            noisy = loss()
        truth = nn.functional.cross_entropy(scale * logits.double(), targets)
        assert_as_close(noisy, plain, truth, f"scale {scale}", functools.partial(rounded, loss))
        differing += int(not torch.equal(noisy, plain))
    assert differing


def test_the_norm_of_bf16_gradients_is_a_bf16_number() -> None:
    runs, patched = [curves(seed, noise=0.0) for seed in range(3)], curves(7, noise=0.0)
    patched.scalars["gradient norm"] = [
        v * (1 + 2**-8 * (-1) ** i) for i, v in enumerate(patched.scalars["gradient norm"])
    ]
    assert not judge(runs, patched, "bf16").passed
    for run in (*runs, patched):
        run.parameters["weight"] = (run.parameters["weight"][0], torch.finfo(torch.bfloat16).eps)
    assert judge(runs, patched, "bf16").passed


def test_noise_differs_between_seeds() -> None:
    one, two = _gradients(torch.float32, 1), _gradients(torch.float32, 2)
    assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_free_runs_are_compared_by_their_means() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = [(0.7 + 0.05 * torch.randn(6, generator=generator)).tolist() for _ in range(20)]
    for patched in rewards[1:]:
        assert judge_samples("reward", rewards[0], patched, "fp32").passed
    assert not judge_samples("reward", rewards[0], [r - 0.5 for r in rewards[1]], "fp32").passed
    assert not judge_samples("reward", rewards[0], [math.nan] * 6, "fp32").passed
    with pytest.raises(ValueError, match="even number of runs"):
        judge_samples("reward", rewards[0][:5], rewards[1], "fp32")
