"""Completions of rows that end: what ends them, and what counts as a token."""

import json

import pytest
import torch

from benchmarks import rollouts


def test_ids_that_end_a_row_after_so_many_tokens_on_average():
    assert rollouts._ends(1000, None) == [1]
    ends = rollouts._ends(1000, 50)
    assert len(ends) == 1000 // 50 + 1
    assert 0 not in ends  # the padding's id


def test_tokens_behind_a_rows_end_do_not_count():
    rows = torch.tensor([[5, 6, 1, 0], [5, 6, 7, 8], [2, 1, 0, 0], [5, 6, 7, 2]])
    assert rollouts._made(rows, [1, 2]) == 3 + 4 + 1 + 4
    assert rollouts._made(rows, [9]) == rows.numel()


def test_completions_that_end(tmp_path):
    file = tmp_path / "found.json"
    arguments = ["--output", str(file), "--cases", "demo-qwen3:4", "--ways", "generate", "--prompt", "8",
                 "--tokens", "24", "--repetitions", "1"]  # fmt: skip
    assert rollouts.main([*arguments, "--ends", "4"]) == 0
    assert rollouts.main(arguments) == 0
    ended, whole = json.loads(file.read_text())["rows"]
    assert whole["tokens"] == 4 * 24
    assert ended["tokens"] < whole["tokens"]
    assert "1..24, 4 on average" in ended["shape"]


def test_a_mean_that_is_none(tmp_path, capsys):
    with pytest.raises(SystemExit):
        rollouts.main(["--output", str(tmp_path / "found.json"), "--ends", "0"])
    assert "--ends must be at least 1; got 0" in capsys.readouterr().err
