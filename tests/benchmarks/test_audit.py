"""What the comparison before the first step takes: rows that say what was measured."""

from benchmarks import audit
from benchmarks.results import read
from benchmarks.step_cases import StepWorkload
from npu_trainer_kernels.patching.modules.norms import RmsNormPatch


def run(tmp_path, monkeypatch):
    tiny = StepWorkload("sft", "tiny-qwen3", 8, 24, lengths="exponential")
    monkeypatch.setattr(audit, "workloads", lambda kind: [tiny])
    code = audit.main(["--output", str(tmp_path / "found.json")])
    return code, read(tmp_path / "found.json")[1]


def test_rows(tmp_path, monkeypatch, capsys):
    code, rows = run(tmp_path, monkeypatch)
    assert code == 0
    assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]
    for row in rows:
        assert row["rows"] == 3
        assert row["calls"] > 0
        assert row["farthest"] < 1
        assert len(row["step_seconds"]) == 3
        assert 0 < row["seconds"] < row["step_seconds"][0]
    assert "% of the limit" in capsys.readouterr().out


def test_what_differs_is_a_failure(tmp_path, monkeypatch):
    original = RmsNormPatch.run
    monkeypatch.setattr(RmsNormPatch, "run", lambda *args, **kwargs: original(*args, **kwargs) * 1.1)
    code, rows = run(tmp_path, monkeypatch)
    assert code == 1
    assert rows[0]["differing"]
