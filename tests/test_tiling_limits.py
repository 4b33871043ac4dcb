"""The limits of tiles: how the file is read, checked, asked and written."""

import json
from dataclasses import asdict, replace

import pytest

from npu_trainer_kernels import device
from npu_trainer_kernels.tiling import limits
from npu_trainer_kernels.tiling.limits import Evidence, Limit, Trial, parse, store, tile_limit, trying

TRIALS = (
    Trial("4096 x 14336 (intermediate)", 10240, 1, 0.0, 161.0),
    Trial("4096 x 14336 (intermediate)", 8192, 0, 0.0, 88.4),
    Trial("4096 x 14336 (intermediate)", 20480, 0, 0.0, None),
)
SWEEP = Evidence("swiglu", "bf16", "Ascend910B4", "ascendnpu-ir=1.2.0", "swiglu_block.size", TRIALS)
LIMIT = Limit("swiglu._forward_kernel", 2, 192, 8192, "elements of a tile", (SWEEP,))
SMALL, LARGE = device.chip_spec("Ascend910B4"), device.chip_spec("Ascend950PR_9589")


def _text(*found: Limit, **changed) -> str:
    return json.dumps({"limits": [{**asdict(limit), **changed} for limit in found]})


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file in the place of the package's own."""
    path = tmp_path / "tiles.json"
    path.write_text(_text())
    monkeypatch.setattr(limits, "FILE", path)
    limits.limits.cache_clear()
    yield path
    limits.limits.cache_clear()


def test_the_packages_own_file_is_as_it_must_be():
    for limit in parse(limits.FILE.read_text()):
        trials = [trial for part in limit.evidence for trial in part.trials]
        # Plans that nobody can trace are held to their waits alone.
        chosen = [t for t in trials if not t.fixed_waits and (t.cycles_per_kib is not None or t.waits_per_row is None)]
        assert chosen, f"{limit.kernel} names no tile that overlaps"


def test_what_is_written_is_read_and_replaced(file):
    other = replace(LIMIT, itemsize=4, limit=4096)
    for limit in (LIMIT, other, replace(LIMIT, limit=7168)):
        store(limit, file)
    assert parse(file.read_text()) == (replace(LIMIT, limit=7168), other)
    # A trial has a line of its own.
    assert sum(line.strip().startswith('{"shape"') for line in file.read_text().splitlines()) == 2 * len(TRIALS)


def test_a_limit_counts_for_its_memory_and_for_more_until_more_has_its_own(file):
    store(LIMIT, file)
    assert tile_limit("swiglu._forward_kernel", 2, SMALL) == tile_limit("swiglu._forward_kernel", 2, LARGE) == 8192
    store(replace(LIMIT, buffer_kib=248, limit=10240), file)
    assert tile_limit("swiglu._forward_kernel", 2, SMALL) == 8192
    assert tile_limit("swiglu._forward_kernel", 2, LARGE) == 10240


def test_a_limit_that_is_not_there_is_an_error_that_says_what_is(file):
    store(replace(LIMIT, buffer_kib=248), file)
    with pytest.raises(ValueError, match=r"has no limit for Ascend910B4; .*swiglu._forward_kernel 2 \(248 KiB\)"):
        tile_limit("swiglu._forward_kernel", 2, SMALL)
    with pytest.raises(ValueError, match="'swiglu' with itemsize 2 has no limit"):
        tile_limit("swiglu", 2, LARGE)


def test_another_limit_can_be_tried(file):
    store(LIMIT, file)
    with trying("swiglu._forward_kernel", 2, 64):
        assert tile_limit("swiglu._forward_kernel", 2, SMALL) == 64
    assert tile_limit("swiglu._forward_kernel", 2, SMALL) == 8192


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"limit": 0}, "swiglu._forward_kernel: limit and buffer_kib must be positive; got 0, 192"),
        ({"limit": "8192"}, "limit must be int; got '8192'"),
        ({"limit": True}, "limit must be int; got True"),
        ({"itemsize": 3}, r"itemsize must be one of \(2, 4\); got 3"),
        ({"evidence": []}, "evidence must name at least one trial"),
        ({"evidence": {}}, "evidence must be a list; got dict"),
        ({"evidence": [{"case": "swiglu"}]}, "evidence must have exactly the fields .*'trials'"),
        ({"also": 1}, "limit must have exactly the fields .*'unit'"),
    ],
)
def test_what_is_wrong_is_named(changed, says):
    with pytest.raises(ValueError, match=says):
        parse(_text(LIMIT, **changed))


def test_one_limit_for_each_key_and_nothing_else_in_the_file():
    with pytest.raises(ValueError, match="must have one limit for each kernel, itemsize and buffer_kib"):
        parse(_text(LIMIT, LIMIT))
    with pytest.raises(ValueError, match='must be an object with one list, "limits"'):
        parse("[]")
    with pytest.raises(ValueError, match="must be JSON"):
        parse("{")
