"""Runs a workload's training steps on several ranks in a wrapper, and counts times, memory and collectives."""

import collections
import contextlib
import contextvars
import gc
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.ops import fused_linear_cross_entropy
from npu_trainer_kernels.ops import launch as launch_module

from .draws import Draws, live_tokens
from .measure import as_json, summarise, verdict
from .models import MODELS, build_model, model_class
from .results import Row
from .run_times import figures
from .step_cases import VARIANTS, StepWorkload
from .step_clock import Clock
from .steps import bodies_replayed, build_trainer, captured, kernels_of, patch_with_liger, ran, reports_of

__all__ = [
    "WAYS", "WRAPPERS", "Peak", "covered", "free", "last_steps_profiled", "time_head", "train",
    "what_ran",
]  # fmt: skip

WRAPPERS = ("alone", "ddp", "fsdp2", "tp", "fsdp2-gathered")
# FSDP2's `reshard_after_forward`: whether it frees a layer's gathered weights between its forward and its backward.
_FSDP2 = {"fsdp2": True, "fsdp2-gathered": False}
WARMUP = 3
# The number of kernels that a profile lists.
_LARGEST = 10


# ---------------------------------------------------------------------------------------------------------------------
# Counting
# ---------------------------------------------------------------------------------------------------------------------


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Returns the total time that is covered by at least one of the spans (begin, end)."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def what_ran(events: Iterable[Any], on_cuda: bool, steps: int = 1) -> Row:
    """Returns for the average step `collectives`, the number of runs of each on the device, or of its calls on a CPU;
    and on CUDA `profiled`, the device's busy milliseconds, the number of its kernels and copies, and the slowest ones.

    Args:
        events: Kineto's events of the profiled steps.
        on_cuda: whether the events include the device's kernels.
        steps: the number of steps.
    """
    pattern = r"ncclDevKernel_([A-Za-z]+)" if on_cuda else r"c10d::(\w+)"
    names, talk, other = collections.Counter[str](), list[tuple[int, int]](), list[tuple[int, int]]()
    count, taken = collections.Counter[str](), collections.Counter[str]()
    for event in events:
        # A user annotation also appears on the device, as a span from its first kernel to its last.
        if on_cuda and (event.device_type() != torch.autograd.DeviceType.CUDA or event.is_user_annotation()):
            continue
        match = re.match(pattern, event.name())
        names.update([match[1]] if match else [])
        (talk if match else other).append((event.start_ns(), event.start_ns() + event.duration_ns()))
        count[event.name()] += 1
        taken[event.name()] += event.duration_ns()
    found: Row = {"collectives": {name: round(number / steps) for name, number in sorted(names.items())}}
    if on_cuda:
        busy = covered([*talk, *other])
        times = {"device_busy_ms": busy, "communication_ms": covered(talk), "exposed_ms": busy - covered(other)}
        found["profiled"] = {name: nanoseconds / 1e6 / steps for name, nanoseconds in times.items()} | {
            "events": round(count.total() / steps),
            "largest": [
                {"kernel": name[:120], "ms": nanoseconds / 1e6 / steps, "launches": round(count[name] / steps)}
                for name, nanoseconds in taken.most_common(_LARGEST)
            ],
        }  # fmt: skip
    return found


