"""The sweep over a kernel's tiles, as a command."""

import json

import pytest

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ascend.sweep import main
from npu_trainer_kernels.tiling import limits as limits_module
from npu_trainer_kernels.tiling.limits import parse

SWIGLU = ["swiglu", "--kernel", "_forward_kernel", "--sizes", "8192"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A copy in the place of the package's own file."""
    path = tmp_path / "tiles.json"
    path.write_text(limits_module.FILE.read_text())
    monkeypatch.setattr(limits_module, "FILE", path)
    monkeypatch.setattr(limits_module.store, "__defaults__", (path,))
    limits_module.limits.cache_clear()
    yield path
    limits_module.limits.cache_clear()


def test_the_best_is_marked_and_written_with_its_evidence(file, kept_cache, capsys):
    before = tiling.swiglu_block
    main([*SWIGLU, "--tile", "swiglu_block.size", "--values", "20480,10240,4096", "--write",
          "--name", "swiglu._forward_kernel", "--unit", "elements of a tile"])  # fmt: skip
    assert tiling.swiglu_block is before
    lines = {line.split()[-1]: line for line in capsys.readouterr().out.splitlines() if "COLS=" in line}
    assert "no, 286720 of 196608 bytes" in lines["COLS=20480"]
    assert lines["COLS=4096"].startswith("*")
    limits = {limit.key: limit for limit in parse(file.read_text())}
    limit = limits["swiglu._forward_kernel", 2, 192]
    assert limit.limit == 4096
    trials = {trial.tile: trial for trial in limit.evidence[0].trials}
    assert set(trials) == {0, 10240, 4096}  # today's is 0
    assert trials[10240].fixed_waits > 0
    assert trials[4096].fixed_waits == 0
    assert trials[4096].cycles_per_kib < trials[10240].cycles_per_kib


def test_a_limit_of_a_formula_can_be_varied(file, kept_cache, monkeypatch, capsys):
    def block(itemsize, tensors, spec):
        return tiling.Block(limits_module.tile_limit("swiglu", itemsize, spec))

    monkeypatch.setattr(tiling, "swiglu_block", block)
    limits_module.store(
        limits_module.Limit("swiglu", 2, 192, 6144, "elements", (limits_module.Evidence("", "", "", "", "", ()),)), file
    )
    file.write_text(file.read_text().replace('"trials": []', '"trials": [' + json.dumps({
        "shape": "", "tile": 0, "fixed_waits": 0, "waits_per_row": 0, "cycles_per_kib": 1.0}) + "]"))  # fmt: skip
    main([*SWIGLU, "--limit-of", "swiglu", "--values", "2048"])
    out = capsys.readouterr().out
    assert "COLS=6144" in out
    assert "COLS=2048" in out


def test_of_the_950_the_plans_alone_are_told(file, kept_cache, capsys):
    main(["rope, half", "--kernel", "_rotate_kernel", "--sizes", "64", "--limit-of", "rope._rotate_kernel",
          "--values", "3072", "--dtype", "fp32", "--chip", "Ascend950PR_9589"])  # fmt: skip
    today, swept = (line for line in capsys.readouterr().out.splitlines() if "COLS=" in line)
    assert today.startswith("*")
    assert today.endswith("REST_COLS=32")
    # What the 910 takes. There is no trace, and so neither waits nor cycles.
    assert swept.split()[:6] == ["3072", "yes", "yes", "0", "-", "0.00"]
    assert "(double buffering lost" in swept


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--values", "1"], "exactly one of --tile and --limit-of"),
        (["--values", "1", "--tile", "nothing.size"], "--tile must be FUNCTION.FIELD with a function of tiling"),
        (["--values", "1", "--tile", "swiglu_block.size", "--chip", "Ascend310"], "chip must be one of"),
        (["--values", "1", "--tile", "swiglu_block.size", "--dtype", "int8"], "--dtype must be one of bf16"),
        (["--values", "4096", "--tile", "swiglu_block.size", "--write"], "--write needs --name, --unit"),
    ],
)
def test_what_is_wrong_is_named(arguments, says, kept_cache, capsys):
    with pytest.raises(SystemExit):
        main([*SWIGLU, *arguments])
    assert says in capsys.readouterr().err
