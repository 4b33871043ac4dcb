"""Draws docs/figures/h200-steps.png: how much faster whole training steps are, and what memory they take.

python docs/figures/steps.py
"""

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.results import read

HERE = Path(__file__).resolve().parent
MEASURED = HERE.parents[1] / "benchmarks" / "results" / "2026-11-22-nvidia-h200-sixth-round-steps.json"
SHOWN = {"liger": ("Liger-Kernel", "#2ca02c"), "flag": ("with the flag", "#d62728")}
# Trainer and model, the rows of a step, by the shape of a row in the file.
WORKLOADS = {
    "llama-1b 8x2048": "SFT, Llama 1B\nno padding",
    "llama-1b 8x..2048 exponential": "SFT, Llama 1B\n45% of positions live",
    "qwen3-moe 8x2048": "SFT, Qwen3-MoE 2B\nno padding",
    "llama-1b 8x2x(16+14..884)": "DPO, Llama 1B\n56% live",
    "qwen3-0.6b 8x(128+4096)": "GRPO, Qwen3 0.6B\nno padding",
    "qwen3-0.6b 8x(128+..4096 even), 2 a prompt": "GRPO, Qwen3 0.6B\n78% live",
    "qwen3-0.6b 8x(128+..4096 exponential), 2 a prompt": "GRPO, Qwen3 0.6B\n38% live",
    "qwen3-4b 8x(2048+..1024 exponential), 8 a prompt lora 16": "GRPO, Qwen3 4B, LoRA\none prompt of 2048",
}


def main() -> None:
    """Reads the file and writes the figure."""
    _, rows = read(MEASURED)
    done = {(row["shape"], row["provider"]): row for row in rows if row["status"] == "ok"}
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(9, 6.4), sharey=True, layout="constrained")
    height = 0.38
    for place, shape in enumerate(WORKLOADS):
        plain = done[shape, "plain"]
        for turn, (provider, (title, colour)) in enumerate(SHOWN.items()):
            row = done.get((shape, provider))
            if row is None:
                continue
            at = place + (0.5 - turn) * height
            ratios = plain["ms"]["median"] / row["ms"]["median"], row["peak_bytes"] / plain["peak_bytes"]
            for axis, ratio, text in zip((speed, memory), ratios, ("{:.2f} x", "{:.2f}"), strict=True):
                axis.barh(at, ratio, height, color=colour, label=title if shape == next(iter(WORKLOADS)) else None)
                axis.text(ratio, at, " " + text.format(ratio), va="center", fontsize=9)
    speed.set_yticks(range(len(WORKLOADS)), list(WORKLOADS.values()), fontsize=9)
    speed.invert_yaxis()
    speed.set_xlabel("speed, plain = 1")
    memory.set_xlabel("peak memory, plain = 1")
    speed.set_xlim(0, 6)
    memory.set_xlim(0, 1.15)
    for axis in (speed, memory):
        axis.axvline(1, color="#7f7f7f", linewidth=1)
        axis.spines[["top", "right"]].set_visible(False)
    speed.legend(loc="upper right", fontsize=9, frameon=False)
    figure.savefig(HERE / "h200-steps.png", dpi=110)


if __name__ == "__main__":
    main()
