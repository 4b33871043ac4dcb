"""`evidence/families.json` is what its command writes, and families get what it promises."""

import json
import tempfile
from pathlib import Path

import pytest
import transformers

from npu_trainer_kernels.evidence.families import FIRST, GAINS, PROMISES, Served, read_families
from npu_trainer_kernels.gains import look_at_family
from npu_trainer_kernels.patching import PATCHES

from . import sets
from .sets import Found


@pytest.mark.parametrize("name", FIRST)
def test_a_family_gets_what_the_file_promises(name):
    """On a version that has no column, too: there it must get what the best one gives."""
    family = read_families().families[name]
    served = look_at_family(family.kind, family.cls)
    column = family.by_version.get(transformers.__version__)
    promised = family.most if column is None else column
    assert not {what: set(served.reasons(what)) for what in served.less_than(promised)}
    if column is not None:
        assert not column.less_than(served), "it gets more: python -m tests.families --sets"


def test_the_file_is_as_the_command_writes_it():
    promises = read_families()
    whole = sets.document(sets.columns_of(promises), promises.beside)
    assert PROMISES.read_text() == sets.text(whole)
    assert json.loads(sets.text(whole)) == whole


def test_what_the_file_names_is_there():
    promises = read_families()
    if transformers.__version__ in promises.versions:
        there = {name for name, family in promises.families.items() if family.by_version[transformers.__version__]}
        assert there <= {sets.name_of(*family) for family in sets.without_variants()}
    assert {op for family in promises.families.values() for op in family.most.ops} <= {*PATCHES}
    assert {*promises.worth} == {*GAINS}


def test_a_column_that_is_written_later_may_have_more():
    first = {"5.9.0": {"a": Found("A", served(gains=()))}}
    whole = sets.document(first, {})
    again = sets.columns_of(_read(whole))
    both = sets.document({**again, "5.10.0": {"a": Found("A", served())}}, {})
    assert list(both["lacks"]["5.9.0"]["a"]) == ["padding"]  # `capture` may not have been looked at


def _read(whole):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "families.json")
        file.write_text(sets.text(whole))
        return read_families(file)


def served(rope=2, gains=("padding", "capture"), why=None):
    return Served({"rms_norm": 1, "rope": rope}, frozenset(gains), why or {})


def test_what_a_version_serves_less_is_named_with_its_reasons():
    columns = {
        "5.9.0": {"a": Found("A", served()), "b": Found("B", served())},
        "5.10.0": {"a": Found("A", served(1, why={"rope": frozenset({"decorated"})})),
                   "c": Found("C", served(gains=("padding",)), default=False)},
    }  # fmt: skip
    whole = sets.document(columns, {"torch": "2.13.0", "trl": "1.16.0"})
    assert list(whole["lacks"]) == ["5.9.0", "5.10.0"]
    assert whole["lacks"]["5.10.0"] == {"a": {"rope": {"kinds": 1, "why": ["decorated"]}}, "b": None}
    assert whole["lacks"]["5.9.0"] == {"c": None}
    promises = _read(whole)
    again = sets.document(sets.columns_of(promises), promises.beside)
    assert again == whole
    a = promises.families["a"]
    assert (a.serving("rope"), a.serving("padding")) == ("5.9.0", "5.10.0")
    assert a.by_version["5.10.0"].less_than(a.most) == ["rope"]
    assert a.by_version["5.10.0"].reasons("rope") == {"decorated"}
    assert promises.families["b"].by_version["5.10.0"] is None
    assert not promises.families["c"].default


def test_what_was_not_looked_at_is_not_lacking():
    columns = {
        "5.9.0": {"a": Found("A", served(gains=("padding", "capture")))},
        "5.10.0": {"a": Found("A", served(gains=("padding",)))},
        "5.11.0": {"a": Found("A", served(gains=("padding",), why={"capture": frozenset({"it reads numbers"})}))},
    }
    assert sets.document(columns, {})["lacks"] == {
        "5.9.0": {}, "5.10.0": {}, "5.11.0": {"a": {"capture": {"kinds": 0, "why": ["it reads numbers"]}}},
    }  # fmt: skip
