"""The figures in the package's table of ops, as `python -m benchmarks --evidence` writes them."""

import copy
import json
from pathlib import Path

import pytest

from benchmarks import cli, evidence
from npu_trainer_kernels.evidence.table import FILE

RESULTS = Path(evidence.__file__).parent / "results"
GPU, CPU = RESULTS / "2026-11-22-nvidia-h200-fifth-round-ops.json", RESULTS / "2026-11-21-cpu.json"
CPU_ATTENTION = RESULTS / "2026-11-22-cpu-attention.json"
# The same device's, for the ops that the newer file lacks.
OLDER_GPU = RESULTS / "2026-11-21-nvidia-h200-fourth-round.json"
DECODE = RESULTS / "2026-11-26-nvidia-h100-thirteenth-round-decode.json"
DIVERGENCE = RESULTS / "2026-11-26-nvidia-h200-fourteenth-round-divergence.json"
CONVOLUTION = RESULTS / "2026-11-26-nvidia-h100-fifteenth-round-conv.json"
EXPERTS = RESULTS / "2026-11-22-nvidia-h200-sixth-round-experts.json"


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "table.json"
    file.write_text(FILE.read_text())
    return file


def test_the_committed_table_is_what_the_committed_files_make(table):
    whole = json.loads(FILE.read_text())
    for op in whole["ops"].values():
        places = [*op["before_torch"].get("cuda", ()), {"because": op.get("keeps_plain", {}).get("cpu")}]
        places += [{"because": because} for because in op.get("torch", {}).values()]
        for figures in (place["because"] for place in places if isinstance(place["because"], dict)):
            figures.update(file="", ms=0.0, plain_ms=0.0, on="")
    table.write_text(json.dumps(whole))
    files = (OLDER_GPU, GPU, EXPERTS, DECODE, DIVERGENCE, CONVOLUTION, CPU, CPU_ATTENTION)
    assert [len(evidence.write(file, table)) for file in files] == [8, 7, 1, 1, 1, 1, 3, 1]
    assert table.read_text() == FILE.read_text()


def changed(monkeypatch, file: Path, **medians: float) -> None:
    """As if other times of one row had been measured."""
    meta, rows = evidence.read(file)
    rows = copy.deepcopy(rows)
    for row in rows:
        if (row["group"], row["op"], row.get("mode")) == ("ops", "swiglu", "both") and row["provider"] in medians:
            row["ms"]["median"] = medians[row["provider"]]
    monkeypatch.setattr(evidence, "read", lambda _: (meta, rows))


def test_wrong_numbers_are_no_evidence(monkeypatch, table):
    meta, rows = evidence.read(GPU)
    rows = copy.deepcopy(rows)
    for row in rows:
        if (row["op"], row.get("mode"), row["provider"]) == ("swiglu", "both", "ours-triton"):
            row["errors"] = {**row["errors"], next(iter(row["errors"])): 0.7}
    monkeypatch.setattr(evidence, "read", lambda _: (meta, rows))
    with pytest.raises(ValueError, match="ours-triton gives wrong numbers there"):
        evidence.write(GPU, table)
    assert table.read_text() == FILE.read_text()


def test_other_figures_are_written_and_nothing_else(monkeypatch, table):
    changed(monkeypatch, GPU, **{"ours-triton": 0.41239, "reference": 0.75})
    assert "swiglu N=8192 I=14336 bfloat16: 0.438 -> 0.412 ms, plain 0.775 -> 0.75 ms" in evidence.write(GPU, table)
    before, after = json.loads(FILE.read_text()), json.loads(table.read_text())
    figures = before["ops"]["swiglu"]["before_torch"]["cuda"][0]["because"]
    figures.update(ms=0.412, plain_ms=0.75)
    assert after == before


@pytest.mark.parametrize(
    ("file", "medians", "message"),
    [
        (GPU, {"ours-triton": 0.8}, "swiglu .*: 0.8 ms against 0.775 ms .*by the table ours is faster"),
        (CPU, {"ours-torch": 3.0}, "swiglu .*: 3 ms against 3.238 ms .*by the table plain PyTorch is faster"),
    ],
)
def test_figures_that_contradict_the_table_are_not_written(monkeypatch, table, file, medians, message):
    changed(monkeypatch, file, **medians)
    with pytest.raises(ValueError, match=message):
        evidence.write(file, table)
    assert table.read_text() == FILE.read_text()