class _StepProfile:
    """Profiles steps, the first of which begins at the end of the constructor, on all ranks at once."""

    def __init__(self, device: torch.device, steps: int = 1) -> None:
        kinds = torch.profiler.ProfilerActivity
        self._device, self._steps = device, steps
        # On CUDA the host's calls are not recorded: that slows the host down, and the step may wait for it.
        self._profile: Any = torch.profiler.profile(
            activities=[kinds.CUDA if device.type == "cuda" else kinds.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
        )
        self._launches, run = 0, launch_module._launcher.get()

        def counted(*launch: Any) -> None:
            self._launches += 1
            run(*launch)

        # Our launches are counted on the host: on the device they have only names, and TRL has kernels with the same
        # names. The counter is the variable's default, since backward runs in other threads.
        launcher = contextvars.ContextVar("counted", default=counted)
        self._counting = mock.patch.object(launch_module, "_launcher", launcher)
        # The slow start of the profiler comes before the barrier, so that no rank waits for another's in the step.
        self._profile.start()
        if distributed.is_initialized():
            distributed.barrier()
        devices.synchronize(device)
        self._profile.step()
        self._counting.start()
        self._start = time.perf_counter()

    def stop(self) -> Row:
        """Returns the fields of `what_ran`, and on CUDA the average step's time, the host's time in it, and the number
        of our launches."""
        host = time.perf_counter() - self._start
        devices.synchronize(self._device)
        step = time.perf_counter() - self._start
        self._counting.stop()
        self._profile.stop()
        # `events()` of the profiler would take seconds to build a tree.
        found = what_ran(self._profile.profiler.kineto_results.events(), self._device.type == "cuda", self._steps)
        if "profiled" in found:
            found["profiled"] |= {
                "step_ms": step * 1e3 / self._steps, "host_ms": host * 1e3 / self._steps,
                "launches_of_ours": round(self._launches / self._steps),
            }  # fmt: skip
        return found


def _profiled(step: Callable[[], object], device: torch.device) -> Row:
    profile = _StepProfile(device)
    step()
    return profile.stop()


def _busy_ms(profiled: Row) -> float | None:
    return profiled["profiled"]["device_busy_ms"] if "profiled" in profiled else None


class Peak:
    """The allocator's peak memory since this object was created; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            self._module.reset_peak_memory_stats(device)

    def bytes(self) -> int:
        return 0 if self._module is None else self._module.max_memory_allocated(self._device)


def _of_all(
    seconds: list[float], peak: int, live: list[int], positions: list[int], one_batch: bool, busy_ms: float | None
) -> Row:
    """Combines the results of all ranks: the slowest rank's times, the highest peak, all tokens.

    Args:
        seconds: the times of this rank's timed steps, except the first.
        peak: the peak bytes on this rank.
        live: the tokens of each of this rank's steps.
        positions: the positions of each of this rank's steps.
        one_batch: whether all ranks have the same batches.
        busy_ms: how long this rank's device is busy in a step; None: that is not known.
    """
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, (seconds, peak, live, positions, busy_ms))
    slowest = max(every, key=lambda found: sum(found[0]))
    counted = every[:1] if one_batch else every
    tokens, with_padding = (
        [sum(of_step) for of_step in zip(*(found[i] for found in counted), strict=True)] for i in (2, 3)
    )
    return {**figures(slowest[0], tokens, with_padding, slowest[4]), "peak_bytes": max(found[1] for found in every)}


@contextlib.contextmanager
def _globals_kept(module: ModuleType) -> Iterator[None]:
    """Restores a module's globals at the end: Liger replaces classes and functions in a model's module for good."""
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)
        for name in vars(module).keys() - before.keys():
            delattr(module, name)


def train(workload: StepWorkload, wrapper: str, variant: str, steps: int, device: torch.device) -> Row:
    """Times `steps` steps on every rank; returns the fields of a row beyond its key.

    Args:
        workload: the workload of each rank.
        wrapper: one of `WRAPPERS`.
        variant: a key of `VARIANTS`; the kernels are applied before the model is wrapped, and after tp slices it.
        steps: the number of timed steps, at least `LEAST_STEPS`; one more is profiled.
        device: the device of this rank.

    Raises:
        ImportError: the variant's package is not installed.
        ValueError: transformers cannot slice the model for so many ranks.
    """
    run = _train_in_a_loop if workload.name == "sft" else _train_with_its_trainer
    with _globals_kept(sys.modules[model_class(workload.size).__module__]):
        return run(workload, wrapper, variant, steps, device)


# ---------------------------------------------------------------------------------------------------------------------
# Without a trainer
# ---------------------------------------------------------------------------------------------------------------------


def _in_slices(model: Any) -> Any:
    """Returns the model with this rank's slices of its weights, by transformers' tensor-parallel plan."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=distributed.get_world_size())
    sliced = type(model).from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), distributed_config=config, dtype=model.dtype
    )
    return sliced.train()


def _wrap(model: Any, wrapper: str, device: torch.device) -> Any:
    if wrapper == "ddp":
        ids = None if device.type == "cpu" else [device.index]
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if wrapper in _FSDP2:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=_FSDP2[wrapper])
        return fully_shard(model, mesh=mesh)
    return model


