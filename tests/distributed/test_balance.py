"""GRPO on two gloo ranks on the CPU, rows spread over them by live tokens: the same steps as TRL's."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_distributed import on_two_ranks

WEIGHED = {"entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}


def balance_and_compare(target: Path, *wrappers: str) -> dict[str, Any]:
    """Runs `balance.py`."""
    found = on_two_ranks("balance", target, *wrappers)
    made_up = found.pop("made up")
    assert made_up["wrong"] == [[[], []]] * 2
    why = "what batches hold, or how many rows, differs from rank to rank"
    assert made_up["refused"] == [["how own of a batch is padded is not known", why, "left", "only one", None]] * 2
    for name, case in found.items():
        assert (case["rows"], case["same"], case["undone"]) == ([4], True, True), name
        if name == "columns of its own, ddp":
            assert case["notes"] == ["rows stay on their rank: how own of a batch is padded is not known"]
            assert case["came"] == 0
            continue
        # In one micro-batch all is logged of the same rows; means over several of these weigh them otherwise.
        assert set(case["logs"]) <= (WEIGHED if name != "grpo, ddp" else set()), name
        assert case["notes"] == []
        assert case["came"] > 0, name
        even, shuffled = case["imbalance"]
        assert even, name
        assert sum(even) < sum(shuffled), name
        # Exactly even is not to be had; a rank with all of the long completions would be far from it.
        assert max(even) < 1.12, name
    return found


@pytest.mark.full("ddp")
@pytest.mark.parametrize(("wrapper", "cases"), [("ddp", 9), ("fsdp2", 1)])
def test_rows_change_ranks_and_steps_stay(tmp_path, wrapper, cases):
    assert len(balance_and_compare(tmp_path / "found.json", wrapper)) == cases
