"""Draws docs/figures/logged.png: the columns of the Trainer's logs, of two tiny trainings on two CPU cores.

    python docs/figures/logged.py

draws docs/figures/logged.json. That file is made of runs of the examples:

    tiny="--max_steps 40 --logging_steps 2 --save_strategy steps --save_steps 40 --save_only_model True --use_cpu True"
    python examples/sft.py $tiny --text_characters 200000 --per_device_train_batch_size 4 --output_dir runs/plain
    python examples/sft.py $tiny --text_characters 200000 --per_device_train_batch_size 4 --output_dir runs/sft \
        --use_npu_kernels
    python examples/grpo.py $tiny --supervised_steps 60 --per_device_train_batch_size 64 --output_dir runs/grpo \
        --use_npu_kernels --npu_kernels_rollouts on
    python docs/figures/logged.py runs/plain runs/sft runs/grpo

with OMP_NUM_THREADS=1. Seconds and memory are those of the machine, and say nothing about another.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
DATA = HERE / "logged.json"
RUNS = {
    "sft_plain": "examples/sft.py without the kernels",
    "sft": "examples/sft.py with them",
    "grpo": "examples/grpo.py with them",
}
EVERY = 2  # `--logging_steps`: what is logged as a sum is of so many steps
COLUMNS = (
    "step", "loss", "tokens_per_second", "live_tokens_per_second", "peak_memory_gib", "padding_left_out",
    "beginnings_left_out", "generation_seconds", "update_seconds", "waiting_seconds",
)  # fmt: skip
TIMES = {"generation_seconds": "#c44e52", "update_seconds": "#4c72b0", "waiting_seconds": "#dd8452"}


def read(folder: Path) -> list[dict[str, float]]:
    """Returns the columns of a run that has saved one checkpoint, as they were logged."""
    (state,) = folder.glob("checkpoint-*/trainer_state.json")
    entries = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return [{name: entry[name] for name in COLUMNS if name in entry} for entry in entries if "loss" in entry]


def line(axes: plt.Axes, run: list[dict[str, float]], name: str, label: str | None = None, **style: Any) -> None:
    """Draws a column over the steps."""
    axes.plot([entry["step"] for entry in run], [entry[name] for entry in run], label=label or name, **style)


def times(axes: plt.Axes, run: list[dict[str, float]]) -> None:
    """Stacks the seconds of a step; those of generation are logged as the sum since the last entry."""
    bottom = [0.0] * len(run)
    for name, colour in TIMES.items():
        if name not in run[0]:
            continue
        scale = EVERY if name == "generation_seconds" else 1
        label = f"{name} / {EVERY}" if scale > 1 else name
        heights = [entry[name] / scale for entry in run]
        axes.bar([entry["step"] for entry in run], heights, 1.6, bottom, color=colour, label=label)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_ylim(0, 1.45 * max(bottom))  # room for the legend
    axes.set_ylabel("seconds of a step")


def main() -> None:
    """Reads the runs, if some are given, and draws the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="; ".join(RUNS.values()))
    folders = parser.parse_args().folders
    if folders:
        if len(folders) != len(RUNS):
            parser.error(f"{len(RUNS)} folders are needed: {'; '.join(RUNS.values())}; got {len(folders)}")
        made = {name: read(folder) for name, folder in zip(RUNS, folders, strict=True)}
        text = ",\n".join(
            f'"{name}": [\n' + ",\n".join(json.dumps(e) for e in entries) + "\n]" for name, entries in made.items()
        )
        DATA.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    runs = json.loads(DATA.read_text(encoding="utf-8"))
    plain, sft, grpo = (runs[name] for name in RUNS)

    figure, axes = plt.subplots(3, 2, figsize=(8, 8.4), layout="constrained")
    (loss, sft_times), (grpo_times, speed), (shares, memory) = axes
    line(loss, plain, "loss", "loss, plain", color="#c44e52", linewidth=4, alpha=0.4)
    line(loss, sft, "loss", "loss, with the callback", color="#4c72b0")
    loss.set_title("SFT: loss", fontsize=10)
    times(sft_times, sft)
    sft_times.set_title("SFT: time of a step", fontsize=10)
    times(grpo_times, grpo)
    grpo_times.set_title("GRPO: time of a step", fontsize=10)
    line(speed, grpo, "tokens_per_second", color="#8c8c8c")
    line(speed, grpo, "live_tokens_per_second", color="#55a868")
    speed.set_ylim(bottom=0)
    speed.set_title("GRPO: tokens per second, generation included", fontsize=10)
    line(shares, grpo, "padding_left_out", color="#8172b3")
    line(shares, grpo, "beginnings_left_out", color="#937860")
    shares.set_ylim(0, 1)
    shares.set_title("GRPO: shares left out", fontsize=10)
    line(memory, sft, "peak_memory_gib", "SFT: peak_memory_gib", color="#4c72b0")
    line(memory, grpo, "peak_memory_gib", "GRPO: peak_memory_gib", color="#c44e52")
    memory.set_ylim(0, 1.2 * max(entry["peak_memory_gib"] for entry in sft + grpo))
    memory.set_title("Peak of the process's resident memory [GiB]", fontsize=10)
    for each in axes.flat:
        each.set_xlabel("step")
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        each.legend(fontsize=8, frameon=False)
    figure.savefig(HERE / "logged.png", dpi=85)


if __name__ == "__main__":
    main()
