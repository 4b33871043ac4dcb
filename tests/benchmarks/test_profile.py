"""A step is timed without a profiler, and one more with it, each variant in a process of its own."""

import json
from dataclasses import asdict

from benchmarks import endtoend, profile, ranks, step_cases

TINY = step_cases.StepWorkload("sft-trainer", "tiny-qwen3", 2, 8)


class _Event:
    """As Kineto hands out a kernel."""

    device_type = staticmethod(lambda: profile.torch.autograd.DeviceType.CUDA)
    is_user_annotation = staticmethod(lambda: False)
    name = staticmethod(lambda: "_gather_kernel")
    start_ns = staticmethod(lambda: 5_000_000)
    duration_ns = staticmethod(lambda: 2_000_000)


def test_both_variants_are_measured(tmp_path, monkeypatch, capsys):
    """A child's command line in this process; of a CPU's step the device's part is a made-up one."""
    what_ran = ranks.what_ran
    monkeypatch.setattr(ranks, "what_ran", lambda events, on_cuda: what_ran([_Event()], True))
    monkeypatch.setattr(
        profile, "workloads", lambda kind: [TINY, step_cases.StepWorkload("sft-trl", "tiny-qwen3", 2, 8)]
    )

    def run(workload, variant, steps, timeout, module):
        assert module == "benchmarks.profile"
        path = tmp_path / "row.json"
        command = ["--workload", json.dumps(asdict(workload)), "--variant", variant, "--steps", str(steps)]
        assert profile.main([*command, "--output", str(path)]) == 0
        made = {"op": workload.name, "shape": workload.shape, "dtype": "float32", "provider": variant, "mode": "step"}
        return {**made, "group": "end-to-end", "status": "ok", **json.loads(path.read_text())}

    monkeypatch.setattr(endtoend, "run", run)
    output = tmp_path / "rows.json"
    assert profile.main(["--output", str(output), "--only", "sft-trainer/", "--steps", "2"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["group"], row["op"], row["provider"]) for row in rows] == [
        ("profile", "sft-trainer", "plain"), ("profile", "sft-trainer", "flag"),
    ]  # fmt: skip
    for row in rows:
        found = row["profiled"]
        assert row["ms"]["samples"] == len(row["each_ms"]) == 2
        assert (found["device_busy_ms"], found["launches_of_ours"]) == (2.0, 0)
        assert 0 < found["host_ms"] <= found["step_ms"]
        assert found["preparation_ms"] == 0
    assert "with 1 kernels and copies, 0 of ours" in capsys.readouterr().out