def _by_kind(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Groups parameters into sliced and whole ones: no multi-tensor operation accepts both."""
    kinds = ([p for p in parameters if isinstance(p, DTensor) == split] for split in (True, False))
    return [kind for kind in kinds if kind]


def _clip(kinds: Sequence[Sequence[torch.nn.Parameter]], most: float) -> torch.Tensor:
    """Clips the norm of all gradients to `most`, and returns their norm before."""
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    total = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, most, total)
    return total


def _train_in_a_loop(workload: StepWorkload, wrapper: str, variant: str, steps: int, device: torch.device) -> Row:
    model = build_model(workload.size, length=workload.prompt + workload.length).to(device)
    if wrapper == "tp":
        model = _in_slices(model)
        free(device)
    if workload.prompt:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if VARIANTS[variant].package == "liger-kernel":
        patch_with_liger(model, own_head=True)
    asked = kernels_of(VARIANTS[variant])
    kernels = (
        apply_npu_kernels(model, ops=asked.npu_kernels_ops, capture=asked.npu_kernels_capture)
        if asked.use_npu_kernels
        else None
    )
    with kernels or contextlib.nullcontext():
        found = _loop(_wrap(model, wrapper, device), workload, wrapper == "tp", steps, device)
    reports = [] if kernels is None else [kernels.report()]
    return {**found, "ran": reports[0].ran if reports else {}, **captured(reports)}


def _loop(model: Any, workload: StepWorkload, one_batch: bool, steps: int, device: torch.device) -> Row:
    kinds = _by_kind(list(model.parameters()))
    # The Trainer's default. Without `fused`, AdamW passes over memory, and through DTensor, several times.
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=1e-5, fused=True)
    rank, draws = 0 if one_batch else distributed.get_rank(), Draws(workload, typical_from=steps)
    batches = [draws.batch(number, rank) for number in range(steps + 1)]
    live = [live_tokens(batch) for batch in batches]
    positions = [batch["input_ids"].numel() for batch in batches]
    batches = [{name: t.to(device) for name, t in batch.items()} for batch in batches]
    losses, norms, clock = list[torch.Tensor](), list[torch.Tensor](), Clock(device)

    def step(number: int) -> None:
        loss = model(**batches[number], use_cache=False).loss
        loss.backward()
        norm = _clip(kinds, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # Values are read after all steps, since a Trainer does not wait for the device after each step either.
        losses.append(loss.detach())
        norms.append(norm)

    peak = Peak(device)
    for number in range(steps):
        step(number)
        clock.tick()
    peak_bytes, seconds = peak.bytes(), clock.seconds()
    profiled = _profiled(lambda: step(steps), device)
    found = _of_all(seconds, peak_bytes, live, positions, one_batch, _busy_ms(profiled))
    told = {"losses": [t.item() for t in losses], "grad_norms": [t.item() for t in norms]}
    return {**found, **told, **profiled}


# ---------------------------------------------------------------------------------------------------------------------
# The LM head
# ---------------------------------------------------------------------------------------------------------------------

WAYS = ("alone", "tp")
_CALLS = 20


def _head_inputs(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns x, the whole weight and targets, the same on all ranks."""
    drawn = torch.Generator(device).manual_seed(7)
    x = torch.randn(sizes["BT"], sizes["H"], device=device, generator=drawn)
    weight = torch.randn(sizes["V"], sizes["H"], device=device, generator=drawn) * sizes["H"] ** -0.5
    targets = torch.randint(sizes["V"], (sizes["BT"],), device=device, generator=drawn)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted.double())).item()


