"""Runs that go wrong, or side by side: killed, broken by a kernel, interleaved, with workers."""

import os
import signal
import sys
import threading

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, SFTConfig, SFTTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsArguments, NpuKernelsCallback
from npu_trainer_kernels.ops.head import chunks, engine
from tests import warm
from tests.models import small_model
from tests.patching.test_apply import state_of
from tests.perturbed import Perturbed
from tests.test_callback import losses, make_trainer
from tests.training.test_grpo import reward, tokenizer

STEPS, SAVED, KILLED = 5, 2, 4


# ---------------------------------------------------------------------------------------------------------------------
# Killed
# ---------------------------------------------------------------------------------------------------------------------


def run_to_be_killed(folder, perturbed) -> None:
    """Dies inside the head of step KILLED, with no chance to clean up."""
    if perturbed:
        Perturbed().__enter__()
    torch.set_num_threads(1)
    trainer = make_trainer(folder, callbacks=[NpuKernelsCallback()], **saving())
    original = chunks._project

    def project(*args):
        if trainer.state.global_step == KILLED - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    chunks._project = project
    trainer.train()


def saving() -> dict:
    return {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "save_total_limit": 1}


def test_a_killed_run_resumes_as_if_nothing_had_happened(tmp_path):
    process = warm.context().Process(target=run_to_be_killed, args=(tmp_path / "killed", Perturbed.is_on()))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == -signal.SIGKILL
    assert [folder.name for folder in (tmp_path / "killed").iterdir()] == [f"checkpoint-{SAVED}"]

    whole, resumed = (
        make_trainer(tmp_path / name, callbacks=[NpuKernelsCallback()], **saving()) for name in ("whole", "killed")
    )
    whole.train()
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    start = small_model("llama").state_dict()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
        assert not torch.equal(start[name], value), name


# ---------------------------------------------------------------------------------------------------------------------
# Broken inside a kernel
# ---------------------------------------------------------------------------------------------------------------------


def plain(tmp_path, callbacks, **arguments) -> Trainer:
    return make_trainer(tmp_path, callbacks=callbacks, **arguments)


def sft(tmp_path, callbacks, **arguments) -> Trainer:
    """TRL's, with its own head."""
    return SFTTrainer(
        small_model("qwen3"),
        args=SFTConfig(**settings(tmp_path, arguments)),
        train_dataset=Dataset.from_dict({"text": [f"{a}+3={a + 3}" for a in range(8)]}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def grpo(tmp_path, callbacks, **arguments) -> Trainer:
    """Ours; callbacks say whether with kernels."""
    return GRPOTrainer(
        small_model("qwen3"),
        reward_funcs=reward,
        args=GRPOConfig(**settings(tmp_path, arguments), num_generations=4, max_completion_length=5),
        train_dataset=Dataset.from_dict({"prompt": ["1+2=", "3+44="] * 4}),
        processing_class=tokenizer(),
        npu_kernels=NpuKernelsArguments(use_npu_kernels=bool(callbacks)),
    )


def settings(tmp_path, arguments) -> dict:
    return {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False,
        "gradient_checkpointing": False, "learning_rate": 1e-3, **arguments,
    }  # fmt: skip


def modules_of_trl() -> dict[tuple[str, str], int]:
    """The identity of everything in every module of TRL that is loaded."""
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "trl"}
    return {(name, key): id(value) for name, module in loaded.items() for key, value in vars(module).items()}


def state_of_optimizer(trainer: Trainer) -> tuple[type, set[str], int]:
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    hooks = len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks)
    return type(inner), set(vars(inner)) | set(vars(optimizer)), hooks


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("make", [plain, sft, grpo])
def test_a_kernel_that_raises_leaves_nothing_patched(tmp_path, monkeypatch, make, where):
    """Beside the same trainer without kernels, whose loss raises."""

    def broken(*args, **kwargs):
        raise RuntimeError("planted")

    stock = make(tmp_path, [])
    stock.compute_loss = broken
    with pytest.raises(RuntimeError, match="planted"):
        stock.train()
    of_trl = modules_of_trl()

    trainer = make(tmp_path, [NpuKernelsCallback()])
    monkeypatch.setattr(engine._Head, where, staticmethod(broken))
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert state_of(trainer.model) == state_of(stock.model)
    assert state_of_optimizer(trainer) == state_of_optimizer(stock)
    assert {key: value for key, value in modules_of_trl().items() if key in of_trl} == of_trl


# ---------------------------------------------------------------------------------------------------------------------
# Side by side
# ---------------------------------------------------------------------------------------------------------------------


class Baton(TrainerCallback):
    """Hands over to the other thread after every step, and for good at the end."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore, order: list[str], name: str) -> None:
        self.mine, self.other, self.order, self.name = mine, other, order, name

    def on_train_begin(self, *args, **kwargs):
        assert self.mine.acquire(timeout=120)

    def on_step_end(self, *args, **kwargs):
        self.order.append(self.name)
        self.other.release()
        assert self.mine.acquire(timeout=120)

    def on_train_end(self, *args, **kwargs):
        self.other.release()


@pytest.mark.full("plain")
@pytest.mark.parametrize("make", [plain, sft])
def test_interleaved_trainers_do_not_disturb_each_other(tmp_path, make):
    in_order = {"train_sampling_strategy": "sequential"}
    kernels = {"patched": [NpuKernelsCallback], "stock": []}
    alone = {}
    for name, callbacks in kernels.items():
        trainer = make(tmp_path, [each() for each in callbacks], **in_order)
        trainer.train()
        alone[name] = trainer

    turns, order = {name: threading.Semaphore(0) for name in kernels}, []
    trainers = {}
    for name, other in (("patched", "stock"), ("stock", "patched")):
        baton = Baton(turns[name], turns[other], order, name)
        trainers[name] = make(tmp_path, [*(each() for each in kernels[name]), baton], **in_order)
    threads = [threading.Thread(target=trainer.train) for trainer in trainers.values()]
    for thread in threads:
        thread.start()
    turns["patched"].release()
    for thread in threads:
        thread.join(timeout=300)
    assert order == ["patched", "stock"] * 3
    for name in kernels:
        assert losses(trainers[name]) == losses(alone[name])
        assert all(map(torch.equal, trainers[name].model.parameters(), alone[name].model.parameters())), name
    # The bits tell the two apart, so that taking the other's head would show.
    assert not all(map(torch.equal, *(alone[name].model.parameters() for name in kernels)))


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_dataloader_workers(tmp_path, start):
    """What the second is given it is given pickled, as workers by "spawn" are."""
    warm.context()
    few = {"train_sampling_strategy": "sequential"}
    callback = NpuKernelsCallback()
    alone = make_trainer(tmp_path, **few)
    alone.train()
    workers = make_trainer(
        tmp_path, callbacks=[callback], dataloader_num_workers=2, dataloader_multiprocessing_context=start, **few
    )
    workers.train()
    assert callback.report().replaced
    assert losses(workers) == pytest.approx(losses(alone), rel=1e-5)
