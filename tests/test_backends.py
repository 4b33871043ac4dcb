"""The choice of backend: order, overrides, errors, and the evidence that the order rests on."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from npu_trainer_kernels import backends, descriptions
from npu_trainer_kernels import vendor as vendor_module
from npu_trainer_kernels.device import KINDS
from npu_trainer_kernels.evidence import table
from npu_trainer_kernels.evidence.table import FORM_NAMES, TABLE, Choice, Measured
from npu_trainer_kernels.support import triton

CPU = torch.device("cpu")


class Device(NamedTuple):
    """Without torch_npu torch does not know the word."""

    type: str


NPU: Any = Device("npu")
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def interpreted(monkeypatch):
    """Triton runs on CPUs, as it does in these tests unless they are for an accelerator."""
    monkeypatch.setattr(triton, "INTERPRETED", True)


def test_cpu_uses_torch_and_says_why():
    name, reason = backends.explain("rms_norm", CPU)
    assert name == "torch"
    assert "CPU" in reason


@pytest.mark.parametrize("text", ["triton", "rms_norm=triton", "linear_logprob=torch, rms_norm=triton"])
def test_argument_overrides(interpreted, text):
    assert backends.choose("rms_norm", CPU, text) == "triton"


def test_triton_without_an_op_is_for_those_that_have_kernels(interpreted):
    assert backends.choose("varlen_attention", CPU, "triton") == "torch"
    assert "asked for" not in backends.explain("varlen_attention", CPU, "triton")[1]
    assert not backends.asked_for("varlen_attention", "triton")
    assert backends.asked_for("rms_norm", "triton")
    with pytest.raises(ValueError, match=r"varlen_attention: backend 'triton' .* there is no kernel of ours for it"):
        backends.choose("varlen_attention", CPU, "varlen_attention=triton")


def test_environment_overrides_and_the_argument_wins(interpreted, monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "rms_norm=triton")
    assert backends.choose("rms_norm", CPU) == "triton"
    assert backends.choose("linear_logprob", CPU) == "torch"
    assert backends.choose("rms_norm", CPU, "torch") == "torch"
    assert "NPU_KERNELS_BACKEND=rms_norm=triton" in backends.explain("rms_norm", CPU)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cudnn", "backend must be one of triton, torch, .*; got 'cudnn'"),
        ("rms_norm=", "backend must be one of"),
        ("norm=torch", "unknown op 'norm'; the ops are rms_norm"),
    ],
)
def test_bad_overrides(text, message):
    with pytest.raises(ValueError, match=message):
        backends.choose("rms_norm", CPU, text)


@pytest.mark.parametrize("value", [["torch"], [], {}, 3], ids=repr)
@pytest.mark.parametrize("op", descriptions.FORMS)
def test_an_op_refuses_a_backend_that_is_no_text(op, value):
    shapes = descriptions.ModelShapes(
        16,
        32,
        67,
        2,
        1,
        head_dim=8,
        experts=4,
        slots=2,
        channels=16,
        taps=4,
        state_keys=1,
        state_values=2,
        key_size=6,
        value_size=4,
    )
    (work,) = (work for work in descriptions.of_model(shapes, 8, "float32") if work.op == op)
    with pytest.raises(ValueError, match=rf"backend must be 'torch' or 'op=backend,...'; got {re.escape(repr(value))}"):
        work.ours(value)(work.inputs(CPU).tensors)


def around_torch(order: tuple[Choice, ...]) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
    """The backends that are tried before torch, and those behind it, which wait for a measurement."""
    (at,) = (i for i, choice in enumerate(order) if choice.backend == "torch")
    return order[:at], order[at + 1 :]


def waits(op: str, kind: str) -> bool:
    """Whether nothing was measured of an op on a kind of device: it is chosen by name alone there."""
    return bool(around_torch(TABLE[op].order[kind])[1])


def test_every_op_has_torch_on_every_device_and_behind_it_what_was_not_measured():
    for name, op in TABLE.items():
        assert set(op.order) == set(KINDS), name
        for kind, order in op.order.items():
            before, behind = around_torch(order)
            assert not (before and behind), name
            assert all("not measured" in choice.evidence for choice in behind), name
            assert all(choice.evidence for choice in order), name
            assert not waits(name, kind) or "not measured" in op.keeps_plain[kind].evidence, name
        assert set(op.keeps_plain) <= set(KINDS), name


def test_every_form_of_the_table_has_a_workload():
    assert set(descriptions.FORMS) == set(FORM_NAMES)


def medians(measured: Measured) -> dict[str, float]:
    """Forward and backward of each provider, as the results file has it."""
    row = "ops", measured.form, measured.shape, measured.dtype, measured.mode
    return {
        r["provider"]: round(r["ms"]["median"], 3)
        for r in json.loads((REPOSITORY / measured.file).read_text())["rows"]
        if tuple(r.get(name) for name in ("group", "op", "shape", "dtype", "mode")) == row and "ms" in r
    }


def test_why_models_keep_their_layer_norms_on_cuda_is_what_was_measured():
    measured = TABLE["layer_norm"].order["cuda"][0].measured
    assert measured is not None
    found = medians(measured)
    said = TABLE["layer_norm"].keeps_fused["cuda"].evidence
    assert f"the op took {found['ours-triton']} ms where it took {found['torch.nn.functional']} ms" in said
    assert f"{measured.row} on {measured.on} ({measured.file})" in said


MEASURED = [(op, kind) for op, row in TABLE.items() for kind, order in row.order.items() if order[0].measured]


@pytest.mark.parametrize("op", TABLE)
def test_what_cuda_gets_by_default_was_measured_there(op):
    """As an op by itself, or in whole steps, of which the evidence names the file. Without figures it is torch."""
    first = TABLE[op].order["cuda"][0]
    if waits(op, "cuda"):
        assert first.backend == "torch"
    elif first.measured is None:
        (file,) = re.findall(r"benchmarks/results/[\w.-]+\.json", first.evidence)
        assert (REPOSITORY / file).is_file()


def test_an_op_without_figures_is_chosen_by_name_alone(interpreted, monkeypatch):
    row = {
        "forms": ["new"],
        "before_torch": {},
        "not_measured": {"npu": ["triton"], "cuda": ["triton"], "cpu": ["triton"]},
    }
    whole = {"sentences": {}, "torch": dict.fromkeys(KINDS, "it runs everywhere"), "unmeasured": {"other": "nothing"}}
    monkeypatch.setitem(TABLE, "new", table._op(row, whole))
    assert backends.explain("new", CPU) == (
        "torch", "no other backend was measured on this kind of device: triton by name",
    )  # fmt: skip
    assert backends.choose("new", CPU, "new=triton") == "triton"
    assert backends.keeps_plain("new", CPU) == "not measured on this kind of device"
    assert backends.keeps_plain("new", torch.device("xpu")) == "nothing"


@pytest.mark.parametrize(("op", "kind"), MEASURED)
def test_evidence_is_what_was_measured(op: str, kind: str):
    first = TABLE[op].order[kind][0]
    assert first.measured is not None
    measured = medians(first.measured)
    assert first.measured.form in TABLE[op].forms
    assert (first.measured.ms, first.measured.plain_ms) == (
        measured[f"ours-{first.backend}"],
        measured[first.measured.plain],
    )
    assert first.measured.ms < first.measured.plain_ms


@pytest.mark.parametrize(
    "op", [name for name, op in TABLE.items() if "cpu" in op.keeps_plain and not waits(name, "cpu")]
)
def test_evidence_for_a_models_own_code_is_what_was_measured(op: str):
    found = TABLE[op].keeps_plain["cpu"].measured
    assert found is not None
    measured = medians(found)
    assert found.form == op
    assert (found.ms, found.plain_ms) == (measured["ours-torch"], measured["reference"])
    assert found.plain_ms < found.ms


def test_what_was_measured_is_said():
    assert TABLE["swiglu"].order["cuda"][0].evidence == (
        "0.438 ms against 0.775 ms of plain PyTorch, forward and backward, swiglu N=8192 I=14336 bfloat16 on an H200 "
        "(benchmarks/results/2026-11-22-nvidia-h200-fifth-round-ops.json)"
    )
    assert backends.keeps_plain("swiglu", CPU) == (
        "the model's own code is as fast on a CPU: 3.238 ms against 6.412 ms, forward and backward, "
        "swiglu N=2048 I=432 float32 (benchmarks/results/2026-11-21-cpu.json)"
    )


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch):
    """An NPU with torch_npu's operators, as far as the choice is concerned."""
    monkeypatch.setattr(vendor_module, "unavailable", lambda op: None if op in vendor_module.SERVED else "no operator")
    backends._by_table.cache_clear()
    yield
    backends._by_table.cache_clear()


