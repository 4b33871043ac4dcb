"""Faults that the suite must catch: each is planted into the patched run of a small case, which must then fail.

A fault is in a kernel's code, around it, or in the patched trainer; unpatched runs never execute it. Faults of
gradients are made for every autograd Function of the package: two each.
"""

import contextlib
import importlib
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch

from npu_trainer_kernels import backends, ops, patching
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.ops.attention.segments import Segments
from npu_trainer_kernels.ops.attention.shared_rows import Shared
from npu_trainer_kernels.ops.experts.row_kernels import Routing
from npu_trainer_kernels.ops.head.head_options import HeadOptions
from npu_trainer_kernels.patching.body.layout import Layout
from npu_trainer_kernels.patching.body.state_row import StateRow
from npu_trainer_kernels.patching.probe import agreement
from npu_trainer_kernels.training.grpo_plan import Planner
from npu_trainer_kernels.verify import Curves

from .cases import Case, find
from .runs import Workshop
from .suite import CaseResult, Progress, run_case

__all__ = ["MUTATIONS", "Mutation", "MutationResult", "cases_of", "chosen", "control", "plant", "run_mutations"]

_ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
# In fp32 a few steps show a fault. In bf16 a fault of one percent is within the noise of a step, and shows only in the
# drift over many steps.
CASES = {
    "lm": replace(find("llama-lm"), name="fault-llama-lm", steps=6),
    "lm-layer-norm": replace(find("cohere-lm"), name="fault-cohere-lm", steps=6),
    "lm-gated-norm": replace(find("mamba2-lm"), name="fault-mamba2-lm", steps=6),
    "lm-tiled": replace(find("llama-lm"), name="fault-llama-lm-tiled", steps=6, tiled_mlp=16),
    "lm-softcap": replace(find("gemma2-lm"), name="fault-gemma2-lm", steps=6),
    "lm-autocast": replace(find("llama-lm-autocast"), name="fault-llama-lm-autocast", steps=30),
    "lm-bf16": replace(find("llama-lm-bf16"), name="fault-llama-lm-bf16", steps=30),
    "grpo": replace(
        find("qwen3-grpo-dapo"),
        name="fault-qwen3-grpo",
        steps=6,
        # With checkpointing the projections before normed queries and keys are part of an op.
        options={"loss_type": "dapo", "beta": 0.04, "temperature": 0.9, "gradient_checkpointing": True},
    ),
    "sft-ragged": replace(find("mistral-sft-ragged"), name="fault-mistral-sft-ragged", steps=6),
    "sft-autocast": replace(find("qwen2-sft-autocast"), name="fault-qwen2-sft-autocast"),
    "grpo-ragged": replace(find("qwen3-grpo-ragged"), name="fault-qwen3-grpo-ragged", steps=6),
    "sft-states": replace(find("qwen3.5-sft-ragged"), name="fault-qwen3.5-sft", steps=6),
    "sft-scan": replace(find("granite4-sft-ragged"), name="fault-granite4-sft", steps=6),
    "grpo-states": replace(find("qwen3.5-grpo-ragged"), name="fault-qwen3.5-grpo", steps=6),
    # With adapters a gated MLP's projection is not part of its op.
    "grpo-lora": replace(find("qwen3-grpo-lora"), name="fault-qwen3-grpo-lora", steps=6),
    "distillation": replace(find("qwen3-distil-jsd"), name="fault-qwen3-distil-jsd", steps=6),
    # Few rows for many experts, so that some have none; and a gate that is the model's own code.
    "lm-experts": replace(
        find("gpt-oss-lm"), name="fault-gpt-oss-lm", steps=4, options=_ONE_ROW,
        model={"num_local_experts": 32, "intermediate_size": 16},
    ),
    "lm-own-gate": replace(
        find("qwen3-moe-lm"), name="fault-qwen3-moe-lm", steps=4, options=_ONE_ROW, model={"hidden_act": "tanh"}
    ),
}  # fmt: skip
SCALE = 1.01
BLOCK = 128
# The functions that try an op on an accelerator before it is applied to a model.
_TRIALS = ("npu_trainer_kernels.ops.attention.varlen_attention:trial", "npu_trainer_kernels.ops.experts.grouped:trial")

