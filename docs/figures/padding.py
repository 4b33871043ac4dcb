"""Draws docs/figures/padding.png: a padded batch, its packed row, and which keys each segment sees.

    python docs/figures/padding.py

The layout is not drawn by hand: it is what `patching/body/layout.py` makes of the batch.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from npu_trainer_kernels.patching.body.layout import DEAD, layout

HERE = Path(__file__).resolve().parent
PADDING, PROMPT = "#e8e8e8", "#4c72b0"
COMPLETIONS = ("#dd8452", "#55a868", "#c44e52", "#8172b3")
PROMPT_LENGTH, WIDTH = 9, 24
LENGTHS = (6, 13, 3, 9)


def batch() -> np.ndarray:
    """One prompt, padded on the left, with four completions, padded on the right."""
    ids = np.full((len(LENGTHS), WIDTH), DEAD)
    ids[:, 2 : 2 + PROMPT_LENGTH] = np.arange(PROMPT_LENGTH)
    for row, length in enumerate(LENGTHS):
        ids[row, 2 + PROMPT_LENGTH : 2 + PROMPT_LENGTH + length] = 100 * (row + 1) + np.arange(length)
    return ids


def color(token: int) -> str:
    """Of a token: its row's, or the prompt's."""
    return PADDING if token < 0 else PROMPT if token < 100 else COMPLETIONS[token // 100 - 1]


def cells(axes: plt.Axes, tokens: np.ndarray, x: float, y: float) -> None:
    """A row of tokens as squares."""
    for i, token in enumerate(tokens):
        axes.add_patch(Rectangle((x + i, y), 0.92, 0.8, color=color(int(token)), linewidth=0))


def main() -> None:
    """Draws and saves."""
    ids = batch()
    found = layout(ids, share=True)
    assert not isinstance(found, str)
    assert found.keys is not None
    row = ids.reshape(-1)[found.places]
    figure, axes = plt.subplots(figsize=(6.4, 4.6))
    axes.text(0, 15.3, f"the batch: {ids.size} positions, {found.live} of them live", fontsize=11)
    for i, tokens in enumerate(ids):
        cells(axes, tokens, 0, 13.8 - i)
    axes.text(0, 9.5, f"the row that the body computes: {len(row)} tokens, the common prompt once", fontsize=11)
    cells(axes, row, 0, 8.0)
    axes.text(0, 6.6, "what attends to what: queries (right), and the keys that they see (left)", fontsize=11)
    starts, keys = np.cumsum([0, *found.lengths]), np.cumsum([0, *found.key_lengths])
    for i in range(len(found.lengths)):
        y = 5.1 - i
        seen = row[found.keys[keys[i] : keys[i + 1]]]
        cells(axes, seen, 0, y)
        cells(axes, row[starts[i] : starts[i + 1]], WIDTH + 4, y)
    axes.set_xlim(-0.5, WIDTH + 4 + max(LENGTHS) + 1)
    axes.set_ylim(0.5, 16.6)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(HERE / "padding.png", dpi=160, bbox_inches="tight")


if __name__ == "__main__":
    main()
