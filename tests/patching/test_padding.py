"""Nothing is computed for padding, and what rows begin with alike once: the loss and every gradient stay what they are."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from tests.closeness import assert_as_close
from tests.models import FAMILIES, SMALL, farthest, in_double, neighbour, small_model

OP = "varlen_attention"
_WIDTH = 28
# side -> (first column, column after the last) of each row; one row has no live token, one has one.
SIDES: dict[str, tuple[tuple[int, int], ...]] = {
    "left": ((0, 28), (9, 28), (9, 28), (27, 28), (28, 28), (19, 28)),
    "right": ((0, 28), (0, 17), (0, 21), (0, 1), (0, 0), (0, 24)),
    "both": ((4, 28), (4, 23), (4, 17), (9, 10), (3, 3), (0, 25)),
}
# What differs from the defaults: a window that is shorter than the rows; the auxiliary loss looks at the mask.
_OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9},
    "gemma3": {"sliding_window": 9},
    "qwen3-moe": {"output_router_logits": False},
}
_STATEFUL = {"mamba2"}


def padded(side: str, shared: bool) -> dict[str, torch.Tensor]:
    """Ids, mask and labels; with `shared`, rows 0 to 2 begin alike where they begin at the same column, two of them for
    longer than the third. Some labels in the middle are ignored."""
    generator = torch.Generator().manual_seed(7)
    rows = SIDES[side]
    ids = torch.randint(3, SMALL["vocab_size"], (len(rows), _WIDTH), generator=generator)
    mask = torch.zeros_like(ids)
    for b, (begin, end) in enumerate(rows):
        mask[b, begin:end] = 1
    if shared:
        for a, b, count in ((0, 1, 17), (0, 2, 8), (1, 2, 8)):
            if rows[a][0] == rows[b][0]:
                ids[b, rows[b][0] :][:count] = ids[a, rows[a][0] :][:count]
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 12:14] = -100
    # The place before the first token is padding, which predicts nothing.
    for b, (begin, end) in enumerate(rows):
        if begin < end:
            labels[b, begin] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def live_and_distinct(inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The live tokens of a batch, and how many of them are left where rows that begin alike are counted once."""
    ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
    rows = [[(c, t) for c, (t, m) in enumerate(zip(*row, strict=True)) if m] for row in zip(ids, mask, strict=True)]
    return sum(map(len, rows)), len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


def values(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Loss, logits of live places, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": out.loss.detach(), **grads}


def made(family: str, dtype: torch.dtype, attention: str) -> Any:
    model = small_model(family, attn_implementation=attention, **_OPTIONS.get(family, {}))
    return model.to(dtype)


def compare(model: Any, inputs: dict[str, torch.Tensor], ops: tuple[str, ...] | None, what: str, **more: Any) -> Any:
    """The report of a step under these ops, which by the rule is the model's own."""
    expected, truth = references(model, inputs)
    with apply_npu_kernels(model, ops=ops, **more) as kernels:
        actual = values(model, inputs)
        report = kernels.report()
    assert actual.keys() == truth.keys()
    for name, exact in truth.items():
        given = actual[name]
        assert (given is None) == (exact is None), f"{what} {name}"
        if given is not None:
            assert_as_close(given, expected[name], exact, f"{what} {name}")
    return report


def references(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Of the unpatched model: its step in its dtype, and the truth."""
    exact = copy.deepcopy(model).double()
    with in_double():
        truth = values(exact, inputs)
    others = [values(neighbour(model, seed), inputs) for seed in (0, 1, 2)]
    return farthest([values(model, inputs), *others], truth), truth


def progress(report: Any) -> Any:
    """What the patch says of the batches that it packed."""
    (site,) = (site for site in report.sites if site.op == OP)
    return site.progress


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in _STATEFUL])
def test_a_padded_batch_is_the_models_own(family, dtype, attention, side, shared):
    model, inputs = made(family, dtype, attention), padded(side, shared)
    live, distinct = live_and_distinct(inputs)
    assert (live > distinct) == shared
    for name, ops in (("alone", (OP,)), ("with all ops", tuple(PATCHES))):
        report = compare(model, inputs, ops, f"{family} {name}")
        assert report.ran[OP] == 1
        assert not [each for each in report.declined if each.op == OP]
        counted = progress(report)
        assert (counted.positions, counted.live) == (inputs["input_ids"].numel(), live)
        assert counted.computed == (distinct if shared else live)
