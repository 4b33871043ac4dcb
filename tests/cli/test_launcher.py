"""What `npu-kernels doctor` says of the things that triton-ascend's launcher needs, on a machine made to have them."""

import json
import sys
from pathlib import Path

import pytest

from npu_trainer_kernels.cli import _doctor, _launcher, main
from npu_trainer_kernels.cli._launcher import findings, needs

NAMES = ["pybind11", "bisheng", "C++ compiler", "Python's headers", "ASCEND_HOME_PATH", "CANN's headers",
         "CANN's libraries", "bishengir-compile"]  # fmt: skip


def program(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Everything is there; tests take things away. `machine` is the environment, `bin` and `cann` its folders."""
    for tool in ("g++", "bishengir-compile"):
        program(tmp_path / "bin" / tool)
    program(tmp_path / "bin" / "bisheng", "print('x86 hiipu64')")
    for file in ("include/acl/acl.h", "pkg_inc/runtime/runtime/rt.h", "lib64/libruntime.so", "lib64/libascendcl.so"):
        path = tmp_path / "cann" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "Python.h").touch()
    monkeypatch.setattr(_launcher.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "python")})
    spec = type("Spec", (), {"origin": "pybind11/__init__.py"})
    monkeypatch.setattr(_launcher.importlib.util, "find_spec", lambda name: spec)
    return {"PATH": str(tmp_path / "bin"), "ASCEND_HOME_PATH": str(tmp_path / "cann")}


def lacking(machine, driver="25.0"):
    return findings(needs(machine), {"Ascend driver": driver})


def test_a_machine_that_has_everything(machine):
    found = needs(machine)
    assert [need.name for need in found] == NAMES
    assert all(need.found for need in found)
    assert lacking(machine) == []


@pytest.mark.parametrize(
    ("gone", "name", "says", "do"),
    [
        ("bin/g++", "C++ compiler", "neither clang++ nor g++ is on PATH", "apt-get install g++"),
        ("bin/bisheng", "bisheng", "0 active drivers", "set_env.sh"),
        ("bin/bishengir-compile", "bishengir-compile", "not on PATH", "too old for triton-ascend"),
        ("python/Python.h", "Python's headers", "no Python.h in", "python3-dev"),
        ("cann/include/acl/acl.h", "CANN's headers", "has no include/acl/acl.h", "CANN's toolkit"),
        ("cann/pkg_inc/runtime/runtime/rt.h", "CANN's headers", "has no runtime/runtime/rt.h", "CANN's toolkit"),
        ("cann/lib64/libruntime.so", "CANN's libraries", "lib64 has no libruntime.so", "CANN's toolkit"),
    ],
)
def test_one_thing_that_is_not_there_is_one_line_and_how_to_mend_it(machine, tmp_path, gone, name, says, do):
    (tmp_path / gone).unlink()
    (finding,) = lacking(machine)
    assert (finding.level, finding.code) == ("error", "launcher")
    assert f"without {name}: " in finding.what
    assert says in finding.what
    assert do in finding.do


def test_clang_serves_as_well(machine, tmp_path):
    (tmp_path / "bin" / "g++").rename(tmp_path / "bin" / "clang++")
    assert lacking(machine) == []


@pytest.mark.parametrize(("cc", "fine"), [("g++", True), ("ccache g++", False), ("no-such-compiler", False)])
def test_the_compiler_that_the_environment_names(machine, cc, fine):
    found = lacking({**machine, "CC": cc})
    assert [f"CC is {cc!r}" in finding.what for finding in found] == [True] * (not fine)


@pytest.mark.parametrize(("home", "says"), [(None, "it is not set"), ("/no/such/folder", "no folder /no/such/folder")])
def test_a_cann_whose_environment_was_not_set(machine, home, says):
    del machine["ASCEND_HOME_PATH"]
    (finding,) = lacking({**machine, **({} if home is None else {"ASCEND_HOME_PATH": home})})
    assert f"without ASCEND_HOME_PATH: {'it is not set' if home is None else 'there is'}" in finding.what
    assert says in finding.what
    assert "set_env.sh" in finding.do


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('x86 aarch64')", "no hiipu64 among its targets"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import time; time.sleep(60)", "TimeoutExpired"),
    ],
)
def test_a_bisheng_that_knows_no_npu(machine, tmp_path, monkeypatch, code, says):
    monkeypatch.setattr(_launcher, "_SECONDS", 1.0)
    program(tmp_path / "bin" / "bisheng", code)
    (finding,) = lacking(machine)
    assert "without bisheng: " in finding.what
    assert says in finding.what


def test_the_folder_that_triton_ascend_takes_in_place_of_path(machine, tmp_path):
    for tool, instead in (("bisheng", "ccec"), ("bishengir-compile", "npuc")):
        (tmp_path / "own").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).rename(tmp_path / "own" / instead)
    assert [finding.what.partition("without ")[2].partition(":")[0] for finding in lacking(machine)] == [
        "bisheng", "bishengir-compile"
    ]  # fmt: skip
    assert lacking({**machine, "TRITON_NPU_COMPILER_PATH": str(tmp_path / "own")}) == []


def test_without_a_driver_there_is_nothing_to_launch_on(machine, tmp_path):
    (tmp_path / "bin" / "g++").unlink()
    assert [finding.level for finding in lacking(machine, driver=None)] == ["warning"]


@pytest.mark.parametrize("installed", [{"torch_npu": "2.13.0", "triton-ascend": "3.2.0"}, {"torch_npu": "2.13.0"}])
def test_doctor_looks_where_both_packages_are(monkeypatch, capsys, installed):
    there = dict.fromkeys(_doctor.versions()) | installed
    lacking = [_launcher.Need("C++ compiler", None, "none is there", "install one")]
    monkeypatch.setattr(_doctor, "versions", lambda: there)
    monkeypatch.setattr(_doctor, "broken_imports", lambda installed: {})
    monkeypatch.setattr(_doctor, "findings", lambda installed, broken: [])
    monkeypatch.setattr(_launcher, "needs", lambda: lacking)
    main(["doctor", "--json", "--no-self-check"])
    found = json.loads(capsys.readouterr().out)
    looked = "triton-ascend" in installed
    assert found["launcher"] == ({"C++ compiler": None} if looked else {})
    assert [finding["code"] for finding in found["findings"]] == ["launcher"] * looked
