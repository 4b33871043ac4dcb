"""What `pip install ".[npu]"` would put on a machine that has nothing: pip resolves it, from the index as it is today,
and installs nothing."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def offer_cpu_torch(folder: Path) -> None:
    """An empty wheel under the name of PyTorch's CPU build, which is on an index of its own: the extra asks for that
    build by name, and whoever installs it has to offer it."""
    name = "torch-2.13.0+cpu"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        info = f"{name}.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Version]]:
    """Versions by name."""
    folder = tmp_path_factory.mktemp("install")
    offer_cpu_torch(folder)
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
         "--find-links", str(folder), "--report", str(report), f"{ROOT}[npu]"],
        capture_output=True, text=True, timeout=600,
        # The environment of these tests has the checkout on its path; the resolution is that of a machine without.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Version]] = {}
    for each in json.loads(report.read_text())["install"]:
        metadata = each["metadata"]
        found.setdefault(canonicalize_name(metadata["name"]), []).append(Version(metadata["version"]))
    return found


def test_there_is_one_torch_and_the_torch_npu_that_belongs_to_it(resolved):
    (torch,), (torch_npu,) = resolved["torch"], resolved["torch-npu"]
    assert (torch.major, torch.minor) == (torch_npu.major, torch_npu.minor)
    assert torch.local == "cpu"


def test_triton_ascend_owns_the_module_alone(resolved):
    assert resolved["triton-ascend"]
    assert "triton" not in resolved
    assert not [name for name in resolved if name.startswith(("nvidia-", "cuda-"))]


def test_numpy_is_one_that_the_interpreter_works_with(resolved):
    (numpy,) = resolved["numpy"]
    assert numpy < Version("2.4")