Plant = Callable[["Fired"], AbstractContextManager[Any]]
# Returns for a device ("cpu", "cuda" or "npu") why no code that runs there can have the fault, or "".
Absent = Callable[[str], str]


def _nowhere(device: str) -> str:
    return ""


class Fired:
    """Counts the executions of a planted fault; `aside` returns whether it must be inactive, see `_watched_probes`."""

    def __init__(self, aside: Callable[[], bool]) -> None:
        self.times, self.aside = 0, aside

    def __call__(self) -> None:
        self.times += 1


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: a description of the fault.
        cases: keys of `CASES`; it is planted into one after the other until a run executes it.
        plant: returns a context manager that plants the fault; the fault calls the argument whenever it is executed,
            and is inactive while `aside` of the argument returns True.
        absent: returns why it cannot be planted on a device, or "". If it can, a case must execute it.
    """

    name: str
    cases: tuple[str, ...]
    plant: Plant
    absent: Absent = _nowhere

    @contextlib.contextmanager
    def planted(self) -> Iterator["Fired"]:
        """Plants the fault, inactive in probes and audits; yields its counter."""
        with _watched_probes() as probing, self.plant(fired := Fired(probing)):
            yield fired


@dataclass
class MutationResult:
    """The result for a fault; `outcome` is "caught", "MISSED", "not reached", "not on this device" (which counts as
    caught; the reason is in `shown_in`), or for the control "pass" or "FAIL"."""

    name: str
    case: str
    outcome: str
    caught: bool
    shown_in: str = ""
    ratio_text: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        return asdict(self)


# ---------------------------------------------------------------------------------------------------------------------
# Planting
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_place_of(original: Any, wrapper: Any, within: str = "npu_trainer_kernels") -> Iterator[None]:
    """Replaces `original` by `wrapper` in every module of the package that has imported it."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "npu_trainer_kernels" and name.startswith(within):
                for attribute in [key for key, value in vars(module).items() if value is original]:
                    stack.enter_context(mock.patch.object(module, attribute, wrapper))
        yield


