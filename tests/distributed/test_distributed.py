"""Two gloo ranks on the CPU: the same parameters with the kernels as without, under DDP and FSDP2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from npu_trainer_kernels.support.foreign import at_least
from tests import warm


def by_torchrun(number: int, name: str, *arguments: str, output: Path) -> warm.Ended:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(number),
        "-m",
        name,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    with output.open("w") as file:
        done = subprocess.run(
            [*command, *arguments], stdout=file, stderr=file, env=environment, check=False, timeout=300
        )
    return warm.Ended(done.returncode, output.read_text(errors="replace"))


def on_two_ranks(module: str, target: Path, *cases: str, interpreted: bool = False) -> dict[str, Any]:
    """Runs a module on two ranks and returns what it found, where nothing stood still or went another way. A program
    that asks for Triton's interpreter must be the first to import Triton."""
    name, output = f"tests.distributed.{module}", target.with_suffix(".txt")
    start = warm.run_ranks if not interpreted else by_torchrun
    done = start(2, name, str(target), *cases, output=output)
    assert done.returncode == 0, done.output[-6000:]
    found = json.loads(target.read_text())
    still = {name: case for name, case in found.items() if case["moved"] < 1e-3}
    wrong = {name: case for name, case in found.items() if not case["apart"] < 1e-3 * case["moved"]}
    assert not still
    assert not wrong
    return found


def run_and_compare(target: Path, *cases: str) -> dict[str, Any]:
    """Runs `run.py`."""
    found = on_two_ranks("run", target, *cases)
    # Three steps; TRL's head and GRPO have a way of their own.
    fused = {name: case["fused"] for name, case in found.items() if not name.startswith(("trl", "grpo"))}
    assert fused == dict.fromkeys(fused, 3)
    assert not [case["formed"] for case in found.values() if case.get("formed")]
    return found


def test_same_parameters_as_without(tmp_path):
    """All in one start of the ranks, since starting takes longer than any case."""
    found = run_and_compare(tmp_path / "found.json", "ddp", "fsdp2", "by-hand")
    assert len(found) == 3 + 3 + 16 + 8
    # Calls and bytes of collectives in a step: no more than without.
    sent = {name: case["sent"] for name, case in found.items() if "sent" in case}
    assert len(sent) == 4 + 4 + 8
    assert not {name: both for name, both in sent.items() if any(o > p for p, o in zip(*both, strict=True))}
    for task in ("sft", "grpo", "grpo unplanned"):
        assert found[f"{task} ddp"]["wrapped"] == "DistributedDataParallel"
        assert found[f"{task} fsdp2"]["wrapped"].startswith("FSDP")


def pack_and_compare(target: Path, *wrappers: str) -> dict[str, Any]:
    """Runs `padding.py`. Of three steps, scored and trained, the second rank has one with padding."""
    found = on_two_ranks("padding", target, *wrappers)
    assert [case["served"] for case in found.values()] == [[6, 2]] * len(found)
    assert not [case for case in found.values() if any(case["declined"])]
    # Two layers, three times scored and trained, and three times more where a reentrant checkpoint's first forward is
    # without gradients: there the op runs as well. (Another checkpoint stops in the midst of what it forms again.)
    for name, case in found.items():
        expected = 0 if "experts" not in name else 18 if name.endswith("True") else 12
        assert case["experts"] == [expected] * 2, name
    return found


def test_experts_that_ranks_share_out(tmp_path):
    """Two layers, three times scored and trained."""
    ways = ("all_to_all", "all_reduce", "auto") if at_least("transformers", "5.23") else ("all_to_all",)
    found = on_two_ranks("experts", tmp_path / "found.json", *ways)
    assert {way: (case["served"], case["declined"]) for way, case in found.items()} == {
        way: ([12, 12], [[], []]) for way in ways
    }


def test_ranks_with_other_numbers_of_live_tokens(tmp_path):
    wrappers = ("ddp", "fsdp2", "fsdp2, kept", "ddp, experts", "fsdp2, experts")
    assert len(pack_and_compare(tmp_path / "found.json", *wrappers)) == 3 + 4 + 1 + 2 + 4
