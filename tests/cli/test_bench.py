"""`npu-kernels bench`: the runner of benchmarks/, under the package's name, with its own options."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import endtoend
from npu_trainer_kernels.cli import main

ROOT = Path(__file__).parents[2]
ONE = ["bench", "--device", "cpu", "--quick", "--only", "ops/rms_norm/N=2048 H=160/float32/reference"]


def test_it_measures_into_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*ONE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["provider"] for row in found["rows"]} == {"floor", "reference"}
    (written,) = (tmp_path / "npu-kernels-bench").glob("*.json")
    assert len(json.loads(written.read_text())["rows"]) == len(found["rows"]) == 6


def test_a_comparison_as_json(tmp_path, capsys):
    assert main([*ONE, "--output", str(tmp_path), "--name", "one"]) == 0
    capsys.readouterr()
    file = str(tmp_path / "one.json")
    assert main(["bench", "--compare", file, file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["time_ratio"] for row in found["rows"]] == [1.0] * 6
    assert found["regressions"] == []


def test_its_options_are_the_runners(capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", "--groups", "nothing"])
    assert error.value.code == 2
    assert "--groups must name ops, end-to-end, scaling" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main(["bench", "--help"])
    assert error.value.code == 0
    assert "usage: npu-kernels bench" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["npu_trainer_kernels bench", "benchmarks"])
def test_help_comes_before_torch(command):
    code = (
        "import runpy, sys\n"
        "module, *sys.argv[1:] = sys.argv[1:]\n"
        "try:\n    runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nosuch"], "--only 'nosuch' leaves no row on cpu; --list prints"),
        (["--only", "rms_norm", "--only", "nosuch"], "--only 'nosuch' leaves no row"),
        (["--skip", "/"], "--skip / leaves no row"),
        (["--device", "foo"], "--device must be cuda, cpu, or with torch_npu npu; got 'foo'"),
    ],
)
def test_what_would_measure_nothing_is_wrong_usage(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        main(["bench", "--device", "cpu", "--output", str(tmp_path), *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_child_finds_the_module_by_its_name():
    command = [sys.executable, "-m", endtoend.__name__, "--help"]
    done = subprocess.run(command, cwd=endtoend.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_is_installed_by_its_name():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"npu-kernels": "npu_trainer_kernels.cli:main"}
