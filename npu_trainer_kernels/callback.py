"""`NpuKernelsCallback`: the kernels for the length of a training run."""

import contextlib
import functools
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import device, warmup
from .patching import NpuKernels, Report, apply_npu_kernels
from .patching._undo import Undo

__all__ = ["NpuKernelsCallback"]

_GUARD = "_npu_kernels_guarded"


def _calling_trainer() -> Trainer | None:
    """The Trainer that is calling the callback: events carry its model and optimizer, but not itself."""
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _peak_memory_gib(where: torch.device) -> float:
    """Peak memory of this process: the accelerator's allocator where it trains on one, else resident memory."""
    kind = device.accelerator()
    if kind == "cpu" or kind != where.type:
        # Kilobytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 30 if sys.platform == "darwin" else 1 << 20)
    return getattr(torch, kind).max_memory_allocated() / (1 << 30)


class NpuKernelsCallback(TrainerCallback):
    """Puts the fused kernels into the model of a `transformers.Trainer` or a TRL trainer while it trains.

    Patches when the Trainer has been built, looks again when training begins (TRL adds its head and FSDP shards after
    construction, `model_init` builds anew), and restores when training ends, also by an exception. Prints the report
    once, on the main process, and adds `tokens_per_second` (input tokens of this process since the last log) and
    `peak_memory_gib` to the Trainer's logs.

    Pass it in `callbacks=[...]`. On a Trainer that exists already, use `trainer.add_callback(callback)` followed by
    `callback.attach(trainer)`.

    Args:
        ops: as for `apply_npu_kernels`.
        backend: as for `apply_npu_kernels`.
        strict: as for `apply_npu_kernels`.
        warm_up: compile the kernels before the first step, several at once and with a line that says so (`warmup`);
            otherwise each is compiled when it is first used.
    """

    def __init__(
        self,
        *,
        ops: Sequence[str] | None = None,
        backend: str | None = None,
        strict: bool = False,
        warm_up: bool = True,
    ) -> None:
        self._ops, self._backend, self._strict, self._warm_up = ops, backend, strict, warm_up
        self._handle: NpuKernels | None = None
        self._logs = Undo()
        self._printed = ""
        self._since: tuple[float, int] = (0.0, 0)

    @property
    def handle(self) -> NpuKernels | None:
        """The handle of the model that was patched last, or None."""
        return self._handle

    def report(self) -> Report:
        """What was replaced and what was left alone; empty before the Trainer is built."""
        return Report() if self._handle is None else self._handle.report()

    def restore(self) -> None:
        """Takes the kernels out now."""
        self._logs.restore()
        if self._handle is not None:
            self._handle.restore()

    def attach(self, trainer: Trainer) -> None:
        """Patches a Trainer's model, and makes sure that it is restored however training ends."""
        self._guard(trainer, "train")
        self._apply(trainer.model)

    def _apply(self, model: Any) -> None:
        if self._handle is not None and self._handle._model() is not model:
            self._handle.restore()
        self._handle = apply_npu_kernels(model, ops=self._ops, backend=self._backend, strict=self._strict)

    def _guard(self, trainer: Trainer, method: str) -> None:
        """Wraps a method of one trainer so that an exception in it restores the model."""
        original = getattr(trainer, method)
        if getattr(original, _GUARD, None) is self:
            return

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException:
                self.restore()
                raise

        setattr(guarded, _GUARD, self)
        setattr(trainer, method, guarded)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = _calling_trainer()
        if trainer is not None:
            self._guard(trainer, "train")
        self._apply(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._apply(kwargs["model"])
        report, trainer = self.report(), _calling_trainer()
        if trainer is not None:
            if getattr(trainer.train, _GUARD, None) is not self:
                # Added to a Trainer that is in `train` already: guard what it calls from here on.
                self._guard(trainer, "training_step")
            self._add_to_logs(trainer)
        if self._warm_up and warmup.unsupported(kwargs["model"]) is None:
            self._compile_ahead(kwargs["model"], trainer, state)
        if state.is_world_process_zero and str(report) != self._printed:
            self._printed = str(report)
            print(self._printed, flush=True)
        assert self._handle is not None
        self._since = (time.perf_counter(), self._handle.tokens)

    def _compile_ahead(self, model: Any, trainer: Trainer | None, state: TrainerState) -> None:
        assert self._handle is not None
        trl = any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__)
        context = contextlib.nullcontext if trainer is None else trainer.compute_loss_context_manager
        planner = getattr(trainer, "_planner", None)  # of this package's GRPOTrainer
        plan = None if planner is None else planner.rehearsal()
        recorded = warmup.record(self._handle, model, warmup.ROWS, trl=trl, context=context, plan=plan)
        say: Any = functools.partial(print, flush=True) if state.is_world_process_zero else lambda *_, **__: None
        if recorded.launches:
            kernels = ", ".join(recorded.names)
            say(f"NPU kernels: compiling {len(recorded.launches)} kernels for this run ({kernels}) ...", end=" ")
            seconds, problems = warmup.compile_all(recorded.launches, next(model.parameters()).device)
            say(f"{seconds:.1f} s")
            for problem in problems:
                self.report().note(f"could not be compiled ahead: {problem}")
        if recorded.problem is not None:
            self.report().note(
                f"not every kernel was compiled ahead, some will be when first used ({recorded.problem})"
            )

    def _add_to_logs(self, trainer: Trainer) -> None:
        original = trainer.log

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs and self._handle is not None:
                before, seen = self._since
                self._since = now, tokens = (time.perf_counter(), self._handle.tokens)
                logs["tokens_per_second"] = round((tokens - seen) / max(now - before, 1e-9), 1)
                logs["peak_memory_gib"] = round(_peak_memory_gib(trainer.args.device), 3)
            original(logs, *args, **kwargs)

        self._logs.set_attribute(trainer, "log", log)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.restore()
