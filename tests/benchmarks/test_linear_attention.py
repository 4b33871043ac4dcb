"""What the benchmark of the gated delta rule counts, on small layers."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import linear_attention

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(linear_attention, "_HEADS", 2)
    monkeypatch.setattr(linear_attention, "_SIZE", 16)


@pytest.mark.parametrize("case", linear_attention.CASES)
def test_ours_keeps_its_inputs_and_the_peak_is_that_of_storages(case):
    row = linear_attention.measure(case, 128)
    given = sum(t.nbytes for t in linear_attention._inputs(case, 128).values())
    assert row["forward_operators"] > 20
    assert row["backward_operators"] > 20
    if row["provider"] == "ours":
        assert row["kept_bytes"] == given
    else:
        assert row["kept_bytes"] > given
    assert row["forward_peak_bytes"] > given / 2
    assert row["backward_peak_bytes"] > given


def test_operators_bytes_and_the_peak():
    with linear_attention._Operators() as seen:
        x = torch.zeros(256)
        y = x.view(2, 128).t() + 1
        del x
        z = y * 2
        del y
        z.add_(1)
    assert seen.count == 4
    assert (seen.live, seen.peak) == (1024, 2048)


def test_the_command_writes_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(linear_attention, "TOKENS", (128,))
    file = tmp_path / "counts.json"
    assert linear_attention.main(["--output", str(file)]) == 0
    written = json.loads(file.read_text())
    assert [row["case"] for row in written["rows"]] == [*linear_attention.CASES]
    assert written["meta"]["command"] == f"{linear_attention.PROGRAM} --output {file}"
    assert "one layer" in capsys.readouterr().out


def test_the_notes_have_the_figures_of_the_file():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text(encoding="utf-8")
    section = notes.split("### The gated delta rule, operators and bytes")[1].split("\n### ")[0]
    (name,) = re.findall(r"results/(\S+?\.json)", section.partition("\n")[0])
    rows = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))["rows"]
    for row in rows:
        counts = f"{row['forward_operators']:,} + {row['backward_operators']:,}"
        sizes = [f"{row[key] / 2**20:,.0f}" for key in ("kept_bytes", "forward_peak_bytes", "backward_peak_bytes")]
        assert f"| {row['case']} | {row['tokens']:,} | {counts} | {' | '.join(sizes)} |" in section
