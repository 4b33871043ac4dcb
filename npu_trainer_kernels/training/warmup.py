"""Compiles a run's kernels before its first step.

The model's own forward and backward run once on fake tensors: shapes, dtypes and strides without values, memory or
device time. The launches of the ops are recorded and not launched, so these are exactly the kernels of the first step,
whatever the model does with dtypes and layouts. Then they are compiled, in threads, into Triton's own cache, which is
on disk too: the next run finds them there. On an NPU the same goes for their launchers, which triton-ascend compiles in
C++.

A few things cannot run without values (models' own code for experts, which are chosen by value; the backward of a
planned gradient, whose one kernel scales it). Then the launches recorded so far are compiled, and the rest when it is
first used, as without this module. Sharded models are left alone, and those whose rows are spread over ranks.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from .. import device
from ..ops.launch import KernelError, build_launcher, compile_only, use_launcher
from ..patching import NpuKernels
from ..patching.body import foreign_attention
from ..patching.call import HeadPlan, use_plan
from ..patching.learned_plan import LearnedPlan
from ..patching.probe import kept_state, trace_of_all
from ..support import triton
from ..support.errors import one_line

__all__ = ["Launch", "RecordedLaunches", "compile_all", "record", "unsupported"]

# The batch of ids. The kernels take lengths at run time, so any size will do that takes several chunks of logits: a
# first chunk that borrows memory (`tiling.borrowing_chunks`) has another kernel.
ROWS, LENGTH = 256, 128
MOST_THREADS = 8
# A foreign model on fake tensors may raise these. A run that would train must not end here.
_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError)


@dataclass(frozen=True)
class Launch:
    """`kernel[grid](*args, **constexprs)`, with dtypes in place of tensors."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """A name for people, for example `swiglu forward`."""
        # The folder of a family of ops, or the file of an op without a family.
        op = self.kernel.fn.__module__.partition(".ops.")[2].partition(".")[0]
        return f"{op} {self.kernel.__name__.strip('_').removesuffix('_kernel').replace('_', ' ')}"


@dataclass
class RecordedLaunches:
    """The launches of a step, each once; `problem` says why they are incomplete, if they are."""

    launches: list[Launch] = field(default_factory=list)
    problem: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of the kernels, each once."""
        return list(dict.fromkeys(launch.name for launch in self.launches))


def unsupported(model: nn.Module) -> str | None:
    """Returns why nothing is compiled ahead for a model, or None."""
    names = {m.config.get_text_config()._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)}
    if torch.distributed.is_initialized() and any(map(foreign_attention, names)):
        return "its attention may ask other ranks for their part of a row"
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    if where.type == "cpu":
        return "on a CPU nothing is compiled"
    if triton.IMPORT_ERROR is not None or triton.INTERPRETED:
        return "there is no Triton that compiles"
    if any(isinstance(p, DTensor) or hasattr(p, "ds_id") or p.is_meta for p in model.parameters()):
        return "the parameters are sharded"
    return trace_of_all(model)


@contextlib.contextmanager
def _without_numbers(handle: NpuKernels, planned: bool) -> Iterator[None]:
    """Makes the patches read no values, and restores the plan that the handle has learned."""
    settings = handle.settings
    before = settings.learned
    settings.compacts, settings.learned = False, LearnedPlan.settled(planned)
    try:
        yield
    finally:
        settings.compacts = True
        settings.learned = before


def record(
    handle: NpuKernels, model: nn.Module, rows: int, *, length: int = LENGTH, trl: bool = False,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext, plan: HeadPlan | None = None,
    beside: Sequence[NpuKernels] = (),
) -> RecordedLaunches:  # fmt: skip
    """Records the launches of one training step, forward and backward; nothing is launched.

    Args:
        handle: the handle of the model.
        model: the model that the Trainer trains, without wrappers for data parallelism; or a loss of several models, as
            a model of ids (`training.distillation.DistillationRehearsal`).
        rows, length: the shape of the batch of ids.
        trl: whether one of TRL's trainers trains it, through the head that TRL gave it.
        context: returns the context in which the Trainer computes a loss, for example autocast.
        plan: the plan for fake tensors, if one of TRL's trainers passes plans to TRL's head.
        beside: the handles of the models that the Trainer has and does not train: they run without gradients.
    """
    found = RecordedLaunches()
    seen: set[tuple[Any, ...]] = set()

    def recorder(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
        plain = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args)
        launch = Launch(kernel, tuple(grid), plain, tuple(constexprs.items()))
        # The grid does not affect what is compiled.
        key = (id(kernel), plain, launch.constexprs)
        if key not in seen:
            seen.add(key)
            found.launches.append(launch)

    def step(handle: NpuKernels, model: nn.Module, planned: bool, backward: bool) -> None:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # An accelerator's backward runs in a thread of its own, where no launcher is installed: it would launch kernels
        # on tensors without memory.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        given = use_plan(plan if planned else None)
        kept = kept_state(model)  # before the fake mode: it copies numbers
        with kept, _without_numbers(handle, planned), given, use_launcher(recorder), one_thread, fake, _ShapesAlone():
            _run(_WarmupStep(model, context, backward), fake, rows, length, trl)

    try:
        step(handle, model, planned=False, backward=True)
        if trl:
            # A planned gradient is computed in forward. Its backward compares it with the real one, which needs values.
            step(handle, model, planned=True, backward=False)
        for each in beside:
            if each.model is not None and trace_of_all(each.model) is None:
                with torch.no_grad():
                    step(each, each.model, planned=False, backward=False)
    except _ERRORS as error:
        found.problem = one_line(error)
    return found


