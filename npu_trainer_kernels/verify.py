"""Tests whether a model trains the same with the kernels: the noise-floor rule, and `verify` for any model.

Two correct implementations of one training step differ by rounding, and training amplifies the difference. So neither
equality nor a fixed tolerance is a valid criterion. Instead this module measures the effect of rounding on *this* run
on *this* machine:

1. It trains several times without the kernels. The first run is the reference. In the others every matrix product and
   every sum, forward and backward, adds its terms in another order (`SummationNoise`). In exact arithmetic the result
   is the same; another BLAS or another tile size has the same effect.
2. The **noise floor** of a quantity at a step is the largest distance between any two of these runs within `WINDOW`
   steps, and at least the resolution of the quantity's number format.
3. It trains with the kernels. At every step, for every quantity, the distance from the reference may be at most
   `K[precision]` noise floors.
4. **Drift**: it averages the signed distance, in noise floors, over the whole curve. A bias that is hidden in the noise
   of each step is visible in the average. The average may be at most K times the largest average between two unpatched
   runs; that limit is at least the effect of one unit in the last place per step, up or down at random.
5. **Jumps**: sometimes rounding alone moves the gradient of one weight at one step far from its value in all other
   runs, so this distance is not normally distributed. Therefore the gradient norm of each parameter has no floor at
   each step: its largest distance over all steps, in floors, may be at most K times the largest such distance of an
   unpatched run of the same training from the others.

The quantities are: loss, gradient norm (of all parameters and of each), mean log-probability of a fixed held-out batch,
its log-probabilities token by token (root mean square), its `TOP_K` most likely tokens (fraction of positions that
differ), evaluation loss, and at the end every parameter (root mean square, tensor by tensor).

Reason for K = 3 and five noisy runs: if a quantity were one normal number per run, the worst case of correlation, a
correct run would exceed 3 times the range of six others with probability 0.001; the window and the averages over tokens
and elements make it far less likely. The rule always detects deviations of about 7 standard deviations of rounding; an
error of one percent of a gradient is thousands of them in fp32.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .callback import NpuKernelsCallback
from .patching import Report
from .support.foreign import dtype_argument
from .support.switch import RUN

__all__ = [
    "NOISE_RUNS",
    "PRECISIONS",
    "Check",
    "Curves",
    "K",
    "SummationNoise",
    "Variant",
    "Verdict",
    "judge",
    "judge_runs",
    "judge_samples",
    "judge_scalars",
    "on_one_device",
    "record",
    "variants",
    "verify",
]

Arguments = TypeVar("Arguments", bound=TrainingArguments)

# The allowed distance in noise floors, per precision. It is defined only here.
K = {"fp32": 3.0, "bf16": 3.0, "bf16-autocast": 3.0}
PRECISIONS = tuple(K)
NOISE_RUNS = 5
WINDOW = 5
TOP_K = 5
# The maximum per tensor: enough for its root mean square, and five runs of a large model fit in memory.
MAX_ELEMENTS = 1 << 16


# ---------------------------------------------------------------------------------------------------------------------
# Noise: the same arithmetic with sums in another order
# ---------------------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten
# These operators sum along one dimension.
_SOFTMAXES = (_aten._softmax.default, _aten._log_softmax.default)
_SOFTMAX_BACKWARDS = (_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
_NO_REDUCTION = 0


class SummationNoise(TorchDispatchMode):
    """Computes matrix products as two partial products, and sums in reverse order, including those in a softmax or a
    cross-entropy.

    Each call draws a new position for the split, from the seed. The mode is below autograd and autocast, so it affects
    forward and backward of every module, and each partial product is rounded to the dtype in use, as in a split-K
    kernel.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.mm.default, _aten.bmm.default) and not kwargs:
            return self._product(func, *args)
        if func is _aten.addmm.default and not kwargs:
            return self._product(_aten.mm.default, args[1], args[2]) + args[0]
        if func in (_aten.sum.dim_IntList, _aten.mean.dim) and args[1]:
            return func(args[0].flip(args[1]), *args[1:], **kwargs)
        if func is _aten.sum.default and args[0].dim():
            return func(args[0].flip(0), **kwargs)
        if func in _SOFTMAXES:
            return func(args[0].flip(args[1]), *args[1:]).flip(args[1])
        if func in _SOFTMAX_BACKWARDS:
            return func(args[0].flip(args[2]), args[1].flip(args[2]), *args[2:]).flip(args[2])
        if func is _aten.nll_loss_forward.default and args[0].dim() == 2 and args[3] != _NO_REDUCTION:
            return func(args[0].flip(0), args[1].flip(0), *args[2:])
        return func(*args, **kwargs)

    def _product(self, func: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        size = a.shape[-1]
        if size < 4:
            return func(a, b)
        # Split near the middle: a split that separates few terms changes the rounding of few elements.
        at = self._random.randint(size // 4, size - size // 4)
        return func(a[..., :at], b[..., :at, :]) + func(a[..., at:], b[..., at:, :])


# ---------------------------------------------------------------------------------------------------------------------
# One run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The difference of a run from the reference: noise, the kernels, or the sampling seed (free-running cases)."""

    patched: bool = False
    noise_seed: int | None = None
    sampling_seed: int = 0

    def __str__(self) -> str:
        if self.patched:
            return "with the kernels"
        return "reference" if self.noise_seed is None else f"noise {self.noise_seed}"


def variants(noise_runs: int = NOISE_RUNS) -> list[Variant]:
    """Returns the reference, the noisy runs and the patched run."""
    return [Variant(), *(Variant(noise_seed=seed) for seed in range(1, noise_runs + 1)), Variant(patched=True)]


@dataclass
class Curves:
    """The results of one run.

    Attributes:
        scalars: name -> one number per step, or per evaluation.
        log_probs: `[steps, tokens]` of the held-out batch, fp32.
        top: `[steps, tokens, TOP_K]` ids, the most likely first.
        gradient_norms: `[steps, trained tensors]`, fp64; the order is that of `parameters`.
        parameters: name -> (a part of) the trained tensor, and the relative spacing of its dtype.
        seconds: wall-clock time of the training.
        replaced: op -> number of modules that it replaces; None without the kernels.
        report: the kernels' report.
    """

    scalars: dict[str, list[float]] = field(default_factory=dict)
    log_probs: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    top: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, TOP_K))
    gradient_norms: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    parameters: dict[str, tuple[torch.Tensor, float]] = field(default_factory=dict)
    seconds: float = 0.0
    replaced: dict[str, int] | None = None
    report: Report | None = None


