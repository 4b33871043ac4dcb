"""How each command of the pages is run here, and where those are run that are not.

A command stands in one of two tables, and a test fails if it stands in none: `RUN` has those that a test runs, with
`USER` and `SMALLER` saying what is put in place of words that stand for something of the user's, or that would take
minutes; `ELSEWHERE` has those that need what a machine without accelerator, hub and index lacks, or that another test
runs.
"""

import re
from dataclasses import dataclass

__all__ = ["ELSEWHERE", "LOGGED", "RUN", "SMALLER", "USER", "Run", "as_run"]

# The user's own model, which is tiny here. There is no hub for the ids of real ones.
USER = {r"\b(?:CONFIG|MODEL)\b": "tiny"}


@dataclass(frozen=True)
class Run:
    """A command that is run.

    Attributes:
        last: a pattern that the last line of its output matches.
        extras: whether the environment has the optional packages, which the page asks for by name.
    """

    last: str
    extras: bool = False


# Options with which TRL's command logs each step, and saves what `npu-kernels compare` reads.
LOGGED = "--save_strategy steps --save_steps 3 --logging_steps 1 --seed 7"
# A smaller size of a command, by the command after `USER`: the reason why it is not run as it stands, and what is run.
SMALLER = {
    "python examples/sft.py --use_npu_kernels": (
        "all of it takes 100 seconds of a core",
        "python examples/sft.py --use_npu_kernels --max_steps 3 --text_characters 60000 --logging_steps 1",
    ),
    "npu-kernels tune --model tiny": ("512 tokens of every op", "npu-kernels tune --model tiny --tokens 64"),
    "npu-kernels tune --model tiny --tokens 8192": (
        "8192 tokens of every op", "npu-kernels tune --model tiny --tokens 64",
    ),
    "npu-kernels fit --model tiny --memory 80": (
        "hundreds of rows of the tiny model fit", "npu-kernels fit --model tiny --memory 2.1",
    ),
    "npu-kernels verify --model tiny": (
        "50 steps of 7 runs", "npu-kernels verify --model tiny --steps 2 --noise-runs 2 --sequence-length 32",
    ),
    "npu-kernels verify --model tiny --dataset texts.jsonl --steps 50": (
        "50 steps of 7 runs",
        "npu-kernels verify --model tiny --dataset texts.jsonl --steps 2 --noise-runs 2 --sequence-length 32",
    ),
    "npu-kernels prove": ("all of it takes an hour", "npu-kernels prove --quick"),
    # The environment is made, so that `make` installs nothing; its locked packages are tested by all other tests.
    "make demo": ("all of it takes five minutes", "make demo DEMO=--quick VENV=$EXTRAS"),
    "npu-kernels run trl sft --config examples/recipes/sft.yaml": (
        "the model and the data are the hub's; this prints and runs the same with tiny ones",
        f"python examples/recipes/tiny.py sft {LOGGED}",
    ),
    "npu-kernels bench --quick --only rms_norm": (
        "all rows of the op", "npu-kernels bench --quick --only 'rms_norm/N=2048 H=160/float32/reference'",
    ),
    "npu-kernels COMMAND --help": (
        "all commands at once",
        "for each in run doctor tune compile fit verify compare prove bench; do npu-kernels $each --help || exit 1; "
        "done",
    ),
}  # fmt: skip

