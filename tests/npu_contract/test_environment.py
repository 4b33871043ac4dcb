"""Machines where torch_npu is installed and finds no NPU, or not even its libraries: the package imports, trains on the
CPU, and says why."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels, backends, device, vendor
from tests import models

CPU, NPU = torch.device("cpu"), torch.device("npu")


def test_no_npu_is_found():
    assert "torch_npu" in sys.modules
    assert device.accelerator() == "cpu"
    assert device.torch_npu_state() == "torch_npu is installed, but finds no NPU"


def test_the_cpu_is_used_and_the_report_says_why():
    name, reason = backends.explain("rms_norm", CPU)
    assert name == "torch"
    assert reason.endswith("torch_npu is installed, but finds no NPU")
    with apply_npu_kernels(models.small_model("llama")) as kernels:
        assert {r.backend for r in kernels.report().replaced} == {"torch"}
        assert "torch_npu is installed, but finds no NPU" in kernels.report().text(full=True)


def test_the_vendor_asked_for_on_the_cpu_raises():
    with pytest.raises(ValueError, match=r"cannot run on cpu: it runs on Ascend NPUs, and torch_npu .* finds no NPU"):
        backends.choose("rms_norm", CPU, "vendor")


def test_on_an_npu_it_would_be_the_vendor():
    name, reason = backends.explain("rms_norm", NPU)
    assert name == "vendor"
    assert "107 us" in reason
    assert "what it does not cover goes to torch" in reason  # triton-ascend is not in this environment
    assert "fixed order" in reason
    assert backends.choose("rms_norm", NPU, None, lambda: "no weight") == "torch"
    assert backends.choose("rms_norm", NPU, None, lambda: None, lambda: "not repeatable") == "torch"
    assert backends.choose("rms_norm", NPU, "vendor", lambda: None, lambda: "not repeatable") == "vendor"


@pytest.mark.parametrize("op", backends.OPS)
def test_every_op_by_name(op: str):
    if op in vendor.SERVED:
        assert backends.explain(op, NPU, f"{op}=vendor")[1].endswith("what it does not cover raises")
    else:
        with pytest.raises(ValueError, match="torch_npu has no operator for it"):
            backends.choose(op, NPU, "vendor")


def test_a_torch_npu_without_an_operator(monkeypatch):
    lacking = replace(vendor.SERVED["rms_norm"], operators=("npu_rms_norm", "npu_no_such_operator"))
    monkeypatch.setitem(vendor.SERVED, "rms_norm", lacking)
    assert vendor.unavailable.__wrapped__("rms_norm") == "this torch_npu lacks npu_no_such_operator"


# On ops: transformers cannot be imported on such a machine (5.23: its `is_torch_npu_available` imports torch_npu).
_WITHOUT_LIBRARIES = """
import json
import torch
from npu_trainer_kernels import vendor, backends, ops

torch.manual_seed(0)
embeddings, norm, head = (torch.randn(*shape, requires_grad=True) for shape in ((33, 16), (16,), (33, 16)))
ids = torch.arange(33)
optimizer = torch.optim.SGD([embeddings, norm, head], 0.1)
losses = []
for _ in range(3):
    hidden = ops.rms_norm(ops.embedding(ids, embeddings), norm)
    loss = ops.fused_linear_cross_entropy(hidden, head, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
try:
    backends.choose("rms_norm", torch.device("cpu"), "vendor")
except ValueError as error:
    refusal = str(error)
print(json.dumps({
    "losses": losses,
    "explain": backends.explain("rms_norm", torch.device("cpu")),
    "vendor": vendor.unavailable("rms_norm"),
    "refusal": refusal,
}))
"""


def test_without_its_libraries():
    # This process has stand-ins for them; another one that does not load those finds them missing.
    done = subprocess.run([sys.executable, "-c", _WITHOUT_LIBRARIES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["losses"] == sorted(found["losses"], reverse=True), "the loss falls at every step"
    why = "torch_npu is installed, but cannot be imported (ImportError: lib"
    assert found["explain"][0] == "torch"
    assert why in found["explain"][1]
    assert why in found["refusal"]
    assert found["vendor"].startswith("torch_npu cannot be imported (ImportError: lib")
