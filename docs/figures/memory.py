"""Draws docs/figures/memory.png: what lives when in the LM head and its loss, and how that grows with the tokens.

    python docs/figures/memory.py

By formula, from shapes alone, and held against the peaks that were measured on an H200: a formula that is more than
`TOLERANCE` away from them is an error, and nothing is drawn.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt

from npu_trainer_kernels import tiling
from npu_trainer_kernels.device import GIB, KIB, DeviceSpec

HERE = Path(__file__).resolve().parent
MEASURED = HERE.parents[1] / "benchmarks" / "results" / "2026-11-21-nvidia-h200-fourth-round.json"
# As `device.spec` describes the card that MEASURED was made on.
H200 = DeviceSpec("cuda", "NVIDIA H200", vector_cores=132, on_chip_bytes=256 * KIB, memory_bytes=150109880320)
MODEL, HIDDEN, VOCABULARY = "Llama 3 8B", 4096, 128256
TOKENS = 8192
BF16, FP32 = 2, 4
TOLERANCE = 0.02

# A moment: its name, and the bytes of what lives then.
Moment = tuple[str, dict[str, int]]


def gradients(tokens: int) -> dict[str, int]:
    """What both ways end with: the gradients of the weight and of the hidden states."""
    return {
        "gradient of the weight, bf16": HIDDEN * VOCABULARY * BF16,
        "gradient of hidden states, bf16": tokens * HIDDEN * BF16,
    }


def plain(tokens: int) -> list[Moment]:
    """`cross_entropy(linear(x, weight).float(), target)`, forward and backward."""
    logits = tokens * VOCABULARY
    log_probs, d_log_probs, d_logits = (
        {name: logits * FP32} for name in ("log-probs, fp32", "gradient of log-probs, fp32", "gradient of logits, fp32")
    )
    return [
        ("project", {"logits, bf16": logits * BF16}),
        ("to fp32", {"logits, bf16": logits * BF16, "logits, fp32": logits * FP32}),
        ("log-softmax", {"logits, bf16": logits * BF16, "logits, fp32": logits * FP32, **log_probs}),
        ("end of forward", log_probs),
        ("backward: loss", {**log_probs, **d_log_probs}),
        ("softmax", {**log_probs, **d_log_probs, **d_logits}),
        ("to bf16", {**d_logits, "gradient of logits, bf16": logits * BF16}),
        ("products", {"gradient of logits, bf16": logits * BF16, **gradients(tokens)}),
    ]


def chunked(tokens: int) -> list[Moment]:
    """`ops.fused_linear_cross_entropy`: chunks of logits that become their own gradient, all of it in forward."""
    plan = tiling.borrowing_chunks(tokens, VOCABULARY, HIDDEN, BF16, BF16, H200)
    stops, borrowed = ((tokens,), 0) if plan is None else (plan.stops, plan.columns)
    # One buffer for all chunks; of the first, some columns lie where the weight gradient will.
    sizes = [b - a for a, b in itertools.pairwise((0, *stops))]
    logits = max(sizes[0] * (VOCABULARY - borrowed), *(rows * VOCABULARY for rows in sizes[1:]), 0)
    lives = {"one chunk of logits, bf16": logits * BF16, **gradients(tokens)}
    if len(stops) > 1:
        # `_WeightSum` in ops/head/chunks.py: the other half lies in the memory of the result.
        lives["half of the fp32 weight gradient"] = HIDDEN * (VOCABULARY - tiling.rows_inside(VOCABULARY)) * FP32
    named = [(f"chunk {i + 1}", lives) for i in range(len(stops))]
    return [*named, ("end of forward", gradients(tokens)), ("backward: scale", gradients(tokens))]


def extra(moments: list[Moment], tokens: int) -> int:
    """The peak beyond inputs, weights and final gradients, as the benchmarks measure it."""
    return max(sum(lives.values()) for _, lives in moments) - sum(gradients(tokens).values())


def measured(provider: str) -> Iterator[tuple[int, int]]:
    """(tokens, bytes) from the benchmark's JSON."""
    for row in json.loads(MEASURED.read_text())["rows"]:
        sizes = row.get("sizes", {})
        at = (row.get("op"), row.get("provider"), row.get("mode"), sizes.get("H"), sizes.get("V"))
        if at == ("linear_cross_entropy", provider, "both", HIDDEN, VOCABULARY) and row["status"] == "ok":
            yield sizes["BT"], row["extra_bytes"]


