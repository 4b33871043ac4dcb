"""`NpuKernelsCallback` applies the kernels for the duration of a training run."""

import contextlib
import functools
import inspect
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import device, warmup
from .options import check_capture, check_ops, check_report, check_rollouts, check_tiled_mlp, parse_override
from .patching import NpuKernels, Report, apply_npu_kernels, handle_of
from .patching.call import use_labels
from .patching.undo import Undo
from .rollouts import serve_rollouts
from .support.switch import audit_steps, check_switch
from .training.distillation import serve_divergence
from .training.exchange import agreed
from .training.grpo_groups import Arranger, stays_on_rank, stays_shuffled
from .training.grpo_plan import Planner, is_grpo
from .training.held_models import held_models
from .training.loss_filter import LossFilter
from .training.repeats import Repeats
from .training.seeds import differing_seeds

__all__ = ["NpuKernelsCallback", "calling_trainer"]

_WRAPPED = "_npu_kernels_wrapped"


def calling_trainer() -> Trainer | None:
    """Returns the Trainer that is calling the callback: events carry its model and optimizer, but not itself."""
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _peak_memory_gib(where: torch.device) -> float:
    """Returns this process's peak memory: the accelerator's allocator's if it trains on one, else resident memory."""
    kind = device.accelerator()
    if kind == "cpu" or kind != where.type:
        # Kilobytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 30 if sys.platform == "darwin" else 1 << 20)
    return getattr(torch, kind).max_memory_allocated() / (1 << 30)


def _has_trls_head(forward: Any) -> bool:
    """Whether a forward, or one that it wraps (accelerate's of mixed precision does), has TRL's head."""
    while forward is not None:
        if _ASKS in getattr(getattr(forward, "__code__", None), "co_varnames", ()):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


_ASKS = "fused_lm_head"


def _names(code: Any, name: str) -> bool:
    """Whether code contains a word: as a key, as the name of an argument in a call, or in a function inside."""
    for const in code.co_consts:
        if hasattr(const, "co_consts"):
            if _names(const, name):
                return True
        elif const == name or (type(const) is tuple and name in const):
            return True
    return False


def _loss_without_head(trainer: Any) -> type | None:
    """Returns TRL's class that computes the loss, if that does not ask for TRL's head (GKD, GOLD); else None."""
    for cls in type(trainer).__mro__:
        if "compute_loss" in vars(cls):
            codes = [inspect.unwrap(each).__code__ for each in vars(cls).values() if inspect.isfunction(each)]
            of_trl = cls.__module__.partition(".")[0] == "trl"
            return cls if of_trl and not any(_names(code, _ASKS) for code in codes) else None
    return None


def _unused_head(model: Any, trainer: Any = None) -> dict[str, str]:
    """Returns the head that training does not use, with the reason: TRL gives a model a forward with its own head."""
    other = _loss_without_head(trainer)
    if other is not None:
        return {"linear_logprob": f"the loss of {other.__name__} is not made of TRL's head"}
    if any(_has_trls_head(module.__dict__.get("forward")) for module in model.modules()):
        return {"linear_cross_entropy": "its loss is made of TRL's head, linear_logprob"}
    return {"linear_logprob": "its model has no head of TRL's"}