@contextlib.contextmanager
def _watched_probes() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether a model is being probed or audited, or an op is being tried on a device.
    There the package compares ops with the model's own code: it would notice some faults and leave the module alone, so
    no training would have the fault. But an op may be correct in a probe and wrong in a run. Results of probes may also
    be cached for the process, so a fault in a probe would affect later runs."""
    original, running = agreement.repeatable, 0

    @contextlib.contextmanager
    def looking() -> Iterator[None]:
        nonlocal running
        running += 1
        try:
            yield
        finally:
            running -= 1

    @contextlib.contextmanager
    def repeatable(*where: Any) -> Iterator[None]:
        with looking(), original(*where):
            yield

    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_place_of(original, repeatable))
        for trial in map(pkgutil.resolve_name, _TRIALS):
            stack.enter_context(_in_place_of(trial, looking()(trial)))
        yield lambda: running > 0


def _around(target: str, fault: Callable[..., Any], within: str = "npu_trainer_kernels") -> Plant:
    """Calls `fault(original, *args, **kwargs)` instead of `original(*args, **kwargs)`; `target`: the path of the
    original."""

    @contextlib.contextmanager
    def plant(fired: Fired) -> Iterator[None]:
        original = pkgutil.resolve_name(f"npu_trainer_kernels.{target}")

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if fired.aside():
                return original(*args, **kwargs)
            fired()
            return fault(original, *args, **kwargs)

        with _in_place_of(original, wrapper, within):
            yield

    return plant


def _each(*plants: Plant) -> Plant:
    """Plants a fault into several code paths, of which the device and the dtype decide the one that runs."""

    @contextlib.contextmanager
    def plant(fired: Fired) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in plants:
                stack.enter_context(each(fired))
            yield

    return plant


def _scaled_gradient(function: Any, last: bool, scale: float) -> Plant:
    """Multiplies the first or the last gradient that an autograd Function returns by a number."""

    def plant(fired: Fired) -> AbstractContextManager[Any]:
        original = function.backward

        def backward(ctx: Any, *gradients: Any) -> Any:
            result = original(ctx, *gradients)
            found = list(result) if isinstance(result, tuple) else [result]
            places = [i for i, g in enumerate(found) if isinstance(g, torch.Tensor)]
            if places and not fired.aside():
                fired()
                at = places[-1 if last else 0]
                found[at] = found[at] * scale
            return tuple(found)

        return mock.patch.object(function, "backward", staticmethod(backward))

    return plant


def _functions() -> list[tuple[str, Any]]:
    """Returns (name of the op's file, autograd Function) for every autograd Function in the package."""
    found = []
    for info in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            is_function = isinstance(value, type) and issubclass(value, torch.autograd.Function)
            if is_function and value.__module__ == module.__name__:
                found.append((info.name.rpartition(".")[2], value))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Faults of the head and its loss
# ---------------------------------------------------------------------------------------------------------------------


def _scaled_logit_gradient(original: Any, logits: torch.Tensor, *args: Any) -> None:
    original(logits, *args)
    logits.mul_(SCALE)


def _scaled_logit_gradient_at_once(original: Any, logits: torch.Tensor, second: torch.Tensor | None, *args: Any) -> Any:
    result = original(logits, second, *args)
    for block in (logits, second):
        if block is not None:
            block.mul_(SCALE)
    return result


def _bf16_accumulation(original: Any, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    original(total, a, b)
    total.copy_(total.bfloat16())


def _last_columns_dropped(original: Any, logits: torch.Tensor, *args: Any) -> Any:
    return original(logits[:, : logits.shape[1] // BLOCK * BLOCK], *args)


def _last_columns_dropped_at_once(original: Any, logits: torch.Tensor, second: torch.Tensor | None, ids: torch.Tensor,
                                  *args: Any) -> Any:  # fmt: skip
    last = logits if second is None else second
    first = last.shape[1] // BLOCK * BLOCK
    before = 0 if second is None else logits.shape[1]
    columns = torch.arange(before + first, before + last.shape[1], device=last.device)
    last[:, first:].masked_fill_(columns != ids.unsqueeze(1), torch.finfo(last.dtype).min)
    return original(logits, second, ids, *args)


def _no_cap_derivative_at_once(original: Any, logits: torch.Tensor, second: torch.Tensor | None, *args: Any) -> Any:
    inner = next(arg for arg in args if isinstance(arg, HeadOptions)).factors[0]
    blocks = [block for block in (logits, second) if block is not None]
    slopes = [1 - torch.tanh(inner * block.float()).square() for block in blocks]
    result = original(logits, second, *args)
    for block, each in zip(blocks, slopes, strict=True):
        block.div_(each)
    return result


def _no_cap_derivative(original: Any, logits: torch.Tensor, grads: torch.Tensor, *args: Any) -> None:
    inner = next(arg for arg in args if isinstance(arg, HeadOptions)).factors[0]
    t = torch.tanh(inner * logits.float())
    original(logits, grads, *args)
    grads.div_(1 - t * t)


def _temperature_twice(fired: "Fired") -> AbstractContextManager[Any]:
    """Changes the factors that all computations on logits use."""
    original = HeadOptions.factors.fget  # type: ignore[attr-defined]

    def factors(self: HeadOptions) -> tuple[float, float]:
        inner, outer = original(self)
        if fired.aside():
            return inner, outer
        if self.temperature != 1.0:
            fired()
        return (inner / self.temperature, outer) if self.softcap is None else (inner, outer / self.temperature)

    return mock.patch.object(HeadOptions, "factors", property(factors))


def _label_off_by_one(original: Any, x: Any, weight: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return original(x, weight, target.roll(1, -1), *args, **kwargs)


def _labels(target: torch.Tensor) -> torch.Tensor:
    return (target != -100).sum()


def _ignored_counted(original: Any, x: Any, weight: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # The model divides this sum, so a smaller sum has the effect of a larger divisor.
    return original(x, weight, target, *args, **kwargs) * (target != -100).sum() / target.numel()


def _own_mean_per_micro_batch(
    original: Any, x: Any, weight: Any, target: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # Every micro-batch counts as if labels filled two thirds of it: correct only if all had as many labels.
    return original(x, weight, target, *args, **kwargs) * (target.numel() * 2 / 3) / (target != -100).sum()


def _temperature_ignored(
    original: Any, x: Any, weight: Any, bias: Any, ids: Any, temperature: float, *args: Any, **kwargs: Any
) -> Any:
    return original(x, weight, bias, ids, 1.0, *args, **kwargs)


def _mean_upstream(original: Any, *args: Any, **kwargs: Any) -> Any:
    log_prob, *others = original(*args, **kwargs)
    if log_prob.requires_grad:
        log_prob.register_hook(lambda gradient: gradient.mean().expand_as(gradient))
    return log_prob, *others


# ---------------------------------------------------------------------------------------------------------------------
# Faults of the norms
# ---------------------------------------------------------------------------------------------------------------------


def _epsilon_outside(
    original: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: Any, eps: float, *args: Any
) -> Any:
    y, s, rstd = original(x, residual, weight, eps, *args)
    total = x if residual is None else x + residual
    square = total.float().square().mean(-1, keepdim=True)
    wrong = 1 / (square.sqrt() + eps)
    return (y * (wrong * (square + eps).sqrt())).to(y.dtype), s, wrong.reshape(rstd.shape)


def _last_rows_dropped(original: Any, x: torch.Tensor, *args: Any) -> Any:
    y, s, rstd = original(x, *args)
    rows = y.reshape(-1, y.shape[-1]).clone()
    rows[rows.shape[0] // BLOCK * BLOCK :] = 0
    return rows.view(y.shape), s, rstd


# ---------------------------------------------------------------------------------------------------------------------
# Faults of packed rows
# ---------------------------------------------------------------------------------------------------------------------


def _shifted_positions(original: Any, where: Layout, *args: Any) -> np.ndarray:
    # Only relative positions matter, so shifting a whole row has no effect; shifting tokens after a shared prefix has.
    return original(where, *args) + (np.arange(len(where.places)) >= where.lengths[0])


def _another_rows_state(original: Any, *args: Any, **kwargs: Any) -> Any:
    where = original(*args, **kwargs)
    if isinstance(where, str) or where.keys is None:
        return where
    tokens = where.tokens.reshape(args[0].shape).copy()
    uses = np.bincount(tokens[tokens >= 0])
    for row in tokens:
        shared = np.flatnonzero((row >= 0) & (uses[row] > 1))
        if len(shared) and row[shared[-1]] > 0:
            row[shared[-1]] -= 1
    return replace(where, tokens=tokens.reshape(-1))


def _seen_neighbour(fired: "Fired") -> AbstractContextManager[Any]:
    """Every segment sees the last key of the previous one, placed directly before its own, where a window includes
    it."""
    original = Segments.make

    def make(q_lengths: Any, device: Any, k_lengths: Any = None, keys: Shared | None = None) -> Segments:
        if fired.aside():
            return original(q_lengths, device, k_lengths, keys)
        fired()
        n = sum(q_lengths)
        index = np.arange(n) if keys is None else keys.index
        own = np.split(index, np.cumsum(q_lengths if k_lengths is None else k_lengths)[:-1])
        near = zip(itertools.pairwise(own), q_lengths[1:], strict=True)
        seen = [own[0], *(np.concatenate((b[:-queries], a[-1:], b[-queries:])) for (a, b), queries in near)]
        return original(q_lengths, device, [len(s) for s in seen], Shared.make(np.concatenate(seen), n, device))

    return mock.patch.object(Segments, "make", make)


def _window_ignored(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "window": None})


def _counted_once(fired: "Fired") -> AbstractContextManager[Any]:
    """Returns only the gradient of the first use of a row that is used several times."""
    original = Shared.gradient

    def gradient(self: Shared, dy: torch.Tensor) -> torch.Tensor:
        first = np.full(len(self.index), -1)
        rows, places = np.unique(self.index, return_index=True)
        first[places] = rows
        if fired.aside() or (first >= 0).sum() == (self.index >= 0).sum():
            return original(self, dy)
        fired()
        return original(Shared.make(first, self.n, dy.device), dy)

    return mock.patch.object(Shared, "gradient", gradient)


def _state_runs_on(original: Any, *args: Any, **kwargs: Any) -> Any:
    """All segments are one; not where other segments need the states that they end with."""
    segments, state = kwargs["segments"], kwargs["state"]
    if segments is None or kwargs["return_state"]:
        return original(*args, **kwargs)
    one = Segments.make([segments.q_ends[-1]], args[0].device)
    return original(*args, **{**kwargs, "segments": one, "state": None if state is None else state[:1]})


def _taps_reach_over(fired: "Fired") -> AbstractContextManager[Any]:
    """A convolution sees the inputs right before a segment in the packed row, which are another row's."""
    original = StateRow.inputs_before

    def inputs_before(self: StateRow, x: torch.Tensor, count: int) -> torch.Tensor | None:
        if fired.aside():
            return original(self, x, count)
        fired()
        before = torch.nn.functional.pad(x[0], (count, 0))
        return torch.stack([before[:, begin : begin + count] for begin in self._begins])

    return mock.patch.object(StateRow, "inputs_before", inputs_before)


def _state_detached(original: Any, x: torch.Tensor, rows: Shared) -> torch.Tensor:
    taken: torch.Tensor = original(x, rows)
    return taken.detach() if taken.dim() == 4 else taken  # tokens have fewer dimensions than states


def _advantages_left_behind(original: Any, value: Any, order: list[int]) -> Any:
    is_number_each = isinstance(value, torch.Tensor) and value.dim() == 1 and value.is_floating_point()
    return value if is_number_each else original(value, order)


# ---------------------------------------------------------------------------------------------------------------------
# Faults of experts
# ---------------------------------------------------------------------------------------------------------------------


def _weighted_twice(original: Any, x: Any, ids: Any, weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return original(x, ids, weights * weights, *args, **kwargs)


def _concatenated(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "interleaved": False})


def _one_experts_rows_shifted(original: Any, x: torch.Tensor, routing: Routing, *args: Any) -> torch.Tensor:
    rows: torch.Tensor = original(x, routing, *args)
    start, end = routing.ends[:2].tolist()
    rows[start:end] = rows[start:end].roll(1, 0)
    return rows


def _garbage_without_rows(original: Any, dw: torch.Tensor, ends: torch.Tensor, *args: Any) -> torch.Tensor:
    cleared: torch.Tensor = original(dw, ends, *args)
    cleared[ends.diff(prepend=ends.new_zeros(1)) == 0] = 1e-3
    return cleared


# ---------------------------------------------------------------------------------------------------------------------
# Faults of the patched trainer
# ---------------------------------------------------------------------------------------------------------------------


def _in_grpo_loss(fault: Callable[[Any, dict[str, Any]], AbstractContextManager[Any]]) -> Plant:
    """Runs the patched GRPO trainer's loss inside `fault(trainer, inputs)`, which may change `inputs`."""

    def plant(fired: Fired) -> AbstractContextManager[Any]:
        original = Planner.compute_loss

        def compute_loss(self: Planner, loss: Callable[..., Any], model: Any, inputs: dict[str, Any]) -> Any:
            fired()
            changed = dict(inputs)
            with fault(self.trainer, changed):
                return original(self, loss, model, changed)

        return mock.patch.object(Planner, "compute_loss", compute_loss)

    return plant


def _no_ratio(trainer: Any, inputs: dict[str, Any]) -> AbstractContextManager[Any]:
    # TRL then uses the ratio to the current policy, which is 1.
    inputs.pop("old_per_token_logps")
    return contextlib.nullcontext()


def _no_kl(trainer: Any, inputs: dict[str, Any]) -> AbstractContextManager[Any]:
    return mock.patch.object(trainer, "beta", 0.0)


def _no_temperature_in_gradient(original: Any, logits: Any, teacher: Any, softmax: Any, beside: Any, p_sum: Any,
                                factors: Any, mixture: Any, *args: Any) -> Any:  # fmt: skip
    if factors is not None:
        warm = mixture.options.temperature
        factors = factors._replace(**{name: None if f is None else f * warm for name, f in factors._asdict().items()})
    return original(logits, teacher, softmax, beside, p_sum, factors, mixture, *args)


def _teacher_shifted(original: Any, x: Any, weight: Any, teacher_x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return original(x, weight, teacher_x.roll(1, 1), *args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

_LOGIT_GRADIENT = "ops.head.gradient:gradient_in_place"
_AT_ONCE = "ops.head.fused:statistics_and_gradient"
_ACCUMULATE = "ops.head.chunks:_accumulate"
_STATISTICS = "ops.head.statistics:_raw_statistics"
_GRADIENT = "ops.head.gradient:gradient_of_logits"
_LOSS = "patching.head.head_call:fused_linear_cross_entropy"
_SEAM = "patching.head.trl_seam:_apply"
_NORM = "ops.norms.rms_kernels:norm_forward"
_POSITIONS = "patching.body.batch:_positions"
_LAYOUT = "patching.body.layout:layout"
_SEGMENTS = "ops.attention.varlen_attention:varlen_attention"
_RULE = "ops.linear_attention.gated_delta_rule:gated_delta_rule"
_TAKE = "ops.attention.shared_rows:take"
_EXPERTS = "ops.experts.moe_experts:moe_experts"
_TO_ROWS = "ops.experts.row_kernels:to_rows"
_CLEARED = "ops.experts.grouped:_cleared"
_REORDER = "training.grpo_groups:_in_order"
_DIVERGENCE = "ops.head.linear_divergence:linear_divergence"
_OF_DIVERGENCE = "ops.head.divergence:_divergence_step"
_IN_TRAINING = "npu_trainer_kernels.training"
_IN_PATCHING = "npu_trainer_kernels.patching"
_OF_STATES = "npu_trainer_kernels.patching.body.state_row"


def _without_kernel(device: str) -> str:
    """Returns why a device has neither flash attention nor the vendor's kernel, or "": other implementations use
    PyTorch's own backward."""
    flash = devices.widest_flash_head(torch.device(device))
    if flash or backends.unavailable("vendor", device, "varlen_attention") is None:
        return ""
    return "no kernel of attention"


def _without_kernel_of_states(device: str) -> str:
    """Returns why a device does not have the kernel that walks from chunk to chunk, or ""."""
    runs = backends.explain("gated_delta_rule", torch.device(device))[0] == "triton"
    return "" if runs else "no kernel of states"


def _in_no_model(op: str) -> Absent:
    """Returns the reason for an op that is not applied to models: no training calls it; only its tests check it."""
    return lambda device: "" if op in patching.PATCHES else f"{op} is put into no model"


# Functions that some devices do not have, or that no model calls.
_ABSENT = {
    "ByKernel": _without_kernel,
    "_LogitsStatistics": _in_no_model("grpo_loss"),
    "_States": _without_kernel_of_states,
}


def _mutations() -> tuple[Mutation, ...]:
    scaled = _each(_around(_LOGIT_GRADIENT, _scaled_logit_gradient), _around(_AT_ONCE, _scaled_logit_gradient_at_once))
    found = [
        Mutation("logit gradient x 1.01", ("lm",), scaled),
        Mutation("logit gradient x 1.01, GRPO", ("grpo",), scaled),
        Mutation("logit gradient x 1.01, bf16 autocast", ("lm-autocast",), scaled),
        Mutation("logit gradient x 1.01, bf16", ("lm-bf16",), scaled),
        Mutation("ignored labels counted in the mean", ("lm",), _around(_LOSS, _ignored_counted, _IN_PATCHING)),
        Mutation("mean of each micro-batch", ("lm",), _around(_LOSS, _own_mean_per_micro_batch, _IN_PATCHING)),
        Mutation("label off by one", ("lm",), _around(_LOSS, _label_off_by_one, _IN_PATCHING)),
        Mutation("weight gradient accumulated in bf16", ("lm",), _around(_ACCUMULATE, _bf16_accumulation)),
        Mutation("last partial block of the vocabulary dropped", ("lm",),
                 _each(_around(_STATISTICS, _last_columns_dropped), _around(_AT_ONCE, _last_columns_dropped_at_once))),
        Mutation("softcap without its derivative", ("lm-softcap",),
                 _each(_around(_GRADIENT, _no_cap_derivative), _around(_AT_ONCE, _no_cap_derivative_at_once))),
        Mutation("epsilon outside the root", ("lm",), _around(_NORM, _epsilon_outside)),
        Mutation("last partial block of rows dropped", ("lm",), _around(_NORM, _last_rows_dropped)),
        Mutation("positions one too large behind the first segment", ("grpo-ragged",),
                 _around(_POSITIONS, _shifted_positions)),
        Mutation("a segment sees its neighbour", ("grpo-ragged",), _seen_neighbour),
        Mutation("a segment sees its neighbour, in a window", ("sft-ragged",), _seen_neighbour),
        Mutation("window ignored", ("sft-ragged",), _around(_SEGMENTS, _window_ignored, _IN_PATCHING)),
        Mutation("gradient of a shared prompt counted once", ("grpo-ragged",), _counted_once),
        Mutation("state of a prompt's last token from another row", ("grpo-ragged",),
                 _around(_LAYOUT, _another_rows_state, _IN_PATCHING)),
        Mutation("a state runs into the next row", ("sft-states",), _around(_RULE, _state_runs_on, _IN_PATCHING)),
        Mutation("a scan's state runs into the next row", ("sft-scan",), _around(_RULE, _state_runs_on, _IN_PATCHING)),
        Mutation("a convolution reaches into the row before", ("sft-states",), _taps_reach_over),
        Mutation("a prompt's state without gradient", ("grpo-states",), _around(_TAKE, _state_detached, _OF_STATES)),
        Mutation("advantages left behind by their rows", ("grpo-ragged",),
                 _around(_REORDER, _advantages_left_behind)),
        Mutation("routing weight applied twice", ("lm-experts",), _around(_EXPERTS, _weighted_twice, _IN_PATCHING)),
        Mutation("one expert's rows shifted by one", ("lm-experts",), _around(_TO_ROWS, _one_experts_rows_shifted)),
        Mutation("garbage as gradient of an expert without rows", ("lm-experts",),
                 _around(_CLEARED, _garbage_without_rows)),
        Mutation("interleaved gates read as concatenated", ("lm-experts",),
                 _around(_EXPERTS, _concatenated, _IN_PATCHING)),
        Mutation("importance ratio missing", ("grpo",), _in_grpo_loss(_no_ratio)),
        Mutation("KL term dropped", ("grpo",), _in_grpo_loss(_no_kl)),
        Mutation("temperature applied twice", ("grpo",), _temperature_twice),
        Mutation("temperature ignored", ("grpo",), _around(_SEAM, _temperature_ignored, _IN_PATCHING)),
        Mutation("mean of the upstream gradients", ("grpo",), _around(_SEAM, _mean_upstream, _IN_PATCHING)),
        Mutation("temperature missing in a divergence's gradient", ("distillation",),
                 _around(_OF_DIVERGENCE, _no_temperature_in_gradient)),
        Mutation("teacher's rows shifted by one", ("distillation",),
                 _around(_DIVERGENCE, _teacher_shifted, _IN_TRAINING)),
    ]  # fmt: skip
    for op, function in _functions():
        for last in (False, True):
            cases = ("lm", "grpo", "grpo-lora", "lm-layer-norm", "lm-gated-norm")
            of_experts = ("lm-experts", "lm-own-gate")
            # Flash attention computes in 16 bits, in which one percent of its gradient of q is within the noise.
            only = {"moe_experts": of_experts, "steps": of_experts, "slices": ("lm-tiled",),
                    "segment_kernels": ("sft-autocast",)}  # fmt: skip
            scale = 1.1 if op == "segment_kernels" else SCALE
            with_state = function.__name__ in ("_CausalConv1d", "_GatedDeltaRule")
            found_in = ("sft-states",) if with_state else only.get(op, cases)
            name = f"{op}.{function.__name__}: {'last' if last else 'first'} gradient x {scale}"
            absent = _ABSENT.get(function.__name__, _nowhere)
            found.append(Mutation(name, found_in, _scaled_gradient(function, last, scale), absent))
    return tuple(found)


MUTATIONS = _mutations()


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


Unpatched = Callable[[Case], list[Curves]]
"""Returns the unpatched runs of a case, which all its faults share."""


def chosen(names: Sequence[str] | None) -> list[Mutation]:
    """Returns the faults of these names; None: all.

    Raises:
        ValueError: a name is unknown.
    """
    known = {mutation.name: mutation for mutation in MUTATIONS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"mutation must be one of {', '.join(known)}; got {name!r}")
    return [known[name] for name in names] if names else list(MUTATIONS)


def quick() -> list[str]:
    """Returns the names of the faults that are planted for every change: not those in 16 bits, which take
    more steps, in arithmetic that most processors emulate."""
    return [mutation.name for mutation in MUTATIONS if all(case.precision == "fp32" for case in cases_of([mutation]))]


def cases_of(mutations: Sequence[Mutation], device: str | None = None) -> list[Case]:
    """Returns the cases of mutations; with `device`, only of those that can be planted there."""
    planted = [mutation for mutation in mutations if device is None or not mutation.absent(device)]
    return [CASES[key] for key in dict.fromkeys(key for mutation in planted for key in mutation.cases)]


def control(result: CaseResult) -> MutationResult:
    """Returns the row of a case without a fault, which must pass."""
    if not result.checks:
        return MutationResult("none", result.name, "FAIL", False, next(iter(result.problems), result.skipped))
    worst = result.verdict.worst
    return MutationResult(
        "none", result.name, "pass" if result.passed else "FAIL", result.passed, worst.name,
        f"{worst.ratio:.2g} / {worst.k:g}", result.seconds,
    )  # fmt: skip


def plant(mutation: Mutation, workshop: Workshop, unpatched: Unpatched) -> MutationResult:
    """Plants a fault into its cases until one executes it, and returns the result."""
    reason = mutation.absent(workshop.device or devices.accelerator())
    if reason:
        return MutationResult(mutation.name, "", "not on this device", True, reason)
    for case in cases_of([mutation]):
        with mutation.planted() as fired:
            result = run_case(case, workshop, _silent, unpatched(case))
        if fired.times:
            break
    else:
        return MutationResult(mutation.name, "", "not reached", False)
    caught = not result.passed
    worst = result.verdict.worst if result.checks else None
    return MutationResult(
        mutation.name, case.name, "caught" if caught else "MISSED", caught,
        worst.name if worst else result.problems[0], f"{worst.ratio:.2g} / {worst.k:g}" if worst else "",
        result.seconds,
    )  # fmt: skip


def run_mutations(device: str, progress: Progress, names: Sequence[str] | None = None) -> list[MutationResult]:
    """Plants every fault, or the named ones, in this process; the first rows are the cases without a fault.

    Raises:
        ValueError: a name is unknown.
    """
    mutations = chosen(names)
    runs: dict[str, list[Curves]] = {}
    with TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder), device)
        results = [
            control(run_case(case, workshop, progress, runs.setdefault(case.name, [])))
            for case in cases_of(mutations, device)
        ]
        for i, mutation in enumerate(mutations):
            progress("planted faults", mutation.name, i / len(mutations))
            results.append(plant(mutation, workshop, lambda case: runs[case.name]))
        progress("planted faults", "", 1.0)
    return results


def _silent(name: str, note: str, part: float) -> None:
    pass