class _Recorder(TrainerCallback):
    """Collects losses and gradient norms from the Trainer's log, and evaluates the held-out batch after each step."""

    def __init__(self, held_out: torch.Tensor) -> None:
        self._held_out = held_out
        self.scalars: dict[str, list[float]] = {"loss": [], "gradient norm": [], "held-out log-probability": []}
        self.log_probs: list[torch.Tensor] = []
        self.top: list[torch.Tensor] = []
        self.gradient_norms: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trained = _trained(kwargs["model"]).values()
        norms = [p.new_zeros(()) if p.grad is None else p.grad.float().norm() for p in trained]
        self.gradient_norms.append(torch.stack([norm.float() for norm in norms]).double().cpu())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs and "grad_norm" in logs:
            self.scalars["loss"].append(float(logs["loss"]))
            self.scalars["gradient norm"].append(float(logs["grad_norm"]))
        if "reward" in logs:
            self.scalars.setdefault("reward", []).append(float(logs["reward"]))
        if "eval_loss" in logs:
            self.scalars.setdefault("evaluation loss", []).append(float(logs["eval_loss"]))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = kwargs["model"]
        ids = self._held_out.to(args.device)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        model.train(was_training)
        chosen = log_probs.gather(-1, ids[:, 1:].unsqueeze(-1)).flatten().cpu()
        self.log_probs.append(chosen)
        self.top.append(log_probs.topk(TOP_K, -1).indices.reshape(-1, TOP_K).cpu())
        self.scalars["held-out log-probability"].append(float(chosen.double().mean()))


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


