"""What is served of ten families after transformers' sources have moved; all of them, by `make test-moves`."""

import ast
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import warm

from .faults import FAULTS
from .kinds import KINDS, QUICK
from .served import different, lost
from .sources import moved

FILES = {kind: Path(transformers.__file__).parent / "models" / kind / f"modeling_{kind}.py"
         for kind in ("llama", "qwen3_moe")}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Any:
    """What `python -m tests.moves --quick` writes, and what it prints."""
    folder = tmp_path_factory.mktemp("moves")
    ended = warm.run(
        "tests.moves", "--quick", "--json", str(folder / "found.json"), folder=Path(__file__).parents[2],
        output=folder / "output", timeout=900,
    )  # fmt: skip
    assert (folder / "found.json").exists(), ended.output
    return {**json.loads((folder / "found.json").read_text())["found"], "status": ended.returncode}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_in_silence(found, kind):
    assert found[kind]["families"] == (len(QUICK) if kind == "together" else 1)
    assert not found[kind]["wrong"]
    assert not found[kind]["lost in silence"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_computes_something_else_is_not_served(found, fault):
    assert not found[fault]["wrong"]
    assert not found[fault]["served"]
    assert found[fault]["reasons"]


def test_its_status_says_so(found):
    assert found["status"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_moves(kind):
    texts = [file.read_text() for file in FILES.values()]
    after = [moved(text, KINDS[kind]) for text in texts]
    assert all(moved(text, ()) != new for text, new in zip(texts, after, strict=True))
    assert all(compile(new, "", "exec") for new in after)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_the_file(fault):
    kind, _, change = FAULTS[fault]
    text = FILES["llama" if kind == "llama" else "qwen3_moe"].read_text()
    assert moved(text, ()) != moved(text, (change,))
    assert ast.parse(moved(text, (change,)))


FACTS: dict[str, Any] = {
    "plain": ("1", "a"), "patched": ("2", "b"), "modules": {"rope Attention": 2}, "ran": {"rope Attention": 4},
    "left": ["rope Tower: its own"], "declined": [], "beside": {"rollouts": "served"},
}  # fmt: skip


def after(**others: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FACTS), **others}


def test_what_counts_as_lost():
    assert not lost(FACTS, after())
    assert lost(FACTS, after(modules={})) == {"rope Attention": []}
    assert lost(FACTS, after(ran={"rope Attention": 3})) == {"rope Attention": []}
    assert lost(FACTS, after(modules={}, left=["rope Attention: why", "swiglu M: why", *FACTS["left"]])) == {
        "rope Attention": ["rope Attention: why"]
    }
    assert lost(FACTS, after(beside={"rollouts": "left to generate: why"})) == {"rollouts": ["left to generate: why"]}


def test_what_counts_as_wrong():
    assert different(FACTS, after(), True) is None
    assert different(FACTS, after(plain=("1", "c")), False) is None
    assert "something else" in str(different(FACTS, after(plain=("1", "c")), True))
    assert "other results" in str(different(FACTS, after(patched=("2", "c")), True))
    assert different(FACTS, after(patched=("3", "c"), modules={}), True) is None
    assert "break" in str(different(FACTS, {"broken": "why"}, True))
    assert "fails" in str(different(FACTS, {"failed": "why"}, True))