def time_head(sizes: dict[str, int], dtype: torch.dtype, way: str, device: torch.device) -> Row:
    """Times forward and backward of the op on every rank, including its collectives.

    Args:
        sizes: rows BT, hidden size H, vocabulary V.
        dtype: the dtype of x and of the weight.
        way: one of `WAYS`: "alone" with the whole vocabulary on each rank, or "tp" with a slice on each rank, whose
            results are compared with those of "alone".
        device: the device of this rank.
    """
    x, whole, targets = _head_inputs(sizes, dtype, device)
    weight = whole
    if way == "tp":
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        weight = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()

    def call(factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss: Any = fused_linear_cross_entropy(x, factor, targets)
        return (loss.detach(), *torch.autograd.grad(loss, (x, factor)))

    found = [_local(t) for t in call(weight)]
    left, errors = sum(t.nbytes for t in found), dict[str, float]()
    if way == "tp":
        loss, dx, dweight = call(whole)
        wanted = (loss, dx, distribute_tensor(dweight, mesh, [Shard(0)]).to_local())
        errors = {name: _relative(*pair) for name, *pair in zip(("out0", "dx", "dweight"), found, wanted, strict=True)}
        del loss, dx, dweight, wanted
    del whole, found
    free(device)
    before = 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated(device)
    peak, times = Peak(device), []
    for number in range(WARMUP + _CALLS):
        start = time.perf_counter()
        call(weight)
        devices.synchronize(device)
        if number >= WARMUP:
            times.append((time.perf_counter() - start) * 1e3)
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, (summarise(times), max(0, peak.bytes() - before - left), errors))
    summary = max((one[0] for one in every), key=lambda one: one.median)
    worst = {name: max(one[2][name] for one in every) for name in errors}
    return {
        "ms": as_json(summary), "extra_bytes": max(one[1] for one in every), "errors": worst or None,
        "verdict": verdict(worst, None, str(dtype).removeprefix("torch.")) if worst else "unchecked",
        "tflops": 6e-9 * sizes["BT"] * sizes["H"] * sizes["V"] / summary.median,
        **_profiled(lambda: call(weight), device),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# With a trainer, whose model accelerate wraps
# ---------------------------------------------------------------------------------------------------------------------


def _for_accelerate(workload: StepWorkload, wrapper: str) -> dict[str, str]:
    """Returns the environment variables that `accelerate launch` sets."""
    if wrapper not in _FSDP2:
        return {}
    family = MODELS[workload.size][0]
    return {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": f"{family}DecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": str(_FSDP2[wrapper]),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }  # fmt: skip


def _check_wrapped(model: Any, wrapper: str) -> None:
    """Raises RuntimeError if accelerate has wrapped the model in another wrapper."""
    from torch.distributed.fsdp import FSDPModule

    kinds = {"ddp": torch.nn.parallel.DistributedDataParallel, "fsdp2": FSDPModule}
    found = {name for name, kind in kinds.items() if isinstance(model, kind)} or {"alone"}
    asked = "fsdp2" if wrapper in _FSDP2 else wrapper
    if found != {asked}:
        raise RuntimeError(f"accelerate has wrapped the model as {', '.join(found)}, not {asked}")


@contextlib.contextmanager
def last_steps_profiled(trainer: Any, steps: int, device: torch.device, count: int = 1) -> Iterator[Row]:
    """Profiles the last `count` of `steps` steps, including the preparation of their batches."""
    from transformers import TrainerCallback

    found: Row = {}

    class Profiled(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == steps - count:
                self.profile = _StepProfile(device, count)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == steps:
                found.update(self.profile.stop())

    if count:
        trainer.add_callback(Profiled())
    yield found


def _train_with_its_trainer(
    workload: StepWorkload, wrapper: str, variant: str, steps: int, device: torch.device
) -> Row:
    if wrapper == "tp":
        others = ", ".join(other for other in WRAPPERS if other != wrapper)
        raise ValueError(f"{workload.name} is not run under {wrapper!r}, but under {others}")
    clock = Clock(device)
    # The last step is profiled, and its time does not count.
    total = steps + 1
    with (
        mock.patch.dict(os.environ, _for_accelerate(workload, wrapper)),
        tempfile.TemporaryDirectory() as folder,
    ):
        trainer, seen = build_trainer(workload, VARIANTS[variant], total, folder, clock, typical=1)
        if wrapper == "alone":
            wrap = trainer.accelerator.prepare_model
            trainer.accelerator.prepare_model = lambda model, **given: wrap(model, **{**given, "evaluation_mode": True})
        peak = Peak(device)
        with last_steps_profiled(trainer, total, device) as profiled:
            trainer.train()
        _check_wrapped(trainer.model_wrapped, wrapper)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = _of_all(clock.seconds()[:-1], peak.bytes(), seen.live, seen.all, False, _busy_ms(profiled))
    return {
        **found, "losses": [entry["loss"] for entry in logged],
        "grad_norms": [float(entry["grad_norm"]) for entry in logged], "ran": ran(trainer),
        **captured(reports_of(trainer)), "bodies_replayed": bodies_replayed(logged), **profiled,
    }  # fmt: skip


def free(device: torch.device) -> None:
    """Frees the memory that a row has used."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