def _snapshot(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, float]]:
    """Returns the trained parameters, evenly sampled to MAX_ELEMENTS each."""
    found = {}
    for name, parameter in _trained(model).items():
        flat = parameter.detach().flatten()
        found[name] = flat[:: -(-flat.numel() // MAX_ELEMENTS)].float().cpu(), torch.finfo(parameter.dtype).eps
    return found


def record(trainer: Trainer, held_out: torch.Tensor, variant: Variant) -> Curves:
    """Trains and returns the run's curves. The caller must have applied the kernels if the variant requires them.

    Args:
        trainer: a Trainer that is ready to train, with `logging_steps=1`.
        held_out: `[rows, length]` token ids without padding, which are never trained on.
        variant: says whether the run has noise.

    Raises:
        ValueError: a run that should not have the kernels has them.
    """
    if not variant.patched and _report(trainer) is not None:
        raise ValueError(f"trainer: the run without the kernels has them; under npu-kernels run, set {RUN}=0")
    recorder = _Recorder(held_out)
    trainer.add_callback(recorder)
    trainer.remove_callback(PrinterCallback)
    noise = contextlib.nullcontext() if variant.noise_seed is None else SummationNoise(variant.noise_seed)
    start = time.perf_counter()
    # The kernels' report is part of the result, so do not print it.
    with contextlib.redirect_stdout(io.StringIO()), noise:
        trainer.train()
    seconds = time.perf_counter() - start
    assert trainer.model is not None
    report = _report(trainer)
    return Curves(
        scalars=recorder.scalars,
        log_probs=torch.stack(recorder.log_probs),
        top=torch.stack(recorder.top),
        gradient_norms=torch.stack(recorder.gradient_norms),
        parameters=_snapshot(trainer.model),
        seconds=seconds,
        replaced=None if report is None else dict(Counter(entry.op for entry in report.replaced)),
        report=report,
    )


def _report(trainer: Trainer) -> Report | None:
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, NpuKernelsCallback):
            return callback.report()
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The rule
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """The comparison of one quantity with its noise floor.

    Attributes:
        name: the name of the quantity; `drift of ...` for its average over the curve.
        distance, floor: one number per step (or per tensor), in the quantity's unit.
        labels: the names of the numbers; empty for steps, from 1.
        k: the allowed number of floors.
    """

    name: str
    distance: list[float]
    floor: list[float]
    k: float
    labels: list[str] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """The distances in noise floors; infinite if a distance is not finite."""
        return [d / f if math.isfinite(d) else math.inf for d, f in zip(self.distance, self.floor, strict=True)]

    @property
    def worst(self) -> int:
        """The index of the largest ratio."""
        ratios = self.ratios
        return max(range(len(ratios)), key=ratios.__getitem__)

    @property
    def ratio(self) -> float:
        """The largest distance, in noise floors."""
        return self.ratios[self.worst]

    @property
    def passed(self) -> bool:
        """Whether every distance is allowed."""
        return self.ratio <= self.k

    def __str__(self) -> str:
        where = self.labels[self.worst] if self.labels else f"step {self.worst + 1}"
        return (
            f"{self.name}: {self.ratio:.3g} noise floors at {where}, {self.k:g} allowed "
            f"({self.distance[self.worst]:.3g}, floor {self.floor[self.worst]:.3g})"
        )


@dataclass
class Verdict:
    """The outcome: all checks, and problems that are not distances."""

    checks: list[Check]
    problems: list[str] = field(default_factory=list)
    report: Report | None = None

    @property
    def passed(self) -> bool:
        """Whether all checks passed and there are no problems."""
        return not self.problems and all(check.passed for check in self.checks)

    @property
    def worst(self) -> Check:
        """The check that is nearest to its limit, or exceeds it most."""
        return max(self.checks, key=lambda check: check.ratio / check.k)

    def failures(self) -> list[str]:
        """Returns descriptions of everything that failed."""
        return [*self.problems, *(str(check) for check in self.checks if not check.passed)]

    def __str__(self) -> str:
        lines = ["the kernels train this model as it trains without them" if self.passed else "NOT the same training"]
        lines += [f"  {'ok    ' if check.passed else 'FAILED'} {check}" for check in self.checks]
        return "\n".join(lines + [f"  FAILED {problem}" for problem in self.problems])


_FP32_EPS = torch.finfo(torch.float32).eps


def _ulp(values: torch.Tensor, eps: float = _FP32_EPS) -> torch.Tensor:
    return values.abs().clamp(min=torch.finfo(torch.float32).tiny) * eps


def _pairs(runs: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return itertools.combinations(runs, 2)


def _floors(between: Sequence[torch.Tensor], resolution: torch.Tensor) -> torch.Tensor:
    """Returns, per step (the first dimension), the largest distance between two unpatched runs within WINDOW steps, at
    least the resolution."""
    largest = torch.stack(list(between)).amax(0)
    windows = [largest[max(0, t - WINDOW) : t + WINDOW + 1].amax(0) for t in range(len(largest))]
    return torch.maximum(torch.stack(windows), resolution)


def _random_walk(steps: torch.Tensor) -> float:
    """Returns the standard deviation of the mean of steps of these sizes, up or down at random."""
    return float(steps.square().sum().sqrt()) / len(steps)


def _scalar_checks(
    name: str, unpatched: Sequence[Sequence[float]], patched: Sequence[float], k: float, eps: float,
    least: float = 0.0, labels: Sequence[str] = (),
) -> list[Check]:  # fmt: skip
    runs = [torch.tensor(run, dtype=torch.float64) for run in unpatched]
    signed = torch.tensor(patched, dtype=torch.float64) - runs[0]
    ulp = _ulp(runs[0], eps).clamp(min=least)
    floors = _floors([(a - b).abs() for a, b in _pairs(runs)], ulp)
    drift_floor = max(_random_walk(ulp / floors), *(float(((a - b) / floors).mean().abs()) for a, b in _pairs(runs)))
    drift = float((signed / floors).mean().abs())
    return [
        Check(name, signed.abs().tolist(), floors.tolist(), k, list(labels)),
        Check(f"drift of {name}", [drift], [drift_floor], k, ["the whole curve, in noise floors"]),
    ]


def _jump(run: torch.Tensor, others: Sequence[torch.Tensor]) -> float:
    """Returns the largest distance of a run from the first of the others, in their noise floors."""
    floors = _floors([(a - b).abs() for a, b in _pairs(others)], _ulp(others[0]))
    return float(((run - others[0]).abs() / floors).max())


def _gradient_checks(unpatched: Sequence[Curves], patched: Curves, k: float) -> list[Check]:
    """Checks the norm of each parameter's gradient. The norm of all gradients hides an error in the gradient of a small
    parameter, and Adam, which divides a gradient by its size, hides it from the parameter."""
    names = list(unpatched[0].parameters)
    runs = [run.gradient_norms for run in unpatched]
    ulp = _ulp(runs[0])
    floors = _floors([(a - b).abs() for a, b in _pairs(runs)], ulp)
    signed = (patched.gradient_norms - runs[0]) / floors
    # Distances in noise floors are comparable between tensors. So compare each tensor with the largest jump and drift
    # of any tensor between unpatched runs.
    jump_floor = max(1.0, *(_jump(run, [*runs[:i], *runs[i + 1 :]]) for i, run in enumerate(runs)))
    drift_floor = max(
        _random_walk((ulp / floors).amax(1)), *(float(((a - b) / floors).mean(0).abs().max()) for a, b in _pairs(runs))
    )
    drift = signed.mean(0).abs()
    return [
        Check("gradient norm of each parameter", signed.abs().amax(0).tolist(), [jump_floor] * len(names), k, names),
        Check("drift of gradient norm of each parameter", drift.tolist(), [drift_floor] * len(names), k, names),
    ]


def _rms(difference: torch.Tensor) -> torch.Tensor:
    return difference.double().square().mean(-1).sqrt()


def _log_prob_check(unpatched: Sequence[torch.Tensor], patched: torch.Tensor, k: float) -> Check:
    floors = _floors([_rms(a - b) for a, b in _pairs(unpatched)], _ulp(_rms(unpatched[0])))
    return Check("held-out log-probabilities, by token", _rms(patched - unpatched[0]).tolist(), floors.tolist(), k)


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a != b).any(-1).double().mean(-1)


def _top_check(unpatched: Sequence[torch.Tensor], patched: torch.Tensor, k: float) -> Check:
    one_position = torch.full((patched.shape[0],), 1.0 / patched.shape[1], dtype=torch.float64)
    floors = _floors([_differing(a, b) for a, b in _pairs(unpatched)], one_position)
    return Check(f"held-out top {TOP_K}", _differing(patched, unpatched[0]).tolist(), floors.tolist(), k)


def _parameter_check(unpatched: Sequence[Curves], patched: Curves, k: float) -> Check:
    names = list(unpatched[0].parameters)
    distances, floors = [], []
    for name in names:
        runs = [run.parameters[name][0] for run in unpatched]
        eps = unpatched[0].parameters[name][1]
        # The smallest possible distance: one element differs by one unit in the last place.
        least = float(_ulp(runs[0].abs().max(), eps)) / math.sqrt(runs[0].numel())
        floors.append(max(least, *(float(_rms(a - b)) for a, b in _pairs(runs))))
        distances.append(float(_rms(patched.parameters[name][0] - runs[0])))
    return Check("parameters at the end", distances, floors, k, names)


def _shape_problems(reference: Curves, other: Curves) -> list[str]:
    problems = [
        f"{name}: {len(values)} values without the kernels, {len(other.scalars.get(name, []))} with them"
        for name, values in reference.scalars.items()
        if len(values) != len(other.scalars.get(name, [])) or not values
    ]
    if reference.parameters.keys() != other.parameters.keys():
        problems.append("the kernels changed which parameters are trained")
    return problems


def judge(unpatched: Sequence[Curves], patched: Curves, precision: str) -> Verdict:
    """Applies the rule of the module's docstring.

    Args:
        unpatched: the reference and the noisy runs.
        patched: the run with the kernels.
        precision: one of `PRECISIONS`.

    Raises:
        ValueError: fewer than two noisy runs, or an unknown precision.
    """
    if precision not in K:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    if len(unpatched) < 3:
        raise ValueError(f"unpatched must hold a reference and at least two noisy runs; got {len(unpatched)} runs")
    reference, k = unpatched[0], K[precision]
    problems = _shape_problems(reference, patched)
    if patched.replaced == {}:
        problems.append("the kernels replaced nothing")
    if not all(math.isfinite(v) for values in reference.scalars.values() for v in values):
        problems.append("the reference itself has values that are not finite: this run decides nothing")
    if problems:
        return Verdict([], problems, patched.report)
    checks: list[Check] = []
    for name in reference.scalars:
        # PyTorch takes the norm of all gradients in their own dtype; every other number is fp32.
        eps = max(eps for _, eps in reference.parameters.values()) if name == "gradient norm" else _FP32_EPS
        runs = [run.scalars[name] for run in unpatched]
        checks += _scalar_checks(name, runs, patched.scalars[name], k, eps)
    checks.append(_log_prob_check([run.log_probs for run in unpatched], patched.log_probs, k))
    checks.append(_top_check([run.top for run in unpatched], patched.top, k))
    checks += _gradient_checks(unpatched, patched, k)
    checks.append(_parameter_check(unpatched, patched, k))
    return Verdict(checks, [], patched.report)


def judge_scalars(
    name: str, unpatched: Sequence[Sequence[float]], patched: Sequence[float], labels: Sequence[str],
    resolution: float | None, precision: str = "bf16",
) -> list[Check]:  # fmt: skip
    """Judges one quantity that was logged at some steps, and its drift, by the rule of the module's docstring.

    Args:
        name: the quantity.
        unpatched: its values in the reference, and in two or more runs that differ from it in rounding.
        patched: its values in the run to judge.
        labels: the names of the steps.
        resolution: the last place of the logged numbers, if they were rounded; None: they are fp32.
        precision: one of `PRECISIONS`.

    Raises:
        ValueError: fewer than two noisy runs.
    """
    if len(unpatched) < 3:
        raise ValueError(f"unpatched must hold a reference and at least two noisy runs; got {len(unpatched)} runs")
    return _scalar_checks(name, unpatched, patched, K[precision], _FP32_EPS, resolution or 0.0, labels)


def judge_samples(name: str, unpatched: Sequence[float], patched: Sequence[float], precision: str) -> Check:
    """Judges runs that sample and so cannot be compared step by step, by one number per run of several runs each way.

    The distance is that of the two means. Its noise floor is the largest distance between the means of two halves of
    the unpatched runs, over all ways to halve them.

    Raises:
        ValueError: fewer than four unpatched runs, or an odd number of them.
    """
    n = len(unpatched)
    if n < 4 or n % 2 or not patched:
        raise ValueError(f"unpatched must hold an even number of runs, at least four; got {n}")
    total = sum(unpatched)
    halves = (sum(half) for half in itertools.combinations(unpatched, n // 2))
    floor = max(abs(half - (total - half)) / (n // 2) for half in halves)
    distance = abs(sum(patched) / len(patched) - total / n)
    least = max(floor, float(_ulp(torch.tensor(total / n))))
    return Check(name, [distance], [least], K[precision], ["the mean over all runs"])


def judge_runs(run: Callable[[Variant], Curves], precision: str, noise_runs: int = NOISE_RUNS) -> Verdict:
    """Makes all runs, one after the other, and judges them."""
    *unpatched, patched = [run(variant) for variant in variants(noise_runs)]
    return judge(unpatched, patched, precision)


# ---------------------------------------------------------------------------------------------------------------------
# Any model
# ---------------------------------------------------------------------------------------------------------------------


def _texts(dataset: Any, column: str, characters: int) -> list[str]:
    """Returns the texts of a dataset, or without one the sources of Python's standard library."""
    if dataset is not None:
        texts = dataset if isinstance(dataset, list) else dataset[column]
        return [text for text in texts if text]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    texts = []
    for file in files:
        if characters > 0:
            texts.append(file.read_text(encoding="utf-8", errors="replace")[:characters])
            characters -= len(texts[-1])
    return texts


def _sequences(texts: list[str], tokenizer: Any, length: int, needed: int) -> list[list[int]]:
    stream = list(itertools.chain.from_iterable(tokenizer(texts, add_special_tokens=False)["input_ids"]))
    if any(texts) and not stream:
        # transformers makes such a tokenizer if the model's folder has none.
        raise ValueError(
            "model: its tokenizer makes no tokens of any text; are the tokenizer's files beside the model?"
        )
    sequences = [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]
    if len(sequences) < needed:
        raise ValueError(
            f"dataset: {needed} sequences of {length} tokens are needed; the texts give {len(sequences)}. "
            "Ask for fewer steps, a smaller batch or shorter sequences, or give more text"
        )
    return sequences[:needed]


def _training_arguments(
    folder: str, steps: int, batch_size: int, learning_rate: float, precision: str, seed: int
) -> TrainingArguments:
    return on_one_device(
        TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            bf16=precision == "bf16-autocast",
            seed=seed,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
    )


def on_one_device(arguments: Arguments) -> Arguments:
    """Changes the arguments so that a Trainer ignores other visible GPUs. It would distribute the batch over them with
    `nn.DataParallel`, which TRL's GRPO does not support."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


def verify(
    model_name_or_path: str,
    dataset: Any = None,
    steps: int = 50,
    *,
    text_column: str = "text",
    batch_size: int = 2,
    sequence_length: int = 256,
    learning_rate: float = 1e-4,
    precision: str = "fp32",
    ops: Sequence[str] | None = None,
    backend: str | None = None,
    capture: str = "auto",
    noise_runs: int = NOISE_RUNS,
    seed: int = 0,
    on_run: Callable[[Variant], None] | None = None,
) -> Verdict:
    """Trains a causal language model with and without the kernels on this machine, and judges whether they agree.

    `transformers.Trainer` trains all parameters of the model `noise_runs` + 2 times, from the same weights and on the
    same batches. Nothing is saved.

    Args:
        model_name_or_path: hub id or local path, as for `AutoModelForCausalLM.from_pretrained`.
        dataset: a list of texts, or a `datasets.Dataset`; None: the sources of Python's standard library.
        steps: optimizer steps per run.
        text_column: the column of `dataset` that holds the text.
        batch_size: sequences per optimizer step.
        sequence_length: tokens per sequence.
        learning_rate: the constant learning rate.
        precision: "fp32", "bf16" (weights too) or "bf16-autocast" (fp32 weights).
        ops: as for `apply_npu_kernels`.
        backend: as for `apply_npu_kernels`.
        capture: as for `NpuKernelsCallback`.
        noise_runs: the number of noisy runs, in addition to the reference; at least 2.
        seed: the seed of the order of batches.
        on_run: a function that is called before each run, to show progress.

    Raises:
        ValueError: an option out of range, or too little text.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator

    for name, value, least in (("steps", steps, 1), ("batch_size", batch_size, 1), ("noise_runs", noise_runs, 2),
                               ("sequence_length", sequence_length, 2)):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
    if precision not in K:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)
    needed = (steps + 1) * batch_size
    texts = _texts(dataset, text_column, characters=16 * needed * sequence_length)
    sequences = _sequences(texts, tokenizer, sequence_length, needed)
    rows, held_out = sequences[batch_size:], torch.tensor(sequences[:batch_size])
    train_dataset = [{"input_ids": row, "labels": row} for row in rows]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def run(variant: Variant) -> Curves:
        if on_run is not None:
            on_run(variant)
        with TemporaryDirectory() as folder:
            trainer = Trainer(
                model=AutoModelForCausalLM.from_pretrained(model_name_or_path, **{dtype_argument(): dtype}),
                args=_training_arguments(folder, steps, batch_size, learning_rate, precision, seed),
                train_dataset=train_dataset,
                data_collator=default_data_collator,
                callbacks=[NpuKernelsCallback(ops=ops, backend=backend, capture=capture)] if variant.patched else [],
            )
            return record(trainer, held_out, variant)

    return judge_runs(run, precision, noise_runs)
