"""`npu-kernels run` in front of real commands: TRL's, accelerate's and torch's, with ranks."""

from pathlib import Path

import pytest

from tests import warm
from tests.cli.training import ROOT, check, history, make_model, run, write_rows

STEPS = [
    "--max_steps", "2", "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "2",
    "--per_device_train_batch_size", "4", "--use_cpu", "True", "--bf16", "False", "--report_to", "none",
    "--disable_tqdm", "True", "--optim", "sgd", "--learning_rate", "0.1",
]  # fmt: skip
# What a user has: a script that knows nothing of this package.
SCRIPT = """
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from tests.distributed.ranks import end_ranks
from tests.models import batch, small_model

class Rows(torch.utils.data.Dataset):
    data = batch(rows=16)

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.data.items()}

def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    trainer = Trainer(small_model("llama"), args, train_dataset=Rows())
    trainer.train()
    assert trainer.accelerator.num_processes == 2

main()
end_ranks()
"""
TASKS = {
    "sft": ({"text": "{a}+3={b}"}, []),
    "dpo": ({"prompt": "{a}+3=", "chosen": "{b}", "rejected": "0"}, []),
    "grpo": (
        {"prompt": "{a}+3="},
        ["--reward_funcs", "rewards.total", "--num_generations", "4", "--max_completion_length", "7"],
    ),
}


@pytest.mark.full("grpo", "dpo")
@pytest.mark.parametrize("task", TASKS)
def test_trl(tmp_path, task):
    row, options = TASKS[task]
    model = make_model(tmp_path / "model")
    rows = [{name: text.format(a=a, b=a + 3) for name, text in row.items()} for a in range(16)]
    write_rows(tmp_path / "data" / "train.jsonl", rows)
    reward = "def total(completion_ids, **_):\n    return [sum(ids) % 7.0 for ids in completion_ids]\n"
    (tmp_path / "rewards.py").write_text(reward)
    arguments = ["--model_name_or_path", model, "--dataset_name", "data", *STEPS, *options]

    def plain_run(output):
        given = (*arguments, "--output_dir", str(output))
        done = warm.run(f"trl.scripts.{task}", *given, folder=tmp_path, output=tmp_path / "plain.txt")
        assert done.returncode == 0, done.output[-6000:]
        return done.output

    rel = 1e-3 if task == "grpo" else 1e-5
    # The switch is tried with the first; what it leaves out of a command is the same for all.
    printed = check(tmp_path, ["trl", task, *arguments], "--output_dir", rel, plain_run if task != "sft" else None)
    assert "linear_logprob" in printed
    assert "not planned" not in printed


LAUNCHERS = {
    "torchrun": ["torchrun", "--standalone", "--nproc_per_node", "2"],
    # As on the NPUs of one machine, but that the ranks compute on the CPU.
    "accelerate": [
        "accelerate", "launch", "--config_file", str(ROOT / "examples" / "accelerate" / "ddp.yaml"),
        "--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.full("accelerate")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks(tmp_path, script, launcher):
    """The numbers of both ranks together are the same, and rank 0 alone reports."""

    def plain_run(output):
        done = warm.run_ranks(2, str(script), *STEPS, "--output_dir", str(output), output=tmp_path / "plain.txt")
        assert done.returncode == 0, done.output[-6000:]
        return done.output

    command = [*LAUNCHERS[launcher], str(script), *STEPS]
    check(tmp_path, command, "--output_dir", plain_run=plain_run if launcher != "torchrun" else None)


def test_variables_alone(tmp_path, script):
    """For those who cannot put a word in front of their command: the variables, and then the command as it is."""
    single = tmp_path / "single.py"
    single.write_text(script.read_text().replace("num_processes == 2", "num_processes == 1"))
    shell = 'eval "$(python -m npu_trainer_kernels run --print-env --ops rms_norm)"; exec python "$@"'
    # The switch is off for `npu-kernels run` around the shell, and on for what the shell sets.
    command = ["sh", "-c", shell, "sh", str(single), *STEPS, "--output_dir", "out"]
    output = run(tmp_path, command, NPU_KERNELS_RUN="0")
    assert "npu-kernels run: rms_norm put into LlamaForCausalLM" in output
    assert len(history(tmp_path / "out")) == 2