@pytest.mark.usefixtures("vendor")
def test_what_the_vendor_does_not_cover_goes_to_the_next():
    assert backends.choose("rms_norm", NPU) == "vendor"
    assert backends.choose("rms_norm", NPU, None, lambda: None, lambda: None) == "vendor"
    assert backends.choose("rms_norm", NPU, None, lambda: "no weight") == "triton"
    assert backends.choose("rms_norm", NPU, None, lambda: None, lambda: "not repeatable") == "triton"
    reason = backends.explain("rms_norm", NPU)[1]
    assert f"It covers {vendor_module.SERVED['rms_norm'].covers}; what it does not cover goes to triton" in reason
    assert vendor_module.SERVED["rms_norm"].not_repeatable in reason


@pytest.mark.usefixtures("vendor")
def test_the_vendor_by_name_raises_for_what_it_does_not_cover(monkeypatch):
    assert backends.choose("rms_norm", NPU, "vendor", lambda: None, lambda: "not repeatable") == "vendor"
    with pytest.raises(
        ValueError, match=r"rms_norm: .*the backend argument.* not cover this call: no weight; it covers"
    ):
        backends.choose("rms_norm", NPU, "vendor", lambda: "no weight")
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "rms_norm=vendor")
    with pytest.raises(ValueError, match=r"NPU_KERNELS_BACKEND=rms_norm=vendor.* not cover this call: no weight"):
        backends.choose("rms_norm", NPU, None, lambda: "no weight")
    with pytest.raises(ValueError, match=r"embedding: backend 'vendor' .* cannot run on npu: no operator"):
        backends.choose("embedding", NPU, "vendor")


