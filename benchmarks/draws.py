"""The batches of a run: each step has its own lengths and its own ids, drawn from the numbers of the step and the rank.

All variants of a workload get the same batches, and a rank gets the same ones however many other ranks there are.
"""

from typing import Any

import numpy as np
import torch

from .lengths import lengths, prompt_lengths
from .models import MODELS
from .step_cases import StepWorkload

__all__ = ["Draws", "live_tokens"]

# What is drawn. Each has random numbers of its own.
_ROWS, _PROMPTS = 0, 1
# The first id that is no special token.
_FIRST = 3
# The label of a token without a loss.
_IGNORED = -100


def live_tokens(batch: dict[str, torch.Tensor]) -> int:
    """Returns the number of positions of a batch that are tokens, not padding."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


class Draws:
    """Draws the batches of a workload. Steps and ranks have numbers from 0 on.

    Args:
        workload: the workload of each rank.
        typical_from: the first step with typical lengths: the quantiles at the middles of equal parts, in random order.
            A batch then has as many tokens as batches have on average; None: there is no such step.
    """

    def __init__(self, workload: StepWorkload, typical_from: int | None = None) -> None:
        self.workload, self.typical_from = workload, typical_from
        self._vocabulary = MODELS[workload.size][1]["vocab_size"]

    def _points(self, drawn: np.random.Generator, step: int, count: int) -> Any:
        """Returns `count` points of [0, 1)."""
        if self.typical_from is not None and step >= self.typical_from:
            return drawn.permutation((np.arange(count) + 0.5) / count)
        return drawn.random(count)

    def _ids(self, drawn: np.random.Generator, found: list[int]) -> list[list[int]]:
        return [drawn.integers(_FIRST, self._vocabulary, length).tolist() for length in found]

    def rows(self, step: int, rank: int = 0) -> list[list[int]]:
        """Returns the sequences of a rank's batch; in GRPO and distillation its completions."""
        workload, drawn = self.workload, np.random.default_rng([_ROWS, step, rank])
        if not workload.lengths:
            return self._ids(drawn, [workload.length] * workload.batch)
        points = self._points(drawn, step, workload.batch)
        return self._ids(drawn, lengths(workload.lengths, points, workload.length))

    def prompts(self, step: int, rank: int = 0) -> list[list[int]]:
        """Returns the prompts of a rank's batch, one for each group of rows."""
        workload, drawn = self.workload, np.random.default_rng([_PROMPTS, step, rank])
        # In distillation each prompt has one completion.
        count = workload.batch if workload.teacher else max(1, workload.batch // workload.group)
        if workload.whole_prompts or not workload.lengths:
            return self._ids(drawn, [workload.prompt] * count)
        return self._ids(drawn, prompt_lengths(self._points(drawn, step, count), workload.prompt))

    def pairs(self, step: int, rank: int = 0) -> list[dict[str, list[int]]]:
        """Returns the pairs of a rank's batch in DPO. The lengths of completions are uniform."""
        workload, drawn = self.workload, np.random.default_rng([_ROWS, step, rank])
        points = self._points(drawn, step, 2 * workload.batch)
        found = workload.least + np.floor(points * (workload.length + 1 - workload.least)).astype(int)
        prompts = self._ids(drawn, [workload.prompt] * workload.batch)
        chosen, rejected = (self._ids(drawn, found[half::2].tolist()) for half in (0, 1))
        return [
            {"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad}
            for prompt, good, bad in zip(prompts, chosen, rejected, strict=True)
        ]

    def batch(self, step: int, rank: int = 0) -> dict[str, torch.Tensor]:
        """Returns a rank's batch of prompts and completions: ids and labels `[batch, length]`, and a mask if lengths
        differ. Prompts are padded on the left, and have no loss."""
        workload, rows, of_groups = self.workload, self.rows(step, rank), self.prompts(step, rank)
        prompts = [of_groups[row * len(of_groups) // workload.batch] for row in range(workload.batch)]
        longest = max(map(len, prompts))
        ids = torch.zeros(workload.batch, longest + max(map(len, rows)), dtype=torch.long)
        labels, live = torch.full_like(ids, _IGNORED), torch.zeros_like(ids)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            begin, end = longest - len(prompt), longest + len(row)
            ids[i, begin:end] = torch.tensor(prompt + row)
            labels[i, longest:end] = ids[i, longest:end]
            live[i, begin:end] = 1
        if not workload.lengths:
            return {"input_ids": ids, "labels": ids}
        return {"input_ids": ids, "attention_mask": live, "labels": labels}
