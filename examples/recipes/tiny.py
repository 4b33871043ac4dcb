"""Runs a recipe on a tiny model and a few rows that are made here, on a CPU: a try of the whole command.

    python examples/recipes/tiny.py sft-lora
    python examples/recipes/tiny.py grpo --max_steps 5

The command is the recipe's own, which stands in its YAML file. Options behind it put the model, the data, the device
and a few sizes in place of the recipe's. More options go to TRL. The model has random weights, so a run shows that the
command works, and nothing about the recipe's numbers. The output folder is `runs/recipes/NAME/out`.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from _common import byte_level_tokenizer, sum_pairs
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3MoeConfig,
    set_seed,
)

NAMES = sorted(file.stem for file in HERE.glob("*.yaml"))
# The words of a conversation, each message in one line.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# In place of the recipe's own, for every recipe. A CPU computes in fp32.
TINY = {
    "dtype": "float32", "bf16": "False", "use_cpu": "True", "max_steps": "3", "warmup_steps": "1", "logging_steps": "1",
    "max_length": "128", "per_device_train_batch_size": "4", "gradient_accumulation_steps": "1", "save_strategy": "no",
    "learning_rate": "1e-3", "disable_tqdm": "True",
}  # fmt: skip
# And for one recipe. None takes an option of `TINY` away, which the command does not have.
ALSO: dict[str, dict[str, str | None]] = {
    # A model with random weights puts nothing into a box, and is never right: the second reward differs between rows.
    "grpo": {
        "num_generations": "4", "max_completion_length": "12", "max_length": None,
        "reward_funcs": "examples.recipes.rewards.same_answer examples.recipes.tiny.share_of_ascii",
    },
    # Of `accelerate launch`: a port that is free, for the ranks to meet.
    "two-devices": {"mixed_precision": "no", "main_process_port": "0"},
}  # fmt: skip
# Values of options of `npu-kernels run` that are for long rows.
SLICES = {"8192": "32"}


def command_of(name: str) -> list[str]:
    """Returns a recipe's command, which stands in a comment of its file, as words."""
    found = re.search(r"^#   (npu-kernels run .*)$", (HERE / f"{name}.yaml").read_text(), re.MULTILINE)
    assert found is not None, f"{name}.yaml has no command"
    return shlex.split(found.group(1))


def share_of_ascii(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Returns for each completion the share of its characters that are ASCII: a reward for bytes at random."""
    texts = [each[-1]["content"] for each in completions]
    return [sum(map(str.isascii, text)) / max(1, len(text)) for text in texts]


def rows_of(task: str) -> list[dict[str, Any]]:
    """Returns a few rows with the columns of the data set that the recipe names."""
    rows: list[dict[str, Any]] = []
    for a, b in sum_pairs(24, 49, seed=0):
        asked = [{"role": "user", "content": f"{a}+{b}?"}]
        right = [{"role": "assistant", "content": f"The sum is \\boxed{{{a + b}}}." + " It is." * (a % 4)}]
        wrong = [{"role": "assistant", "content": f"The sum is {a + b + 1}."}]
        if task == "grpo":
            rows.append({"prompt": asked, "solution": f"${a + b}$"})
        elif task == "dpo":
            rows.append({"chosen": asked + right, "rejected": asked + wrong})
        else:
            rows.append({"messages": asked + right})
    return rows


def config_of(name: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Returns the config of a tiny model of the recipe's family."""
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if name == "sft-moe":
        return Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    return (LlamaConfig if name == "long-context" else Qwen3Config)(**sizes)


def prepare(name: str, folder: Path) -> list[str]:
    """Makes the model and the data of a recipe in a folder, and returns the words of its command, made tiny."""
    *before, trl, task, option, _ = command_of(name)
    set_seed(0)  # the same weights in every run, so that runs can be compared
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    AutoModelForCausalLM.from_config(config_of(name, tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir(exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows_of(task)]
    (folder / "data" / "train.jsonl").write_text("".join(lines), encoding="utf-8")

    options: dict[str, str | None] = {**TINY, **ALSO.get(name, {})}
    paths = {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "out"}
    if name == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        print("bitsandbytes is not installed: the weights stay in fp32, and the rest is QLoRA as in the recipe")
        options["load_in_4bit"] = "False"
    chosen = [[f"--{key}", *value.split()] for key, value in options.items() if value is not None]
    before = [SLICES.get(word, word) for word in before]
    chosen += [[f"--{key}", str(folder / path)] for key, path in paths.items()]
    return [*before, trl, task, option, str(HERE / f"{name}.yaml"), *chain.from_iterable(chosen)]


def main() -> int:
    """Runs one recipe."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        print(f"usage: python examples/recipes/tiny.py NAME [options of TRL]; NAME is one of {', '.join(NAMES)}")
        return 2
    folder = Path("runs", "recipes", name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    command = [*prepare(name, folder), *sys.argv[2:]]
    print(shlex.join(command), flush=True)
    # In the root of the checkout, where the recipes find their files.
    return subprocess.run([sys.executable, "-m", "npu_trainer_kernels", *command[1:]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