def without(monkeypatch, **left_out: str) -> None:
    """As if rows had not been measured."""
    meta, rows = evidence.read(GPU)
    kept = [row for row in rows if any(row.get(key) != value for key, value in left_out.items())]
    monkeypatch.setattr(evidence, "read", lambda _: (meta, kept))


def test_what_a_file_lacks_stays_as_it_is(monkeypatch, table):
    without(monkeypatch, op="rope")
    written = evidence.write(GPU, table)
    assert len(written) == 6
    assert not any(line.startswith("rope") for line in written)
    assert table.read_text() == FILE.read_text()


@pytest.mark.parametrize("provider", ["ours-triton", "reference"])
def test_half_of_a_comparison_is_no_evidence(monkeypatch, table, provider):
    without(monkeypatch, op="rope", provider=provider)
    with pytest.raises(ValueError, match=f"no time of {provider}, rope S=8192 Q=32"):
        evidence.write(GPU, table)
    assert table.read_text() == FILE.read_text()


def test_a_file_of_nothing_in_the_table(monkeypatch, table):
    without(monkeypatch, group="ops")
    with pytest.raises(ValueError, match="has no row that the table has a measurement of, or could have, on cuda"):
        evidence.write(GPU, table)


def test_evidence_is_a_committed_file(tmp_path, capsys):
    (tmp_path / GPU.name).write_text(GPU.read_text())
    with pytest.raises(SystemExit):
        cli.main(["--evidence", str(tmp_path / GPU.name)])
    assert "must be a file in benchmarks/results/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--evidence", "nothing.json"])
    assert "no such file: nothing.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [("cuda", "NVIDIA H200", "an H200"), ("cuda", "NVIDIA B200", "a B200"), ("npu", "Ascend910B4", "a 910B4")],
)
def test_devices_have_articles(kind, name, expected):
    assert evidence._named({"kind": kind, "name": name}) == expected


def proved(monkeypatch, **medians: float) -> None:
    """As if the file were the prove.json of an archive of an NPU: a norm by three providers."""
    meta = {"format": 1, "device": {"kind": "npu", "name": "Ascend910B4", "memory_bytes": 0}}
    row = {"group": "ops", "op": "rms_norm", "shape": "N=8192 H=4096", "dtype": "bfloat16", "mode": "both"}
    rows = [{**row, "provider": provider, "ms": {"median": ms}} for provider, ms in medians.items()]
    monkeypatch.setattr(evidence, "read", lambda _: (meta, rows))


def test_figures_take_the_place_of_a_sentence(monkeypatch, table):
    proved(monkeypatch, **{"ours-vendor": 0.2, "ours-triton": 0.25, "reference": 0.9})
    assert evidence.write(GPU, table) == [
        f"rms_norm N=8192 H=4096 bfloat16: a sentence -> {ms} ms, plain a sentence -> 0.9 ms" for ms in (0.2, 0.25)
    ]
    before, after = json.loads(FILE.read_text()), json.loads(table.read_text())
    for choice, ms in zip(before["ops"]["rms_norm"]["before_torch"]["npu"], (0.2, 0.25), strict=True):
        choice["because"] = {
            "file": f"benchmarks/results/{GPU.name}", "form": "rms_norm", "shape": "N=8192 H=4096",
            "dtype": "bfloat16", "ms": ms, "plain_ms": 0.9, "on": "a 910B4",
        }  # fmt: skip
    assert after == before


def test_a_sentence_stays_where_a_time_is_missing(monkeypatch, table):
    proved(monkeypatch, **{"ours-triton": 0.25, "reference": 0.9})
    assert len(evidence.write(GPU, table)) == 1
    assert isinstance(json.loads(table.read_text())["ops"]["rms_norm"]["before_torch"]["npu"][0]["because"], str)


def test_a_sentence_that_figures_contradict_is_an_error(monkeypatch, table):
    proved(monkeypatch, **{"ours-vendor": 1.2, "ours-triton": 0.25, "reference": 0.9})
    with pytest.raises(ValueError, match=r"1.2 ms against 0.9 ms .*by the table ours is faster"):
        evidence.write(GPU, table)
    assert table.read_text() == FILE.read_text()
