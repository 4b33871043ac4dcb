"""DeepSpeed's ZeRO-3 on two gloo ranks on the CPU: the same parameters with the kernels as without.

In an environment of their own (`make test-zero3`), since transformers and TRL behave differently where DeepSpeed is
installed. Every parameter is partitioned, so the head's weight is there only while it is gathered.
"""

import pytest

from tests.distributed.test_balance import balance_and_compare
from tests.distributed.test_distributed import on_two_ranks, pack_and_compare, run_and_compare


def test_same_parameters_as_without(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = run_and_compare(tmp_path / "found.json", "zero3")
    assert [case["wrapped"] for case in found.values()] == ["DeepSpeedEngine"] * 3


def test_ranks_with_other_numbers_of_live_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert len(pack_and_compare(tmp_path / "found.json", "zero3", "zero3, experts")) == 4 + 4


def test_completions_while_trl_has_gathered_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = on_two_ranks("rollouts", tmp_path / "found.json", "zero3")
    assert found["zero3, gathered"]["ranks"] == [[1, {}, True, True]] * 2
    reason = "its parameters are spread over ranks, and nobody has gathered them (ds3_gather_for_generation)"
    assert found["zero3, not gathered"]["ranks"] == [[0, {reason: 2}, True, True]] * 2


@pytest.mark.full(quick="test_same_parameters_as_without")
def test_rows_change_ranks_and_steps_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert len(balance_and_compare(tmp_path / "found.json", "zero3")) == 1


@pytest.mark.full("whole")
@pytest.mark.parametrize("wrapper", ["zero3", "zero3, MLPs whole"])
def test_mlps_over_slices(tmp_path, monkeypatch, wrapper):
    """Where DeepSpeed gathers an MLP as one; elsewhere its activation has hooks, and the MLP is its own."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = on_two_ranks("tiled", tmp_path / "found.json", wrapper)
    calls = {
        "zero3": {"before, None": 0},
        "zero3, MLPs whole": {"before, None": 4, "after, False": 4, "before, True": 8},
    }[wrapper]
    assert {name: case["ranks"] for name, case in found.items()} == {
        f"{wrapper}, {case}": [[number, {}, []]] * 2 for case, number in calls.items()
    }