_WRITTEN = r"model, tokenizer and metrics\.json are in runs/sft"
_THE_SAME = r"the kernels train this model as it trains without them"
RUN = {
    "pip install .": Run(r"Successfully installed npu_trainer_kernels-[\d.]+"),
    "npu-kernels doctor": Run(r"Everything checked passed: the installation, and \d\d ops .*| *-> npu-kernels tune .*"),
    "python examples/sft.py --use_npu_kernels": Run(_WRITTEN),
    "npu-kernels tune --model CONFIG": Run(r".*tuned\.json.*"),
    "npu-kernels tune --model CONFIG --tokens 8192": Run(r".*tuned\.json.*"),
    "npu-kernels fit --model CONFIG --memory 80": Run(r"Fits: .* at micro-batches of .*", extras=True),
    "npu-kernels verify --model MODEL": Run(_THE_SAME),
    "npu-kernels verify --model MODEL --dataset texts.jsonl --steps 50": Run(_THE_SAME, extras=True),
    "npu-kernels prove": Run(r".*npu-kernels-prove/prove-[\w-]+\.zip"),
    "npu-kernels compare runs/plain runs/kernels --figure runs.png": Run(r"runs\.png", extras=True),
    "npu-kernels compare runs/plain runs/sft --figure compared.png": Run(r"compared\.png", extras=True),
    "npu-kernels bench --quick --only rms_norm": Run(r".*npu-kernels-bench.*"),
    "npu-kernels run train.py --lr 1e-4": Run(r"npu-kernels run: .* put into LlamaForCausalLM.*|\{'train_runtime.*"),
    "npu-kernels run trl sft --config examples/recipes/sft.yaml": Run(
        r".*Model saved to .*/runs/recipes/sft/out\.", extras=True
    ),
    'eval "$(npu-kernels run --print-env)"': Run(r""),
    'npu-kernels run --print-env | sed "s/^export //" >> ~/.deepspeed_env': Run(r""),
    "npu-kernels COMMAND --help": Run(r".*"),
    "make demo": Run(r"\d+ seconds in all; models, metrics and logs are in runs/demo/", extras=True),
    "python train.py --output_dir out --use_npu_kernels --npu_kernels_ops rms_norm linear_cross_entropy": Run(
        r".*'train_runtime'.*"
    ),
}


def as_run(command: str) -> str:
    """Returns what a test runs in place of a command."""
    for pattern, own in USER.items():
        if command not in SMALLER:
            command = re.sub(pattern, own, command)
    return SMALLER[command][1] if command in SMALLER else command


