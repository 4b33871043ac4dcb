"""Trains a few steps on the ranks that torchrun has started, and lets rank 0 write the parameters.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.run {sft,grpo} {plain,kernels} FILE
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments
from trl import GRPOConfig
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsCallback
from tests.models import batch, small_model
from tests.trainers.test_grpo import reward, tokenizer


def main(task: str, variant: str, target: str) -> None:
    state = PartialState(cpu=True)
    folder = Path(tempfile.gettempdir()) / f"model-{Path(target).stem}"
    if state.is_main_process:
        small_model("qwen3", tie_word_embeddings=False).save_pretrained(folder)
    state.wait_for_everyone()
    model = Qwen3ForCausalLM.from_pretrained(folder)
    common = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "optim": "sgd",
        "learning_rate": 1e-1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.0, "seed": 3,
    }  # fmt: skip
    kernels = variant == "kernels"
    torch.manual_seed(0)
    if task == "sft":
        data = batch(rows=24)
        rows = [{name: values[i].tolist() for name, values in data.items()} for i in range(24)]
        callbacks = [NpuKernelsCallback()] if kernels else []
        trainer = Trainer(model, TrainingArguments(**common), train_dataset=rows, callbacks=callbacks)
    else:
        trainer = (GRPOTrainer if kernels else TrlGRPOTrainer)(
            model,
            reward_funcs=reward,
            args=GRPOConfig(**{**common, "num_generations": 4, "max_completion_length": 6}),
            train_dataset=Dataset.from_dict({"prompt": ["1+2=", "3+44=", "5+6=", "71+8="] * 4}),
            processing_class=tokenizer(),
        )
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel), type(trainer.model_wrapped)
    full = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if state.is_main_process:
        torch.save({name: value.cpu() for name, value in full.items()}, target)
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