class NpuKernelsCallback(TrainerCallback):
    """Applies the fused kernels to the model of a `transformers.Trainer` or a TRL trainer while it trains.

    It patches when the Trainer has been built, patches again when training begins (TRL adds its head and FSDP shards
    after construction, `model_init` builds a new model), and restores when training ends, also after an exception.
    While training, the same ops serve the models that the Trainer has besides its own (reference, teacher, reward). In
    TRL's GRPOTrainer the head gets a plan of the gradient that the loss will send back. Losses that are nan or infinite
    are filtered as the Trainer does, but on the device (`training.loss_filter`). What the Trainer repeats for each
    micro-batch on the host is made short (`training.repeats`). It prints the report once, on the main process, and adds
    `tokens_per_second` (input tokens of this process since the last log), `live_tokens_per_second` (without padding),
    `peak_memory_gib` and, where decoder layers are captured, `layers_replayed` (the share of their calls since the
    last log) and, where the model generates, `generation_seconds` (the time since the last log that it took) to the
    Trainer's logs.

    Pass it in `callbacks=[...]`. On an existing Trainer, use `trainer.add_callback(callback)` followed by
    `callback.attach(trainer)`.

    Args:
        ops: as for `apply_npu_kernels`.
        backend: as for `apply_npu_kernels`.
        strict: as for `apply_npu_kernels`.
        tiled_mlp: as for `apply_npu_kernels`.
        capture: as for `apply_npu_kernels`.
        rollouts: whether the trained model's `generate` samples by captured steps (`rollouts`): `"auto"` (on CUDA,
            where at least 32 tokens may be made), `"on"` or `"off"`.
        warm_up: whether to compile the kernels before the first step, several at once and with a line that says so
            (`warmup`); otherwise each is compiled at its first use.
        balance: in TRL's GRPOTrainer, whether to spread rows evenly over micro-batches and ranks by their live tokens,
            where the optimizer's step stays the same; otherwise no row changes its rank.
        audit: when the ops are compared with the model's original code, on the run's own batch and before the
            optimizer's step (`NpuKernels.audit`): `"first"`, `"off"`, or a number of steps after which it is repeated.
            An op that differs by more than rounding explains is disabled, with a warning that names it.
        report: the text that is printed when training begins: `"short"`, or `"full"` with every module and every
            reason.

    Raises:
        ValueError: an unknown op or backend, an invalid report, audit or `tiled_mlp`, or a switch that is neither True
            nor False.
    """

    in_full = 'NpuKernelsCallback(report="full")'
    """The option that prints the full report, as the user of this callback spells it: the short report names it."""

    def __init__(
        self,
        *,
        ops: Sequence[str] | None = None,
        backend: str | None = None,
        strict: bool = False,
        tiled_mlp: int = 0,
        capture: str = "auto",
        rollouts: str = "auto",
        warm_up: bool = True,
        balance: bool = True,
        audit: str | int = "first",
        report: str = "short",
    ) -> None:
        check_ops(ops)
        for name, value in (("strict", strict), ("warm_up", warm_up), ("balance", balance)):
            check_switch(name, value)
        self._audit_steps = audit_steps("audit", audit)
        check_report("report", report)
        parse_override("" if backend is None else backend)
        check_tiled_mlp("tiled_mlp", tiled_mlp, ops)
        check_capture("capture", capture)
        check_rollouts("rollouts", rollouts)
        self._full = report == "full"
        self._ops, self._backend, self._strict, self._warm_up = ops, backend, strict, warm_up
        self._balance = balance
        self._tiled_mlp, self._capture, self._rollouts = tiled_mlp, capture, rollouts
        self._handle: NpuKernels | None = None
        self._owns = False
        self._held: list[NpuKernels] = []  # those that `restore` restores
        self._served_beside: list[NpuKernels] = []
        self._planner: Planner | None = None
        self._loss_filter: LossFilter | None = None
        self._repeats: Repeats | None = None
        self._in_trainer = Undo()
        self._printed = ""
        self._since: tuple[float, int, int] = (0.0, 0, 0)

    @property
    def handle(self) -> NpuKernels | None:
        """The handle of the model that was patched last, or None."""
        return self._handle

    def report(self) -> Report:
        """Returns the report of the model that was patched last; empty before the Trainer is built."""
        report = Report() if self._handle is None else self._handle.report()
        if self._planner is not None and self._planner.off is not None:
            report.note(f"the head's gradient is not planned: {self._planner.off}")
        return report

    def restore(self) -> None:
        """Removes the kernels now, except those that other code had applied to the model."""
        self._in_trainer.restore()
        while self._held:
            self._held.pop().restore()
        if self._handle is not None and self._owns:
            self._handle.restore()

    def attach(self, trainer: Trainer) -> None:
        """Patches a Trainer's model, and makes sure that it is restored however training ends.

        Changes that `npu-kernels run` has made to it are undone first.

        Raises:
            TypeError: `trainer` is not a Trainer.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a transformers.Trainer; got {type(trainer).__name__}")
        for other in trainer.callback_handler.callbacks:
            if isinstance(other, NpuKernelsCallback) and other is not self:
                other.restore()
        self._guard(trainer, "train")
        self._show_labels(trainer)
        self._apply(trainer.model)

    def _put_into(self, model: Any) -> tuple[NpuKernels, bool]:
        """Returns the handle of a model, and whether this callback must restore it: not if the user has applied it."""
        before = handle_of(model)
        handle = apply_npu_kernels(
            model, ops=self._ops, backend=self._backend, strict=self._strict, tiled_mlp=self._tiled_mlp,
            capture=self._capture,
        )  # fmt: skip
        return handle, handle is not before

    def _apply(self, model: Any) -> None:
        if self._handle is not None and self._handle.model is not model and self._owns:
            self._handle.restore()
        known, owned = self._handle, self._owns
        self._handle, self._owns = self._put_into(model)
        # A model that this callback has patched before is still its own.
        self._owns = self._owns or (owned and self._handle is known)

    def _apply_to_held(self, trainer: Trainer, report: Report) -> None:
        """Applies the same ops to the models besides the one that is trained."""
        self._served_beside = []
        report.beside.clear()
        for name, model in held_models(trainer).items():
            handle, owns = self._put_into(model)
            self._served_beside.append(handle)
            # No trainer reads the cache of a model that it does not train, unless it generates with it by name.
            self._in_trainer.set_attribute(handle.settings, "eval_caches", False)
            if owns:
                self._held.append(handle)
            # Nobody asks for the gradient of its logits.
            handle.report().unused = {**_unused_head(model), "linear_cross_entropy": "it is not trained"}
            report.beside[f"{name} ({type(model).__name__})"] = handle.report()

    def _distil(self, trainer: Trainer, report: Report) -> None:
        """Serves a loss between two heads, which is a function of the trainer and belongs to no module."""
        served = serve_divergence(trainer, self._in_trainer, self._backend, self._ops)
        if isinstance(served, str):
            report.note(served)
        elif served is not None:
            report.sites.append(served)
            report.unused = dict.fromkeys(
                ("linear_logprob", "linear_cross_entropy"), "its loss is the divergence of two heads, linear_divergence"
            )

    def _wrap(self, trainer: Trainer, method: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replaces a method of one trainer by `make(method)`, once, until the kernels are removed."""
        original = getattr(trainer, method)
        if getattr(original, _WRAPPED, None) is self:
            return
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _WRAPPED, self)
        self._in_trainer.set_attribute(trainer, method, wrapper)

    def _guard(self, trainer: Trainer, method: str) -> None:
        """Makes an exception in a method restore everything."""

        def make(original: Any) -> Callable[..., Any]:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                try:
                    return original(*args, **kwargs)
                except BaseException:
                    self.restore()
                    raise

            return guarded

        self._wrap(trainer, method, make)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = calling_trainer()
        if trainer is not None:
            self._guard(trainer, "train")
            self._show_labels(trainer)
        self._apply(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = calling_trainer()
        self._apply(kwargs["model"])
        report = self.report()
        report.unused = _unused_head(kwargs["model"], trainer)
        if args.torch_compile:
            report.note("torch_compile: what it traces runs in plain PyTorch; head and loss alone keep their kernels")
        if getattr(args, "use_liger_kernel", False):
            report.note(
                "use_liger_kernel=True: this package leaves Liger-Kernel's forwards and losses as they are; "
                "use_liger_kernel=False lets it serve them"
            )
        if (problem := differing_seeds(kwargs["model"])) is not None:
            warnings.warn(problem, stacklevel=2)
            report.note(problem)
        if trainer is not None:
            self._serve(trainer, report)
        self._compare(args)
        if self._warm_up and warmup.unsupported(kwargs["model"]) is None:
            self._compile_ahead(kwargs["model"], trainer, state)
        text = report.text(full=self._full, in_full=self.in_full)
        if state.is_world_process_zero and text != self._printed:
            self._printed = text
            print(text, flush=True)
        assert self._handle is not None
        self._since = (time.perf_counter(), self._handle.tokens, self._handle.live_tokens)

    def _compare(self, args: TrainingArguments) -> None:
        """Has the ops compared with the models' original code, on the batches that come next."""
        if self._audit_steps is None or self._handle is None or not self._handle.active:
            return
        if args.torch_compile:
            self.report().note("torch_compile: what is served is not compared with the model's own code")
            return
        tell = functools.partial(warnings.warn, stacklevel=2)
        self._handle.audit(tell)
        for held in self._served_beside:
            held.audit(tell, training=False)

    def _serve(self, trainer: Trainer, report: Report) -> None:
        """Makes the changes to the Trainer itself, for the length of this run."""
        guards_train = getattr(trainer.train, _WRAPPED, None) is self
        self._in_trainer.restore()  # the changes of an attempt that the Trainer repeats (auto_find_batch_size)
        # `train` is running already: if it was called without the guard, the methods that it calls are guarded.
        for method in ("train",) if guards_train else ("training_step", "_maybe_log_save_evaluate"):
            self._guard(trainer, method)
        self._show_labels(trainer)
        if self._handle is not None:
            # A Trainer reads no cache in training. Newer ones say so in the model's configuration, but not in those of
            # its parts.
            caches = getattr(trainer.args, "use_cache", False)
            self._in_trainer.set_attribute(self._handle.settings, "caches", caches)
        self._arrange(trainer, report)  # before the plan, which would hide a loss of the user's
        self._plan(trainer)
        self._apply_to_held(trainer, report)
        self._distil(trainer, report)
        if self._handle is not None and hasattr(trainer, "generation_config"):  # TRL's trainers that generate
            serve_rollouts(self._handle, self._rollouts)
        self._add_to_logs(trainer)
        self._repeats = Repeats(trainer)
        self._repeats.start(self._in_trainer)
        if LossFilter.applies_to(trainer):
            self._loss_filter = LossFilter(trainer)
            self._loss_filter.start(self._in_trainer)

    def _show_labels(self, trainer: Trainer) -> None:
        """Passes the labels of a loss outside the model to the body: the Trainer keeps them from the model for its
        label smoothing and for a loss function of the user's."""

        def make(original: Any) -> Callable[..., Any]:
            def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                with use_labels(inputs.get("labels") if isinstance(inputs, Mapping) else None):
                    return original(model, inputs, *args, **kwargs)

            return compute_loss

        self._wrap(trainer, "compute_loss", make)

    def _plan(self, trainer: Trainer) -> None:
        """Passes plans of the gradient of GRPO's loss to the head, where the head is this package's."""
        assert self._handle is not None
        if not (self._handle.serves_trl and is_grpo(trainer)):
            return
        if self._planner is None or self._planner.trainer is not trainer:
            self._planner = Planner(trainer)
        if self._planner.off is None:
            self._planner.plan_losses(self._in_trainer)

    def _arrange(self, trainer: Any, report: Report) -> None:
        """Puts the rows of a GRPO prompt into one micro-batch, where a shared prompt is computed once, and spreads live
        tokens evenly over micro-batches and ranks."""
        assert self._handle is not None
        if not is_grpo(trainer):
            return
        shares, across = self._handle.shares_beginnings, self._balance and trainer.accelerator.num_processes > 1
        could = across or trainer.args.steps_per_generation > 1
        if across:
            stays = agreed(stays_on_rank(trainer) if shares else "padding or shared prompts are computed")
            across = stays is None
            if stays is not None and shares:
                report.note(f"rows stay on their rank: {stays}")
        if could and not shares and any(each.op == "varlen_attention" for each in report.replaced):
            report.note(
                "rows stay as TRL has shuffled them, and prompts are computed for each: something is dropped out"
            )
        if not shares or (trainer.args.steps_per_generation == 1 and not across):
            return
        reason = stays_shuffled(trainer, across)
        if reason is None:
            Arranger(trainer, self._balance, across, report.note).start(self._in_trainer)
        else:
            report.note(f"the rows of a prompt stay spread over micro-batches: {reason}")

    def _compile_ahead(self, model: Any, trainer: Trainer | None, state: TrainerState) -> None:
        assert self._handle is not None
        trl = self._handle.serves_trl and any(
            cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__
        )
        context = contextlib.nullcontext if trainer is None else trainer.compute_loss_context_manager
        plan = None if self._planner is None else self._planner.rehearsal()
        recorded = warmup.record(
            self._handle, model, warmup.ROWS, trl=trl, context=context, plan=plan, beside=self._served_beside
        )
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
        def make(original: Any) -> Callable[..., Any]:
            def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
                if "loss" in logs and self._handle is not None:
                    before, *seen = self._since
                    self._since = now, *tokens = (time.perf_counter(), self._handle.tokens, self._handle.live_tokens)
                    names = ("tokens_per_second", "live_tokens_per_second")
                    for name, new, old in zip(names, tokens, seen, strict=True):
                        logs[name] = round((new - old) / max(now - before, 1e-9), 1)
                    logs["peak_memory_gib"] = round(_peak_memory_gib(trainer.args.device), 3)
                    layers = self._handle.settings.layers
                    if layers is not None and layers.on:
                        logs["layers_replayed"] = round(layers.share_since(), 3)
                    rollouts = self._handle.report().rollouts
                    if rollouts is not None and (seconds := rollouts.seconds_since()):
                        logs["generation_seconds"] = round(seconds, 3)
                original(logs, *args, **kwargs)

            return log

        self._wrap(trainer, "log", make)

    def _loss_is_added(self) -> None:
        if self._loss_filter is not None:
            self._loss_filter.ask_again()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._audit_steps and state.global_step and state.global_step % self._audit_steps == 0:
            self._compare(args)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._loss_is_added()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._repeats is not None:
            self._repeats.optimizer_stepped()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._repeats is not None:
            self._repeats.step_ended()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._loss_is_added()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.restore()
