"""The file of measurements: what it decides, and what it may hold without being believed."""

import dataclasses
import json
import os
import warnings

import pytest
import torch

from npu_trainer_kernels import _triton, apply_npu_kernels, backends, tiling, tuned
from npu_trainer_kernels.device import ASCEND_CHIPS, DeviceSpec
from npu_trainer_kernels.tuned import Entry, Variation
from tests.models import small_model

CPU = torch.device("cpu")
FAST = Entry("torch", 1.0, 2.0, False, "N=8 H=16", "float32")
SLOW = Entry("torch", 2.0, 1.0, True, "N=8 H=16", "float32")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("NPU_KERNELS_TUNED")
    tuned.forget()
    yield tmp_path
    tuned.forget()


def measured():
    return {chip: dict(machine.ops) for chip, machine in tuned.machines().items()}


def test_stored_and_found_again_by_chip_and_op(folder):
    path = tuned.store("cpu", {"rms_norm": FAST})
    tuned.store("cpu", {"swiglu": SLOW})
    tuned.store("NVIDIA H200", {"rms_norm": SLOW})
    assert measured() == {"cpu": {"rms_norm": FAST, "swiglu": SLOW}, "NVIDIA H200": {"rms_norm": SLOW}}
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_what_loses_to_plain_pytorch_is_left_out_unless_asked_for():
    tuned.store("cpu", {"rms_norm": SLOW, "swiglu": FAST})
    model = small_model("llama")
    with apply_npu_kernels(model) as kernels:
        report = kernels.report()
    reasons = {left.op: left.reason for left in report.left_alone}
    assert "plain PyTorch is faster; measured here: torch 2 ms, plain PyTorch 1 ms" in reasons["rms_norm"]
    # Measured to be worth it, so the table's general remark on CPUs does not count.
    assert "swiglu" in {r.op for r in report.replaced}
    assert backends.keeps_plain("rms_norm", CPU, "rms_norm=torch") is None
    with apply_npu_kernels(small_model("llama"), ops=["rms_norm"]) as kernels:
        assert {r.op for r in kernels.report().replaced} == {"rms_norm"}


def test_the_fastest_backend_serves_and_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(_triton, "INTERPRETED", True)
    assert backends.explain("rms_norm", CPU)[0] == "torch"
    tuned.store("cpu", {"rms_norm": Entry("triton", 1.0, 2.0, False, "N=8 H=16", "float32")})
    name, reason = backends.explain("rms_norm", CPU)
    assert (name, backends.choose("rms_norm", CPU)) == ("triton", "triton")
    assert "measured here: triton 1 ms, plain PyTorch 2 ms, N=8 H=16 float32" in reason
    assert backends.choose("rms_norm", CPU, "torch") == "torch"


def test_a_backend_that_cannot_run_here_is_not_chosen():
    tuned.store("cpu", {"rms_norm": Entry("vendor", 1.0, 2.0, False, "N=8 H=16", "float32")})
    assert backends.choose("rms_norm", CPU) == "torch"


def test_another_version_made_it(monkeypatch):
    tuned.store("cpu", {"rms_norm": SLOW})
    monkeypatch.setattr(tuned, "_versions", lambda: {"torch": "99.0"})
    tuned.forget()
    assert tuned.machines() == {}
    tuned.store("cpu", {"swiglu": FAST})
    assert measured() == {"cpu": {"swiglu": FAST}}


def test_it_can_be_ignored(monkeypatch):
    tuned.store("cpu", {"rms_norm": SLOW})
    monkeypatch.setenv("NPU_KERNELS_TUNED", "0")
    tuned.forget()
    assert tuned.machines() == {}


def entry(**changes):
    fields = {"backend": "torch", "ms": 1.0, "plain_ms": 2.0, "plain_wins": False, "shape": "N=8", "dtype": "float32"}
    machine = {"versions": {}, "ops": {"rms_norm": {**fields, **changes}}, "tiles": []}
    return json.dumps({"format": 1, "machines": {"cpu": machine}})