WAYS = (("plain PyTorch", plain, "reference", "#c44e52"), ("with the kernels", chunked, "ours-triton", "#4c72b0"))


def check() -> None:
    """Raises `ValueError` where a formula is not what was measured."""
    for name, way, provider, _ in WAYS:
        points = list(measured(provider))
        if not points:
            raise ValueError(f"{MEASURED.name} has no row of {provider} at H={HIDDEN}, V={VOCABULARY}")
        for tokens, found in points:
            formula = extra(way(tokens), tokens)
            if abs(formula - found) > TOLERANCE * found:
                raise ValueError(f"{name}, {tokens} tokens: {formula / GIB:.3f} GiB, but {found / GIB:.3f} measured")


def _draw_moments(axes: plt.Axes, title: str, moments: list[Moment], colours: dict[str, str]) -> None:
    for position, (_, lives) in enumerate(moments):
        bottom = 0.0
        for what, size in sorted(lives.items(), key=lambda item: list(colours).index(item[0])):
            axes.bar(position, size / GIB, 0.85, bottom, color=colours[what], edgecolor="white", linewidth=0.5)
            bottom += size / GIB
    axes.set_xticks(range(len(moments)), [name for name, _ in moments], rotation=40, ha="right")
    used = [what for what in colours if any(what in lives for _, lives in moments)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[what]) for what in used]
    axes.legend(handles[::-1], used[::-1], loc="upper right", fontsize=9, frameon=False)
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_tokens(axes: plt.Axes) -> None:
    tokens = [256 * i for i in range(1, 65)]
    for name, way, provider, colour in WAYS:
        axes.plot(tokens, [extra(way(n), n) / GIB for n in tokens], color=colour, label=f"{name}, by formula")
        points = list(measured(provider))
        axes.plot([n for n, _ in points], [b / GIB for _, b in points], "o", color=colour, label=f"{name}, measured")
    axes.set_xticks([0, 4096, 8192, 12288, 16384])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a micro-batch")
    axes.set_ylabel("peak beyond gradients [GiB]")
    axes.set_title("The peak, by tokens (H200)", fontsize=10)
    axes.legend(fontsize=9, frameon=False)
    axes.grid(alpha=0.3)


def main() -> None:
    check()
    ways = plain(TOKENS), chunked(TOKENS)
    whats = dict.fromkeys(what for moments in ways for _, lives in moments for what in lives)
    final = list(gradients(TOKENS))
    palette = iter(("#e7a6a0", "#d9776c", "#c44e52", "#8c3b46", "#5f2a38", "#f0c9a5", "#4c72b0", "#8fb0d9"))
    colours = dict(zip(final, ("#6b8f71", "#a9c6a4"), strict=True))
    colours |= {what: next(palette) for what in whats if what not in final}

    # One panel below the other: so text can be read where the figure is as wide as a phone.
    figure = plt.figure(figsize=(5, 11.5), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, height_ratios=(10, 8, 8))
    _draw_moments(top, f"Plain PyTorch: forward, then backward ({TOKENS} tokens)", ways[0], colours)
    _draw_moments(middle, f"With the kernels: all in forward ({TOKENS} tokens)", ways[1], colours)
    for axes, highest in ((top, 25), (middle, 16)):
        axes.set_ylim(0, highest)  # room for the legend
        axes.set_ylabel("memory [GiB]")
    _draw_tokens(bottom)
    figure.suptitle(f"LM head and loss of {MODEL} in bf16\nhidden {HIDDEN}, vocabulary {VOCABULARY}", fontsize=11)
    figure.savefig(HERE / "memory.png", dpi=160)


if __name__ == "__main__":
    main()
