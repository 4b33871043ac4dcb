"""What a wheel has, as pyproject.toml says it. The wheel itself is built and installed by `make release` alone."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folders(of: str) -> set[str]:
    """Those of a folder that have Python files, as packages."""
    return {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / of).rglob("*.py")}


def test_every_folder_of_code_is_a_package_of_the_wheel():
    assert set(TOOL["packages"]) == folders("npu_trainer_kernels") | {"npu_trainer_kernels.benchmarks"}
    assert TOOL["package-dir"] == {"npu_trainer_kernels.benchmarks": "benchmarks"}
    assert folders("benchmarks") == {"benchmarks"}


def test_nothing_but_the_package_lands_in_site_packages():
    assert {name.partition(".")[0] for name in TOOL["packages"]} == {"npu_trainer_kernels"}


def test_every_file_of_data_is_in_the_wheel():
    package = ROOT / "npu_trainer_kernels"
    files = {file.relative_to(package) for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    data = {file.as_posix() for file in files if file.suffix != ".py"}
    packaged = {
        "/".join([*name.split(".")[1:], file]) for name, given in TOOL["package-data"].items() for file in given
    }
    assert data == packaged
