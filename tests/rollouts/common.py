"""Models, prompts and the tokens that `generate` makes of each prompt alone."""

import copy
from typing import Any

import torch
from transformers import GenerationConfig

from npu_trainer_kernels import apply_npu_kernels, serve_rollouts
from tests.models import small_model

# Unequal lengths; the fourth is the first once more.
LENGTHS = (12, 7, 9, 12, 3, 15, 5)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
    if len(made) > 3:
        made[3] = list(made[0])
    return made


def greedy(tokens: int = 12, **options: Any) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    )


def sampled(tokens: int = 12, **options: Any) -> GenerationConfig:
    return greedy(tokens, **{"do_sample": True, "top_k": 0, **options})


def alone(model: Any, given: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """What `generate` makes of each prompt by itself."""
    return [
        model.generate(torch.tensor([each]), generation_config=copy.deepcopy(config))[0, len(each) :].tolist()
        for each in given
    ]


def padded(given: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, as TRL's trainers pad them."""
    width = max(map(len, given))
    ids, mask = (torch.zeros(len(given), width, dtype=torch.long) for _ in range(2))
    for row, each in enumerate(given):
        ids[row, width - len(each) :], mask[row, width - len(each) :] = torch.tensor(each), 1
    return {"input_ids": ids, "attention_mask": mask}


def served(
    family: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    most_rows: int | None = None,
    keep: bool = False,
    **overrides: Any,
):
    """A model that generates by captured steps, and what counts them."""
    model = small_model(family, **overrides).to(dtype).eval()
    kernels = apply_npu_kernels(model, backend="torch")
    rollouts = serve_rollouts(kernels, most_rows=most_rows, keep=keep)
    assert rollouts is not None
    return model, kernels, rollouts