class _ShapesAlone(TorchDispatchMode):
    """Returns shapes that torch cannot derive from fake arguments; the results have no values anyway. With `out_dtype`,
    2.11 takes the dtype of `torch.addmm` for a factor; 2.11 to 2.13 refuse a grouped product of any dtype but bfloat16,
    although cards compute others; and the number of counts of `torch.bincount` may depend on values, so the minimum
    length is taken for it, which transformers' balancing of experts passes in 5.17.

    It acts below autograd: a mode for functions is not in force inside `backward()`, since that is a function itself,
    and heads whose gradient is not planned add such products there.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Compared by name, since some versions of torch lack one of them.
        name = function.name()
        if name == "aten::addmm.dtype_out":
            return kwargs["out"]
        if name == "aten::_grouped_mm":
            a, b, ends = args[:3]
            # For two matrices the groups divide the dimension that is summed.
            groups = ends.shape if a.dim() == b.dim() == 2 else ()
            return a.new_empty(*groups, *a.shape[:-1], b.shape[-1])
        if name == "aten::bincount" and len(args) == 3:
            ids, weights, least = args
            return ids.new_empty(least, dtype=torch.int64) if weights is None else weights.new_empty(least)
        return function(*args, **kwargs)


class _WarmupStep(nn.Module):
    """Forward and backward as one forward, since gradient checkpointing looks the parameters up again in backward."""

    def __init__(self, model: nn.Module, context: Callable[[], AbstractContextManager[Any]], backward: bool) -> None:
        super().__init__()
        self.model, self.context, self.backward = model, context, backward

    def forward(self, given: dict[str, Any]) -> None:
        with self.context():
            output = self.model(**given)
        if self.backward:
            output.loss.backward()


def _run(step: _WarmupStep, fake: FakeTensorMode, rows: int, length: int, trl: bool) -> None:
    tensors = {
        name: fake.from_tensor(tensor).requires_grad_(tensor.requires_grad)
        for named in (step.named_parameters, step.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    where = next(iter(tensors.values())).device
    ids = torch.zeros(rows, length, dtype=torch.int64, device=where)
    given = {"input_ids": ids, "labels": ids, **({"fused_lm_head": True} if trl else {})}
    torch.func.functional_call(step, tensors, (given,))


def compile_all(launches: Sequence[Launch], where: torch.device) -> tuple[float, list[str]]:
    """Compiles the launches on a device, and their launchers, several at once. Returns the seconds it took, and the
    errors.

    A kernel that cannot be compiled raises no error here: its first launch will.
    """
    start = time.perf_counter()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(MOST_THREADS, len(launches), (os.cpu_count() or 1) // processes))
    for launch in launches:
        _ = launch.kernel.cache_key  # hashes the sources, and those of called functions: not for several threads
    module = torch.get_device_module(where)
    index = torch.device(where).index
    # Each thread has its own current device.
    with ThreadPoolExecutor(threads, initializer=lambda: None if index is None else module.set_device(index)) as pool:
        outcomes = list(pool.map(_compiled, launches))
        for i, launch in enumerate(launches):
            if isinstance(outcomes[i], KernelError) and isinstance(outcomes[i].__cause__, SystemError):
                # Before Python 3.13 two threads in its parser may disturb each other ("recursion depth mismatch").
                outcomes[i] = _compiled(launch)
        problems = [outcome for outcome in outcomes if isinstance(outcome, KernelError)]
        if device.builds_launchers(where):
            problems += _build_launchers([each for each in outcomes if not isinstance(each, KernelError)], pool)
    return time.perf_counter() - start, [str(problem) for problem in problems]


def _compiled(launch: Launch) -> Any:
    """Returns Triton's `CompiledKernel`, or the `KernelError`."""
    try:
        return compile_only(launch.kernel, launch.grid, launch.args, dict(launch.constexprs))
    except KernelError as error:
        return error


def _build_launchers(kernels: Sequence[Any], pool: ThreadPoolExecutor) -> list[KernelError]:
    """Builds the launchers, and returns the errors. The first launcher is built alone, since it compiles the header of
    all (some 25 s of a processor, where a launcher then takes 2.5): the others would find half of it, and do without.
    If the first fails, the others would fail for the same reason."""
    first = [error for error in map(_launcher_error, kernels[:1]) if error is not None]
    return first or [error for error in pool.map(_launcher_error, kernels[1:]) if error is not None]


def _launcher_error(compiled: Any) -> KernelError | None:
    try:
        build_launcher(compiled)
    except KernelError as error:
        return error
    return None
