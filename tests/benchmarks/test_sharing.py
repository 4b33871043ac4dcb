"""What sharing saves and costs: batches that save what they are to, both ways in turns, what follows from the rows."""

from dataclasses import replace
from itertools import takewhile

import pytest

from benchmarks import sharing
from benchmarks.draws import Draws
from benchmarks.results import read
from benchmarks.step_cases import StepWorkload
from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.body import batch

TINY = StepWorkload("sft", "tiny-qwen3", 8, 24, lengths="exponential", group=8)


def by_hand(workload: StepWorkload) -> float:
    """What sharing saves. Fewer than eight tokens are not shared. Completions may begin alike by chance."""
    draws, group = Draws(workload, typical_from=0), workload.group
    rows = [draws.prompts(0)[i // group] + row for i, row in enumerate(draws.rows(0))]
    columns = [zip(*rows[i : i + group], strict=False) for i in range(0, len(rows), group)]
    common = [len(list(takewhile(lambda ids: len(set(ids)) == 1, of_group))) for of_group in columns]
    return sum(n for length in common if (n := (group - 1) * length) >= 8) / sum(map(len, rows))


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("share", sharing.SHARES)
def test_prompts_are_as_long_as_it_takes(kind, share):
    for workload in sharing.batches(kind):
        found = sharing.with_prompts(workload, share)
        assert sharing.saved(found) == pytest.approx(by_hand(found))
        assert by_hand(found) >= share
        assert found.prompt == 1 or by_hand(replace(found, prompt=found.prompt - 1)) < share


def test_both_ways_are_run_in_turns(tmp_path, monkeypatch, capsys):
    computed = []

    def seen(*args, original=batch.layout, **kwargs):
        found = original(*args, **kwargs)
        computed.append(len(found.places))
        return found

    monkeypatch.setattr(batch, "layout", seen)
    monkeypatch.setattr(sharing, "batches", lambda kind: [TINY])
    monkeypatch.setattr(sharing, "SHARES", (0.3,))
    output = tmp_path / "r.json"
    assert sharing.main(["--output", str(output), "--samples", "1"]) == 0
    meta, (row,) = read(output)
    workload = sharing.with_prompts(TINY, 0.3)
    (prompt,) = Draws(workload, typical_from=0).prompts(0)
    assert row["share"] == pytest.approx(by_hand(workload)) == pytest.approx(7 * len(prompt) / row["tokens"])
    assert computed[-6:] == [row["tokens"] - 7 * len(prompt), row["tokens"]] * (sharing.WARM_UP + 1)
    assert row["shared"]["loss"] == pytest.approx(row["unshared"]["loss"], rel=1e-5)
    assert row["shared"]["ms"]["samples"] == row["unshared"]["ms"]["samples"] == 1
    assert row["ratio"] == row["unshared"]["ms"]["median"] / row["shared"]["ms"]["median"]
    assert meta["worth_from"] == {row["batch"]: row["share"] if row["ratio"] >= 1 else None}
    # A file that is there is continued, and nothing is missing in it.
    computed.clear()
    assert sharing.main(["--output", str(output), "--samples", "1"]) == 0
    assert len(computed) < 6
    assert capsys.readouterr().out.count("saves 3") == 1


def test_a_step_that_is_not_packed_is_no_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sharing, "apply_npu_kernels", lambda model: apply_npu_kernels(model, ops=["rms_norm"]))
    monkeypatch.setattr(sharing, "batches", lambda kind: [TINY])
    monkeypatch.setattr(sharing, "SHARES", (0.3,))
    assert sharing.main(["--output", str(tmp_path / "r.json"), "--samples", "1"]) == 1
    assert "varlen_attention has not served every step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratios", "wanted"), [((0.9, 1.0, 1.1), 0.05), ((1.1, 0.9, 1.1), 0.4), ((1, 1, 1), 0.01), ((1.1, 1.1, 0.99), None)]
)
def test_worth_it_is_what_is_not_slower_from_there_on(ratios, wanted):
    rows = [{"share": share, "ratio": ratio} for share, ratio in zip((0.01, 0.05, 0.4), ratios, strict=True)]
    assert sharing.worth_from(reversed(rows)) == wanted
    assert sharing.worth_from([]) is None