# Commands that no test here runs: by the reason, with the file that runs the same, or that says what it needs.
ELSEWHERE: dict[tuple[str, str], tuple[str, ...]] = {
    ("they name a command, and are none", "README.md"): (
        "npu-kernels run", "npu-kernels fit", "accelerate launch", "trl sft",
    ),
    ("packages of an index", "Makefile"): (
        'pip install ".[npu]"', 'pip install ".[npu-any]"', 'pip install ".[cuda]"',
        "pip install transformers==5.22.2 kernels==0.17.2", "pip install triton",
    ),
    ("every change is held to them", ".ci/run"): ("make docs", "make test", "make checkstyle"),
    ("the checks of doctor, as an object", "tests/cli/test_doctor.py"): (
        "npu-kernels doctor --json --no-times > doctor.json",
    ),
    ("the Ascend compiler", "tests/ascend/test_cli.py"): (
        "npu-kernels compile --model CONFIG --target Ascend910B4",
        "npu-kernels compile --model CONFIG --all-targets --dtype fp32",
    ),
    ("three runs more, whose rounding differs", "tests/cli/test_compare.py"): (
        "npu-kernels compare runs/plain runs/kernels --noise runs/plain-2 runs/plain-3",
    ),
    ("PEFT, and minutes", "tests/cli/test_fit.py"): (
        "npu-kernels fit --model CONFIG --memory 80 --devices 8 --trainer grpo --lora 16 --json",
    ),
    ("each option of fit", "tests/cli/test_fit.py"): ("npu-kernels fit --model CONFIG --memory 80 --seq 4096",),
    ("the hub's configs; the predictions of the page are held to their files", "tests/examples/test_recipes.py"): (
        "npu-kernels fit --model Qwen/Qwen3-0.6B --memory 80 --seq 2048 --batch 8",
        "npu-kernels fit --model Qwen/Qwen3-8B --memory 80 --seq 2048 --batch 4 --lora 16",
        "npu-kernels fit --model Qwen/Qwen3-0.6B --memory 80 --trainer dpo --seq 1024 --batch 8",
        "npu-kernels fit --model Qwen/Qwen3-0.6B --memory 80 --trainer grpo --seq 2304 --prompt 256 --batch 8",
        "npu-kernels fit --model Qwen/Qwen3-30B-A3B --memory 80 --seq 2048 --batch 2 --lora 16",
        "npu-kernels fit --model meta-llama/Llama-3.2-1B-Instruct --memory 80 --seq 131072",
        "npu-kernels fit --model Qwen/Qwen3-8B --memory 80 --seq 2048 --batch 4 --devices 2 --sharding fsdp2",
    ),
    ("the hub; each is run with a tiny model", "tests/examples/test_recipes.py"): (
        "npu-kernels run trl sft --config examples/recipes/sft-lora.yaml",
        "npu-kernels run trl sft --config examples/recipes/qlora.yaml",
        "npu-kernels run trl dpo --config examples/recipes/dpo.yaml",
        "npu-kernels run trl grpo --config examples/recipes/grpo.yaml",
        "npu-kernels run trl sft --config examples/recipes/sft-moe.yaml",
        "npu-kernels run --tiled-mlp 8192 trl sft --config examples/recipes/long-context.yaml",
        "npu-kernels run trl sft --config examples/recipes/two-devices.yaml",
        "python examples/recipes/tiny.py sft", "python examples/recipes/tiny.py sft-lora",
        "python examples/recipes/tiny.py qlora",
        "python examples/recipes/tiny.py dpo", "python examples/recipes/tiny.py grpo",
        "python examples/recipes/tiny.py grpo --max_steps 5", "python examples/recipes/tiny.py sft-moe",
        "python examples/recipes/tiny.py long-context", "python examples/recipes/tiny.py two-devices",
    ),
    ("a script or a file of the user's; each runs with one", "tests/cli/test_run_commands.py"): (
        "npu-kernels run trl sft --config sft.yaml", "npu-kernels run trl grpo --config grpo.yaml",
        "npu-kernels run trl dpo --config dpo.yaml", "npu-kernels run --capture off trl sft --config sft.yaml",
        "npu-kernels run --capture body trl sft --config sft.yaml",
        "npu-kernels run --tiled-mlp 8192 trl sft --config sft.yaml",
        "npu-kernels run --rollouts on trl grpo --config grpo.yaml",
        "npu-kernels run torchrun --nproc_per_node 8 train.py",
        "npu-kernels run --ops rms_norm,swiglu torchrun --nproc_per_node 8 train.py",
        "npu-kernels run accelerate launch --config_file examples/accelerate/ddp.yaml train.py",
    ),
    ("what runs under this Python", "tests/cli/test_run.py"): ("npu-kernels run -m my_package.train --lr 1e-5",),
    ("frameworks in environments of their own", "tests/frameworks/test_frameworks.py"): (
        "npu-kernels run llamafactory-cli train qwen3_full_sft.yaml",
        "FORCE_TORCHRUN=1 npu-kernels run llamafactory-cli train qwen3_full_sft.yaml",
        "npu-kernels run swift sft --model Qwen/Qwen3-8B --dataset my_data.jsonl",
        "NPROC_PER_NODE=8 npu-kernels run swift sft --model Qwen/Qwen3-8B --dataset my_data.jsonl",
        "npu-kernels run axolotl train config.yaml",
    ),
    ("DeepSpeed, in an environment of its own", "tests/zero3/test_launcher.py"): (
        "npu-kernels run deepspeed --num_gpus 8 train.py --deepspeed zero2.json",
        "deepspeed --num_gpus 8 train.py --deepspeed ds.json --use_npu_kernels",
        "accelerate launch --config_file examples/accelerate/deepspeed_zero3.yaml --num_processes 8 train.py "
        "--use_npu_kernels",
    ),
    ("several devices; on two ranks", "tests/distributed/test_accelerate.py"): (
        "accelerate launch --config_file examples/accelerate/fsdp2.yaml --num_processes 8 train.py --use_npu_kernels",
        "torchrun --nproc_per_node 8 train.py --use_npu_kernels",
        "torchrun --nnodes 2 --node_rank 0 --master_addr HOST --nproc_per_node 8 train.py --use_npu_kernels",
        "torchrun --nnodes 2 --node_rank 1 --master_addr HOST --nproc_per_node 8 train.py --use_npu_kernels",
    ),
    ("each option of the flag, in a Trainer", "tests/test_options.py"): (
        "python train.py --use_npu_kernels --npu_kernels_capture on",
        "python train.py --use_npu_kernels --npu_kernels_capture body",
        "python train.py --use_npu_kernels --npu_kernels_tiled_mlp 8192 --gradient_checkpointing",
        "python train.py --use_npu_kernels --npu_kernels_rollouts off",
        "python train.py --use_npu_kernels --report_to tensorboard --logging_steps 10",
        "python train.py --config sft.yaml",
        "ASCEND_LAUNCH_BLOCKING=1 PYTHONFAULTHANDLER=1 NPU_KERNELS_STRICT=1 python train.py ...",
    ),
    ("each script, in a few steps, with its options and with files", "tests/examples/test_examples.py"): (
        "python examples/sft.py --config sft.yaml", "python examples/grpo.py --config grpo.yaml",
        "python examples/sft.py --use_npu_kernels --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my_corpus.jsonl "
        "--bf16",
        "python examples/grpo.py --use_npu_kernels",
        "python examples/grpo.py --use_npu_kernels --model_name_or_path Qwen/Qwen3-0.6B --dataset_name sums.jsonl "
        "--max_completion_length 256 --learning_rate 1e-6 --bf16 True",
        "python examples/trl_distill.py --use_npu_kernels", "python examples/trl_dpo.py --use_npu_kernels",
        "python examples/trl_kto.py --use_npu_kernels", "python examples/trl_rloo.py --use_npu_kernels",
        "python examples/trl_sft.py --use_npu_kernels",
    ),
    ("hours on a card", "tests/convergence/test_suite.py"): (
        "python -m convergence --full --device cuda --jobs 14 --keep runs/convergence",
        "python -m convergence --showcase --device cuda --jobs 8 --keep runs/convergence",
        "export CUDA_VISIBLE_DEVICES=0 CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps CUDA_MPS_LOG_DIRECTORY=/tmp/nvidia-log",
        "nvidia-cuda-mps-control -d",
        "python -m convergence --full --device cuda --jobs 12 --keep runs/convergence",
        "echo quit | nvidia-cuda-mps-control",
    ),
    ("hours, or a results file of a card", "tests/benchmarks/test_benchmarks.py"): (
        "python -m benchmarks", "python -m benchmarks --quick --only rms_norm", "npu-kernels bench --quick",
        "python -m benchmarks --list",
        "python -m benchmarks --groups end-to-end", "python -m benchmarks --groups ops",
        "python -m benchmarks --groups scaling --quick", "python -m benchmarks.fit_check --output "
        "benchmarks/results/NAME.json",
    ),
    ("results files of two runs", "tests/cli/test_bench.py"): (
        "npu-kernels bench --compare old.json new.json", "python -m benchmarks --compare old.json",
        "python -m benchmarks --compare old.json new.json",
    ),
    ("a results file of a card, into the table", "tests/benchmarks/test_evidence.py"): (
        "python -m benchmarks --evidence benchmarks/results/NAME.json",
        "python -m benchmarks --evidence results.json",
    ),
    ("a card", "tests/benchmarks/test_generation.py"): ("python -m benchmarks.generation --output FILE",),
    ("two cards", "tests/benchmarks/test_ranks.py"): (
        "torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --output FILE",
    ),
}  # fmt: skip