def tile(**changes):
    fields = {"function": "swiglu_block", "args": [2, 5], "size": 1, "warps": 0}
    machine = {"versions": {}, "ops": {}, "tiles": [{**fields, **changes}]}
    return json.dumps({"format": 1, "machines": {"cpu": machine}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]",
        '{"format": 2, "machines": {}}',
        '{"format": 1, "machines": []}',
        '{"format": 1, "machines": {"cpu": null}}',
        '{"format": 1, "machines": {"cpu": {"versions": [], "ops": {}}}}',
        '{"format": 1, "machines": {"cpu": {"versions": {"torch": 2}, "ops": {}}}}',
        '{"format": 1, "machines": {"cpu": {"versions": {}, "ops": {"rms_norm": []}}}}',
        entry(backend="os.system"),
        entry(backend=["torch"]),
        entry(ms=-1),
        entry(ms="1"),
        entry(ms=float("nan")),
        entry(ms=True),
        entry(plain_ms=0),
        entry(plain_wins=1),
        entry(plain_wins=True, plain_ms=None),
        entry(shape="a\nb"),
        entry(dtype="x" * 999),
        entry(more=1),
        tile(function=["swiglu_block"]),
        tile(args=["2"]),
        tile(args=5),
        tile(size=4),
        tile(size=True),
        tile(warps=1.0),
        "[" * 100_000,
        entry() + " " * (1 << 19),
        '{"format": 1, "machines": {"\ud800": {}}}',
    ],
)  # fmt: skip
def test_a_corrupt_or_foreign_file_is_ignored_with_a_warning(folder, text):
    (folder / "tuned.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.warns(UserWarning, match=r"tuned\.json is ignored"):
        assert tuned.machines() == {}
    # It is read once, and can be written anew.
    assert backends.choose("rms_norm", CPU) == "torch"
    with pytest.warns(UserWarning, match="is ignored"):
        tuned.store("cpu", {"rms_norm": FAST})
    assert measured() == {"cpu": {"rms_norm": FAST}}


def test_a_folder_in_its_place_and_one_that_may_not_be_read(folder):
    (folder / "tuned.json").mkdir()
    with pytest.warns(UserWarning, match=r"tuned\.json is ignored"):
        assert tuned.machines() == {}


def test_no_file_is_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.machines() == {}


# ---------------------------------------------------------------------------------------------------------------- tiles
H200 = DeviceSpec("cuda", "NVIDIA H200", 132, 256 << 10, 141 << 30)
NPU = ASCEND_CHIPS["Ascend910B4"]


@pytest.fixture
def fresh_tiles():
    tiling.forget_tiles()
    yield
    tiling.forget_tiles()


def test_a_measured_tile_goes_before_the_formula_on_its_chip_alone(fresh_tiles):
    formula = tiling.swiglu_block(2, 5, H200)
    tuned.store("NVIDIA H200", {}, {("swiglu_block", (2, 5)): Variation(size=1, warps=-1)})
    tiling.forget_tiles()
    changed = tiling.swiglu_block(2, 5, H200)
    assert changed.size == 2 * formula.size
    assert changed.options == {"num_warps": formula.options["num_warps"] // 2}
    assert tiling.swiglu_block(2, 3, H200) == tiling.swiglu_block(2, 3, dataclasses.replace(H200, name="NVIDIA H100"))
    assert tiling.swiglu_block(2, 5, dataclasses.replace(H200, name="NVIDIA H100")) == formula


def test_a_variation_covers_the_same_row_and_fits_an_npu():
    formula = tiling.norm_forward_tile(4096, 2, True, False, False, H200)
    for by in (Variation(s, w) for s in (-1, 0, 1) for w in (-1, 0, 1)):
        tile = tiling.varied(formula, by, H200)
        assert (tile.cols, tile.blocks) == (formula.cols, formula.blocks)
        assert tile.rows >= 1
        assert 1 <= tile.options["num_warps"] <= 32
    npu = tiling.swiglu_block(2, 5, NPU)
    assert tiling.varied(npu, Variation(size=1), NPU) == npu
    assert tiling.varied(npu, Variation(size=-1), NPU).size == npu.size // 2
    assert tiling.varied(None, Variation(size=1), H200) is None


def test_a_tile_is_computed_once(fresh_tiles):
    """The file and the formula are asked on a miss alone: a launch pays for a look-up."""
    first = tiling.swiglu_block(2, 5, H200)
    tuned.store("NVIDIA H200", {}, {("swiglu_block", (2, 5)): Variation(size=1)})
    assert tiling.swiglu_block(2, 5, H200) is first


def test_half_a_file_is_never_seen(folder, monkeypatch):
    tuned.store("cpu", {"rms_norm": FAST})

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        tuned.store("cpu", {"rms_norm": SLOW})
    tuned.forget()
    assert measured() == {"cpu": {"rms_norm": FAST}}
