"""The part of `npu-kernels run` in a training process: every Trainer that is built gets a callback.

`on_path/sitecustomize.py` calls `put_into` when `transformers.trainer` has been imported. The options come from
environment variables (`NpuKernelsArguments.from_environment`).
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from .arguments import NpuKernelsArguments
from .callback import NpuKernelsCallback, calling_trainer
from .support.switch import RUN

__all__ = ["RunCallback", "put_into"]


def put_into(trainer_module: ModuleType, built: Callable[[], None]) -> None:
    """Gives every Trainer that is built from now on a `RunCallback`.

    Args:
        trainer_module: `transformers.trainer`, just imported.
        built: called for each Trainer.

    Raises:
        ValueError: an environment variable has an invalid value.
    """
    NpuKernelsArguments.from_environment()
    original = trainer_module.Trainer.__init__

    # The list is extended whenever a Trainer is about to read it, since ms-swift replaces the list.
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        built()
        if RunCallback not in trainer_module.DEFAULT_CALLBACKS:
            trainer_module.DEFAULT_CALLBACKS.append(RunCallback)
        original(self, *args, **kwargs)

    trainer_module.Trainer.__init__ = __init__


class RunCallback(NpuKernelsCallback):
    """The callback that `npu-kernels run` gives to a Trainer, with the options of the environment.

    It does nothing if the script has given its Trainer an `NpuKernelsCallback`. If a model cannot be patched, it prints
    one line, and training goes on without the kernels; with `strict` it raises.
    """

    in_full = "npu-kernels run --report full, or NPU_KERNELS_REPORT=full"

    def __init__(self) -> None:
        chosen = NpuKernelsArguments.from_environment()
        super().__init__(**chosen.options())
        self._stops = chosen.npu_kernels_strict
        self._off = False
        self._said = ""

    def _attempt(self, event: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
        """Runs an event of `NpuKernelsCallback`, and returns whether it was done."""
        trainer = calling_trainer()
        others = [] if trainer is None else trainer.callback_handler.callbacks
        if any(isinstance(other, NpuKernelsCallback) and other is not self for other in others):
            self.restore()
            return False
        if self._off:
            return False
        try:
            event(*args, **kwargs)
        except Exception as error:
            self.restore()
            if self._stops:
                raise
            # The user's script knows nothing of this package, whose failure must not end the run.
            self._off = True
            reason = f"{type(error).__name__}: {error}"
            print(f"npu-kernels run: this Trainer trains without the kernels ({reason})", file=sys.stderr, flush=True)
            return False
        return True

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._attempt(super().on_init_end, args, state, control, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._attempt(super().on_train_begin, args, state, control, **kwargs) and state.is_world_process_zero:
            ops = ", ".join(dict.fromkeys(each.op for each in self.report().used))
            said = f"npu-kernels run: {ops or 'no op'} put into {type(kwargs['model']).__name__}; {RUN}=0 leaves it out"
            if said != self._said:
                self._said = said
                print(said, flush=True)
