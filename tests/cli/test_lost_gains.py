"""doctor says what the installed versions cost model families."""

import subprocess
import sys

import pytest

from npu_trainer_kernels.cli import _lost_gains
from npu_trainer_kernels.cli._process import ENDED
from npu_trainer_kernels.evidence.families import FIRST, Family, Served, read_families

FULL = {"transformers": "5.99.0", "torch": "2.13.0", "trl": "1.16.0"}


def line(name, less=(), problem=None):
    most = read_families().families[name].most
    ops = {op: count for op, count in most.ops.items() if op not in less}
    why = {what: ["it is given cache"] for what in less}
    return {"family": name, "problem": problem, "ops": ops, "gains": sorted(most.gains - {*less}), "why": why}


@pytest.fixture
def looked(monkeypatch):
    """Sets the lines of the other process."""

    def set_lines(*lines):
        monkeypatch.setattr(_lost_gains, "read", lambda command, seconds, environment: iter(lines))

    return set_lines


def test_a_new_release_that_costs_nothing_has_no_finding(looked):
    looked(*map(line, FIRST))
    assert _lost_gains.lost_gains(FULL, {}, 1.0) == []


def test_families_with_the_same_loss_are_one_finding(looked):
    looked(*(line(name, ("rollouts",) if name in ("llama", "qwen3") else ()) for name in FIRST))
    (found,) = _lost_gains.lost_gains(FULL, {}, 1.0)
    assert found.level == "warning"
    assert found.what == (
        "transformers 5.99.0: without completions by captured steps in llama, qwen3: it is given cache"
    )
    assert found.do.startswith(f"pip install transformers=={read_families().families['llama'].serving('rollouts')}")


def test_a_process_that_dies_is_a_finding(looked):
    looked(line("llama"), {ENDED: "its process was killed by SIGSEGV"})
    (found,) = _lost_gains.lost_gains(FULL, {}, 1.0)
    assert "is not known: its process was killed by SIGSEGV" in found.what
    assert "llama" not in found.what


def test_families_whose_models_raise_are_a_finding(looked):
    looked(*(line(name, problem="AttributeError: no such name") for name in FIRST))
    (found,) = _lost_gains.lost_gains(FULL, {}, 1.0)
    assert f"what it costs {', '.join(FIRST[:4])} and {len(FIRST) - 4} more is not known: AttributeError" in found.what


def test_a_tested_version_is_read_from_the_file(monkeypatch):
    monkeypatch.setattr(_lost_gains, "read", None)
    most = Served({"rope": 2}, frozenset({"padding"}))
    columns = {"5.9.0": most, "5.10.0": Served({"rope": 1}, frozenset({"padding"}), {"rope": frozenset({"decorated"})})}
    families = {
        "a": Family("a", "A", most, columns, True),
        "b": Family("b", "B", most, {**columns, "5.10.0": None}, True),
    }
    promises = read_families()
    monkeypatch.setattr(
        _lost_gains, "read_families",
        lambda: type(promises)(("5.9.0", "5.10.0"), promises.beside, promises.worth, families),
    )  # fmt: skip
    monkeypatch.setattr(_lost_gains, "untested", lambda installed: [])
    (found,) = _lost_gains.lost_gains({**FULL, "transformers": "5.10.0"}, {}, 1.0)
    assert found.what == "transformers 5.10.0: without rope in a: decorated"
    assert "transformers==5.9.0" in found.do
    assert _lost_gains.lost_gains({**FULL, "transformers": "5.9.0"}, {}, 1.0) == []


@pytest.mark.parametrize(
    ("installed", "broken"),
    [({"transformers": None}, {}), ({"torch": None}, {}), ({}, {"transformers": "ImportError"}), ({}, {"torch": "no"})],
)
def test_what_cannot_be_imported_is_not_looked_at(looked, installed, broken):
    looked()
    assert _lost_gains.lost_gains({**FULL, **installed}, broken, 1.0) == []


def test_without_self_check_no_process_is_started(monkeypatch):
    monkeypatch.setattr(_lost_gains, "read", None)
    assert _lost_gains.lost_gains(FULL, {}, 1.0, runs=False) == []


def test_the_other_process_looks():
    (served,) = _lost_gains.looked_at(["llama"], 300.0).values()
    assert isinstance(served, Served), served
    assert not served.less_than(read_families().families["llama"].most)


def test_the_file_is_read_without_torch():
    code = "import sys, npu_trainer_kernels.cli._lost_gains; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
