"""Versions that are newer than the tested ones: said once, and never refused."""

import re
from pathlib import Path

import pytest

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.cli._environment import WARNING, findings, versions
from npu_trainer_kernels.support import tested
from tests.models import small_model

ROOT = Path(__file__).parents[1]


def test_it_is_the_version_of_the_makefile():
    (version,) = re.findall(r"^TORCH\s+\?= torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert version == tested.NEWEST_TORCH


@pytest.mark.parametrize("version", ["2.7.1", "2.13.0", "2.13.9+cu130", "1.99", "", "unknown"])
def test_tested_versions_are_not_named(version):
    assert tested.newer_torch(version) is None


@pytest.mark.parametrize("version", ["2.14.0", "2.14.0.dev20261101+cpu", "2.100", "3.0"])
def test_newer_versions_are(version):
    assert tested.newer_torch(version) == (
        f"torch {version} is newer than 2.13, the newest that this package was tested with"
    )


def test_the_report_says_it_once(monkeypatch):
    monkeypatch.setattr(tested, "NEWEST_TORCH", "2.0")
    model = small_model("llama")
    with apply_npu_kernels(model) as kernels:
        kernels.refresh()
        assert str(kernels.report()).count("is newer than 2.0, the newest that this package was tested with") == 1
        assert kernels.report().replaced
    monkeypatch.undo()
    with apply_npu_kernels(small_model("llama")) as kernels:
        assert "is newer than" not in str(kernels.report())


@pytest.mark.parametrize(("version", "codes"), [("2.99.0", ["torch-newer"]), ("2.13.0", []), (None, [])])
def test_doctor_has_a_warning(version, codes):
    found = [each for each in findings({**versions(), "torch": version}, {}) if each.code == "torch-newer"]
    assert [each.code for each in found] == codes
    assert all(each.level == WARNING and "verify" in each.do for each in found)
