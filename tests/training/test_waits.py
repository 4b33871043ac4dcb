"""How often the host waits for the device in a step of TRL's trainers: less with the callback than without.

On the host everything is there at once, so what would wait is counted: numbers that are read, and indices whose number
depends on values. A wait is the project's own where its code asks for it.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import npu_trainer_kernels
from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.patching.body import padding
from tests.models import small_model
from tests.training.test_grpo import reward, tokenizer
from tests.training.test_trl_trainers import ANSWERS, COMMON, PROMPTS, SUMS, WRONG

_OURS = str(Path(npu_trainer_kernels.__file__).parent)
_BELOW = (str(Path(torch.__file__).parent), __file__)
# Ids are checked on the CPU, and on a device in its debug mode alone.
_ON_THE_HOST = str(Path(_OURS, "ops", "checks.py"))
_aten = torch.ops.aten
# Reading a number, and results whose size depends on values.
_WAIT = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default,
    _aten.unique_dim.default, _aten.unique_consecutive.default, _aten.repeat_interleave.Tensor,
}  # fmt: skip
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


def _who() -> str:
    """The file and line whose code asks for a result."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_BELOW) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Numbers(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = function in _INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1])
        if function in _WAIT or masked:
            self.seen.append(_who())
        return function(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.cpu, torch.Tensor.tolist):
            self.seen.append(_who())
        return function(*args, **(kwargs or {}))


class _Steps(TrainerCallback):
    """The waits of each step; its batch is made before it begins, and what is logged is read after it has ended."""

    def __init__(self, seen: list[str]) -> None:
        self.seen, self.steps, self.begin = seen, [], 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(self.seen[self.begin :])
        self.begin = len(self.seen)


def waits(
    folder: Path, trainer: Any, config: Any, data: Any, extra: Any, ours: bool
) -> tuple[float, float, Counter[str]]:
    """Of a step, on average, those of the project's own, all of them, and who waited."""
    small_model("qwen3").save_pretrained(folder / "model")
    seen: list[str] = []
    steps = _Steps(seen)
    torch.manual_seed(0)
    model = (
        Qwen3ForSequenceClassification.from_pretrained(folder / "model", num_labels=1) if trainer is RewardTrainer
        else Qwen3ForCausalLM.from_pretrained(folder / "model")
    )  # fmt: skip
    made = trainer(
        model,
        args=config(output_dir=str(folder), **{**COMMON, "max_steps": 6, "logging_steps": 100}, **extra),
        train_dataset=Dataset.from_dict(data), processing_class=tokenizer(),
        callbacks=[NpuKernelsCallback(warm_up=False)] * ours + [steps],
        **({"reward_funcs": reward} if trainer in (GRPOTrainer, RLOOTrainer) else {}),
    )  # fmt: skip
    with _Numbers(seen), _Copies(seen):
        made.train()
    # What is learned in the first steps (SFT's gradient, which layers are served) is asked for there.
    found = [who for step in steps.steps[2:] for who in step if not who.startswith(_ON_THE_HOST)]
    count = len(steps.steps[2:])
    own = [who for who in found if who.startswith(_OURS)]
    return len(own) / count, len(found) / count, Counter(found)


# Forwards of a step, and whether the gradient that arrives is compared with a planned one, which waits, too. RLOO has
# one for the log-probabilities of its completions and one of the reference besides the one that is trained.
CASES = {
    "sft": (1, True, SFTTrainer, SFTConfig, {"text": SUMS}, {}),
    "dpo": (2, False, DPOTrainer, DPOConfig, {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": WRONG}, {}),
    "kto": (4, False, KTOTrainer, KTOConfig,
            {"prompt": PROMPTS * 2, "completion": ANSWERS + WRONG, "label": [True] * 8 + [False] * 8}, {}),
    "grpo": (1, True, GRPOTrainer, GRPOConfig, {"prompt": PROMPTS},
             {"num_generations": 2, "max_completion_length": 6}),
    "rloo": (3, False, RLOOTrainer, RLOOConfig, {"prompt": PROMPTS},
             {"num_generations": 2, "max_completion_length": 6}),
    "reward": (1, False, RewardTrainer, RewardConfig, {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": WRONG}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_waits(tmp_path, monkeypatch, name):
    # The first batches that have padding are watched, one of which may come later than the second step.
    monkeypatch.setattr(padding, "_FIRST", 0)
    forwards, planned, *case = CASES[name]
    _, plain, _ = waits(tmp_path, *case, ours=False)
    own, total, found = waits(tmp_path, *case, ours=True)
    assert own == forwards + planned, found
    assert own <= 2 or name in ("kto", "rloo")
    assert total < plain, found