@pytest.mark.usefixtures("vendor")
def test_another_backend_by_name_is_not_asked_what_the_vendor_covers():
    assert backends.choose("rms_norm", NPU, "torch", lambda: pytest.fail("asked")) == "torch"


def test_an_unknown_kind_of_device_gets_torch(interpreted):
    """Not the tiles of the interpreter, which would be the CPU's."""
    other = torch.device("xpu")
    assert backends.choose("rms_norm", other) == "torch"
    with pytest.raises(ValueError, match="no kernel was made for this kind of device"):
        backends.choose("rms_norm", other, "triton")
    assert backends.keeps_plain("rms_norm", other) is not None
    assert backends.keeps_plain("linear_logprob", other) is None


def test_kernels_that_the_table_does_not_have_for_an_npu_cannot_be_asked_for_there():
    with pytest.raises(ValueError, match="cannot run on cpu: its kernels are not for NPUs: compiled for a 910B4"):
        backends.choose("gated_delta_rule", CPU, "ascend-lowering")
    assert "its kernels are not for NPUs" in backends.unavailable("triton", "npu", "gated_delta_rule")
    assert backends.unavailable("triton", "cuda", "gated_delta_rule") is None


def test_the_vendor_needs_an_npu():
    with pytest.raises(ValueError, match="cannot run on cpu: it runs on Ascend NPUs"):
        backends.choose("rms_norm", CPU, "vendor")


def test_every_line_of_an_npu_says_what_was_not_timed():
    for name, op in TABLE.items():
        before, _ = around_torch(op.order["npu"])
        assert all("not timed" in choice.evidence for choice in before), name
