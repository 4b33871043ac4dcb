"""Rows that a collator has packed: whose loss is which, with the kernels and without them, and what the report says."""

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.body import mixed_rows
from tests.models import SMALL, small_model

LENGTHS = (12, 18, 7)
MIXED = "which the model's own code mixes: without the kernels the loss is another one, and not that of these rows"
CACHED = MIXED.replace("mixes", "mixes unless it is called with use_cache=False")


def rows(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Three rows side by side, and the same rows padded."""
    ids = torch.randint(3, SMALL["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[torch.tensor((0, *LENGTHS[:-1])).cumsum(0)] = -100  # no row predicts the first token of the next one
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packed = {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}
    padded = {
        "input_ids": pad_sequence(ids.split(LENGTHS), batch_first=True),
        "attention_mask": pad_sequence(torch.ones_like(ids).split(LENGTHS), batch_first=True),
        "labels": pad_sequence(labels.split(LENGTHS), batch_first=True, padding_value=-100),
    }
    return {**packed, **options}, {**padded, "use_cache": False}


def line(kernels: Any, full: bool) -> str:
    return next(line for line in kernels.report().text(full=full).splitlines() if "varlen_attention" in line)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("gpt-oss", {"use_cache": False}, MIXED),
        ("gpt-oss", {}, MIXED),
        ("qwen3.5", {"use_cache": False}, MIXED),
        ("llama", {}, CACHED),
        ("llama", {"use_cache": True}, CACHED),
        ("llama", {"use_cache": False}, ""),
    ],
    ids=str,
)
def test_the_report_says_whose_loss_is_which(family: str, options: dict[str, Any], said: str) -> None:
    model = small_model(family)
    packed, padded = rows(**options)
    with torch.no_grad():
        apart, own = model(**padded).loss, model(**packed).loss
    assert torch.allclose(own, apart) == (not said)
    kernels = apply_npu_kernels(model)
    loss = model(**packed).loss.detach()
    if options.get("use_cache"):
        # A cache that is asked for by name is the model's own matter: its code runs, as without the kernels.
        torch.testing.assert_close(loss, own)
        assert "packed rows" not in kernels.report().text()
        return
    torch.testing.assert_close(loss, apart)
    expected = ", ".join(filter(None, ("3 packed rows each by itself", said)))
    assert line(kernels, full=False).endswith(f", {expected}")
    assert line(kernels, full=True).endswith(f", {expected})")


def test_padded_rows_are_no_packed_ones() -> None:
    model = small_model("gpt-oss")
    kernels = apply_npu_kernels(model)
    model(**rows()[1]).loss.backward()
    assert "packed rows" not in kernels.report().text(full=True)


def test_code_that_takes_no_packed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    kernels = apply_npu_kernels(model)
    monkeypatch.setattr(mixed_rows, "_found", {})

    def raises(made: Any, use_cache: bool) -> bool:
        raise ValueError("seq_idx is needed")

    monkeypatch.setattr(mixed_rows, "_mixes", raises)
    model(**rows(use_cache=False)[0])
    assert "3 packed rows each by itself, which the model's own code does not take" in line(kernels, False)


def test_flash_attention_reads_position_ids_by_itself() -> None:
    model = small_model("gpt-oss")
    model.model.config._attn_implementation_internal = "flash_attention_2"
    assert mixed_rows.whose_loss(model.model, "", caches=True) == ""
