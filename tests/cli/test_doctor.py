"""`npu-kernels doctor`: each finding on an installation made to have it, and the self-check on planted faults."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npu_trainer_kernels import descriptions
from npu_trainer_kernels.cli import _doctor, _environment, _selfcheck, main
from npu_trainer_kernels.cli._environment import broken_imports, findings, versions
from npu_trainer_kernels.evidence.table import FORM_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "ascend.md"
HERE = {"torch": "2.7.1+cpu", "Ascend driver": "25.0"}


def codes(installed, broken):
    found = findings({**HERE, **installed}, broken)
    return [finding.code for finding in found if finding.code not in ("requirement", "optional")]


def install(folder: Path, name: str, version: str, files: dict[str, str], listed: tuple[str, ...] = ()) -> None:
    """A distribution as pip leaves it; `listed` are files that it claims and does not have."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in (*files, *listed)))
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_command_line_is_there_before_torch_is():
    code = (
        "import sys\n"
        "import npu_trainer_kernels.cli as cli\n"
        "cli._doctor.broken_imports = lambda installed: {}\n"
        "cli.make_parser()\n"
        "cli.main(['doctor', '--no-self-check'])\n"
        "print(sorted({'torch', 'transformers', 'triton', 'trl'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_torch_npu_for_another_torch():
    assert codes({"torch_npu": "2.7.1.post2"}, {}) == []
    assert codes({"torch_npu": "2.6.0"}, {}) == ["torch_npu-mismatch"]


def test_an_npu_that_nothing_would_use():
    assert codes({}, {}) == ["no-torch_npu"]
    assert codes({"Ascend driver": None}, {}) == []


@pytest.mark.parametrize(
    ("driver", "reason", "advice"),
    [
        (None, "ImportError: libhccl.so: cannot open", "install the Ascend driver and CANN"),
        ("25.0", "ImportError: libhccl.so: cannot open", "set_env.sh"),
        ("25.0", "AttributeError: module 'torch'", "that belongs to this torch"),
    ],
)
def test_a_torch_npu_that_cannot_be_imported(driver, reason, advice):
    found = findings({**HERE, "torch_npu": "2.7.1", "Ascend driver": driver}, {"torch_npu": reason})
    (finding,) = [f for f in found if f.code == "torch_npu-broken"]
    assert reason in finding.what
    assert advice in finding.do


def test_two_tritons_in_one_folder(tmp_path, monkeypatch):
    install(tmp_path, "triton", "3.9.0", {"triton/__init__.py": "", "triton/jit.py": ""})
    install(tmp_path, "triton-ascend", "3.2.0", {"triton/__init__.py": "", "triton/ascend.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = versions()
    (finding,) = [f for f in findings(installed, {}) if f.code.startswith("triton")]
    assert finding.code == "triton-overlap"
    assert "1 files of the same name" in finding.what


def test_a_triton_that_lost_files(tmp_path, monkeypatch):
    install(tmp_path, "triton", "3.9.0", {"triton/__init__.py": ""}, listed=("triton/language/core.py",))
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = [f for f in findings(versions(), {}) if f.code.startswith("triton")]
    assert finding.code == "triton-damaged"
    assert "lacks 1 of its files, triton/language/core.py for one" in finding.what


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import time; time.sleep(60)", "does not come back within 2 s"),
        ("raise OSError('libascend_hal.so: no such file')", "OSError: libascend_hal.so: no such file"),
    ],
)
def test_an_import_that_crashes_hangs_or_fails_is_a_finding(tmp_path, monkeypatch, code, reason):
    monkeypatch.setattr(_environment, "_IMPORT_SECONDS", 2.0)
    install(tmp_path, "torch_npu", "2.7.1", {"torch_npu/__init__.py": code})
    broken = broken_imports({"torch_npu": "2.7.1"}, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert reason in broken["torch_npu"]


def test_what_is_slow_is_not_installed_again():
    """A busy machine, or packages on a slow disk."""
    slow = "it does not come back within 180 s"
    found = findings({"transformers": "5.0", "trl": "1.16"}, {"transformers": slow, "trl": slow})
    advice = {f.code: f.do for f in found if f.code.endswith("-broken")}
    assert advice["transformers-broken"].startswith("python -X importtime -c 'import transformers' shows what")
    assert advice["trl-broken"] == "mend transformers (above), which it imports"


def test_what_breaks_because_of_torch_npu_is_blamed_on_it(tmp_path):
    """torch loads torch_npu when it is imported, and transformers looks for it: three broken imports, one cause."""
    install(tmp_path, "torch_npu", "2.7.1", {"torch_npu/__init__.py": "raise ImportError('libhccl.so is not there')"})
    (tmp_path / "torch_npu-2.7.1.dist-info" / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    )
    installed = {"torch": "2.7.1", "torch_npu": "2.7.1", "transformers": "5.0"}
    broken = broken_imports(installed, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert set(broken) == set(installed)
    advice = {f.code: f.do for f in findings(installed, broken)}
    assert advice["torch-broken"] == advice["transformers-broken"] == "mend torch_npu (above), which it imports"


def test_an_old_requirement_is_named(monkeypatch):
    monkeypatch.setattr(
        _environment.metadata, "requires", lambda name: ["trl<2,>=1.15", "no-such-package; extra == 'cuda'"]
    )
    (finding,) = [f for f in findings({"trl": "1.2"}, {}) if f.code == "requirement"]
    assert "1.2 is installed" in finding.what


def test_an_old_optional_package_is_named_and_a_missing_one_is_not(monkeypatch):
    required = ["trl<2,>=1.15; extra == 'trl'", "triton>=3.4; extra == 'cuda'", "pytest>=99; extra == 'test'"]
    monkeypatch.setattr(_environment.metadata, "requires", lambda name: required)
    monkeypatch.setattr(_environment, "_installed", lambda name: None)
    (finding,) = findings({"trl": "0.24.0", "pytest": "8.0"}, {})
    assert (finding.level, finding.code) == ("warning", "optional")
    assert "0.24.0 is installed" in finding.what
    assert finding.do == "pip install 'trl<2,>=1.15'"


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"triton": "3.6.0", "numpy": "2.4.6"}, True),
        ({"triton": "3.7.0", "numpy": "2.4.6"}, False),
        ({"triton": "3.6.0", "numpy": "2.3.5"}, False),
        ({"triton-ascend": "3.2.0", "numpy": "2.4.0"}, True),
        ({"triton-ascend": "3.2.0", "numpy": "2.3.5"}, False),
        ({"numpy": "2.4.6"}, False),
    ],
    ids=str,
)
def test_an_interpreter_that_numpy_breaks_is_named(installed, found):
    assert [each.code for each in _environment._interpreter_findings(installed)] == ["numpy-interpreter"] * found


def test_cann_is_found_where_its_environment_points(tmp_path):
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n")
    assert versions({"ASCEND_TOOLKIT_HOME": str(tmp_path)})["CANN"] == "8.2.RC1"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder@U22)", "580.159.04"),
    ],
)
def test_the_driver_of_both_kernel_modules_of_nvidia(tmp_path, said, version):
    file = tmp_path / "proc" / "driver" / "nvidia" / "version"
    file.parent.mkdir(parents=True)
    file.write_text(f"NVRM version: {said}\nGCC version:  gcc version 12.3.0\n")
    assert _environment._drivers(tmp_path)["NVIDIA driver"] == version


# ----------------------------------------------------------------------------------------------------------- self-check
def plant(monkeypatch, fault):
    """Makes our rms_norm wrong."""
    op = descriptions.FORMS["rms_norm"]
    wrong = dataclasses.replace(op, ours=lambda backend: lambda t: fault(op.ours(backend)(t)))
    monkeypatch.setitem(descriptions.FORMS, "rms_norm", wrong)


def one_infinity(y):
    mask = torch.zeros_like(y)
    mask[3, 5] = torch.inf
    return y + mask


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (lambda y: y, None),
        (lambda y: y * 1.01, "result 0: "),
        (lambda y: y + (y - y.detach()) * 0.01, "result 1: "),  # its gradient alone
        (one_infinity, "result 0: not finite where the reference is"),
    ],
    ids=["right", "value", "gradient", "not finite"],
)
def test_the_self_check_sees(monkeypatch, device, fault, problem):
    plant(monkeypatch, fault)
    work = descriptions.Workload("rms_norm", {"N": 12, "H": 40}, "float32")
    found = _selfcheck.check(work, device, "torch")
    assert found is None if problem is None else found.startswith(problem)


# A child that ends by itself at a moment of the op named `swiglu`, or of the whole check.
CHILD = """
import json, os, signal, sys, time
def say(**line):
    print(json.dumps(line), flush=True)
def die(now):
    if now == {when!r}:
        {how}
die("at the start")
say(device={{"kind": "cpu", "name": "cpu", "memory_bytes": 1}}, sized_as="cpu", without_npu=None)
for op in sys.argv[sys.argv.index("--ops") + 1].split(","):
    if op == "swiglu":
        die("before the op")
    say(op=op, dtype="float32", backend_op="an op", backend="torch", reason="why", begins=True)
    if op == "swiglu":
        die("within the op")
    say(op=op, dtype="float32", backend_op="an op", problem=None)
    if op == "swiglu":
        die("between its dtypes and its times")
    say(op=op, plain=None, measured=[], times=None)
die("at the end")
"""


def doctor_with(child, tmp_path, monkeypatch, capsys, *options):
    stub = tmp_path / "python"
    stub.write_text(f"#!{sys.executable}{child}")
    stub.chmod(0o755)
    monkeypatch.setattr(_doctor, "versions", lambda: {**versions(), "torch": "2.13.0"})
    monkeypatch.setattr(_doctor, "broken_imports", lambda installed: {})
    monkeypatch.setattr(_doctor, "findings", lambda installed, broken: [])
    monkeypatch.setattr(_doctor, "lost_gains", lambda installed, broken, seconds, runs: [])
    monkeypatch.setattr(sys, "executable", str(stub))
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


KILLED = "its process was killed by SIGKILL"


@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("before the op", f"swiglu, between two checks: {KILLED}"),
        ("within the op", f"swiglu, float32: {KILLED}"),
        ("between its dtypes and its times", f"swiglu, float32: {KILLED}"),
        ("at the start", f"the self-check cannot start: {KILLED}"),
        ("at the end", f"the self-check ended badly after the last op: {KILLED}"),
    ],
)
def test_a_process_that_dies_is_a_finding_wherever_it_dies(tmp_path, monkeypatch, capsys, when, what):
    child = CHILD.format(when=when, how="os.kill(os.getpid(), signal.SIGKILL)")
    code, found = doctor_with(child, tmp_path, monkeypatch, capsys)
    assert code == 1
    assert [finding["what"] for finding in found["findings"]] == [what]
    assert {line["op"] for line in found["ops"]} == (set() if when == "at the start" else set(descriptions.FORMS))
    wrong = {line["op"] for line in found["ops"] if line.get("problem")}
    assert wrong == ({"swiglu"} if "swiglu" in what else set())


@pytest.mark.parametrize("when", ["at the start", "before the op", "within the op"])
def test_a_process_that_leaves_without_a_word_is_a_finding(tmp_path, monkeypatch, capsys, when):
    code, found = doctor_with(CHILD.format(when=when, how="os._exit(0)"), tmp_path, monkeypatch, capsys)
    (finding,) = found["findings"]
    assert code == 1
    assert finding["what"].endswith("its process ended without a reason before it was done")


def test_ops_that_there_is_no_time_for_are_named(tmp_path, monkeypatch, capsys):
    child = CHILD.format(when="within the op", how="time.sleep(60)")
    code, found = doctor_with(child, tmp_path, monkeypatch, capsys, "--timeout", "3")
    first, *others = found["findings"]
    assert code == 1
    assert first["what"] == "swiglu, float32: it was not done after 3 s"
    after = FORM_NAMES[FORM_NAMES.index("swiglu") + 1 :]
    assert [other["what"] for other in others] == [
        f"{op} was not checked: there was no time for it in 3 s" for op in after
    ]
    assert {other["level"] for other in others} == {"warning"}


def test_every_op_of_the_table_has_sizes():
    for dtype in _selfcheck.CHECKED_DTYPES:
        checked = {work.op for work in descriptions.of_model(_selfcheck.CHECKED, _selfcheck.CHECKED_TOKENS, dtype)}
        assert checked == set(FORM_NAMES)
    for shapes, tokens in _selfcheck.TIMED.values():
        timed = {work.op for work in descriptions.of_model(shapes, tokens, "float32")}
        assert set(FORM_NAMES) - timed == {"gated_delta_rule"}


def test_an_op_without_sizes_is_named(tmp_path, monkeypatch, capsys):
    """An op that somebody adds with a size that the self-check lacks."""
    monkeypatch.setattr(_selfcheck, "CHECKED", dataclasses.replace(_selfcheck.CHECKED, key_size=0))
    monkeypatch.setattr(_doctor, "_child", lambda ops, times, seconds: in_this_process("gated_delta_rule,embedding"))
    monkeypatch.setattr(_doctor, "FORM_NAMES", ("gated_delta_rule", "embedding"))
    monkeypatch.setattr(_doctor, "broken_imports", lambda installed: {})
    monkeypatch.setattr(_doctor, "findings", lambda installed, broken: [])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"gated_delta_rule +not checked", out)
    assert "warning: gated_delta_rule was not checked: ModelShapes(" in out


def in_this_process(ops):
    """Returns the lines of the self-check's own `main`."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_selfcheck, "Lines", lambda: SimpleNamespace(write=lambda **line: lines.append(line)))
        assert _selfcheck.main(["--ops", ops, "--no-times"]) == 0
    return iter(lines)


@pytest.mark.parametrize(
    ("kind", "without_npu", "tritons", "expected"),
    [
        ("cpu", None, {}, []),
        ("cpu", "torch_npu is installed, but finds no NPU", {}, ["no-npu"]),
        ("cuda", None, {}, ["no-triton"]),
        ("cuda", None, {"triton": "3.9.0"}, []),
        ("cuda", None, {"triton-ascend": "3.2.0"}, ["other-triton"]),
        ("npu", None, {"triton-ascend": "3.2.0"}, []),
        ("npu", None, {}, ["no-triton"]),
        ("npu", None, {"triton": "3.8.0"}, ["other-triton"]),
    ],
)
def test_an_accelerator_that_is_not_used_in_full(kind, without_npu, tritons, expected):
    installed = {"triton": None, "triton-ascend": None, **tritons}
    line = {"device": {"kind": kind, "name": "a chip"}, "sized_as": "a chip", "without_npu": without_npu}
    assert [finding.code for finding in _doctor.device_findings(line, installed)] == expected


def test_a_chip_that_gets_anothers_tiles_is_named():
    device = {"kind": "npu", "name": "Ascend950DT_9582x"}
    line = {"device": device, "sized_as": "Ascend950PR_9579", "without_npu": None}
    (finding,) = _doctor.device_findings(line, {"triton": None, "triton-ascend": "3.2.0"})
    assert (finding.level, finding.code) == ("warning", "chip")
    assert finding.what == "Ascend950DT_9582x is no chip that we know: tiles are sized as for Ascend950PR_9579"


def platform(**installed):
    found = _environment._platform_findings({"torch_npu": "2.13.0", "python": "3.11.7", **installed})
    return [(finding.code, finding.what) for finding in found]


@pytest.mark.parametrize(("python", "named"), [("3.9.2", False), ("3.11.7", False), ("3.12.1", True), ("3.14.0", True)])
def test_a_python_without_a_wheel_of_triton_ascend_is_named(python, named):
    what = (
        f"triton-ascend 3.2.0 has wheels for Python 3.9 to 3.11, and this is Python {python}: pip finds none, and no "
        "kernel of ours runs on the NPU"
    )
    assert platform(python=python) == [("python", what)] * named
    assert platform(python=python, **{"triton-ascend": "3.2.1"}) == [], "it is there, wherever it is from"
    assert platform(python=python, torch_npu=None) == [], "there is nothing to run on"


@pytest.mark.parametrize(
    ("installed", "cann", "made_for"),
    [
        ({"triton-ascend": "3.2.0"}, "8.3.RC1", ["triton-ascend 3.2.0 is made for CANN 8.5.0"]),
        ({"triton-ascend": "3.2.0"}, "8.5.0", []),
        ({"triton-ascend": "3.2.0"}, "9.0.0", []),
        ({"triton-ascend": "3.2.0"}, None, []),
        ({"triton-ascend": "3.2.0"}, "of another naming", []),
        ({"torch_npu": "2.7.1"}, "8.2.RC1", ["torch_npu 2.7.1 is made for CANN 8.3.RC1"]),
        ({"torch_npu": "2.7.1"}, "8.3.RC1", []),
        ({"torch_npu": "2.7.1.post2"}, "8.3.RC1", ["torch_npu 2.7.1.post2 is made for CANN 8.5.0"]),
        ({"torch_npu": "2.13.0"}, "8.3.RC1", []),
    ],
)
def test_a_cann_that_is_too_old_is_named(installed, cann, made_for):
    assert platform(CANN=cann, **installed) == [("cann", f"{who}; here is CANN {cann}") for who in made_for]


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({}, False),
        ({"fla-core": "0.6.0"}, False),
        ({"fla-core": "0.6.0", "triton": "3.6.0"}, False),
        ({"fla-core": "0.6.0", "triton-ascend": "3.6.0"}, False),
        ({"triton-ascend": "3.2.0"}, False),
        ({"fla-core": "0.6.0", "triton-ascend": "3.2.0"}, True),
    ],
)
def test_an_fla_for_another_triton_ascend_is_named(installed, found):
    findings = _environment._fla_findings(installed)
    assert [finding.code for finding in findings] == ["fla-triton-ascend"] * found
    assert all("triton-ascend 3.6.0" in finding.what and "3.2.0" in finding.what for finding in findings)
    assert f"{_environment.FLA_TRITON_ASCEND} | fla-core" in PAGE.read_text(encoding="utf-8")


def test_the_documentation_says_the_same():
    page = PAGE.read_text(encoding="utf-8")
    rows = page.partition("## Versions that belong together")[2].partition("## ")[0].splitlines()
    for name, made_for in _environment.TRITON_ASCEND.items():
        assert any(f"| CANN | {made_for.cann} | triton-ascend {name}" in row for row in rows)
        assert any(f"triton-ascend {name}" in row and "{} to {}".format(*made_for.pythons) in row for row in rows)
    for name, cann in _environment.TORCH_NPU_CANN.items():
        row = next(row for row in rows if f"| CANN | {cann} | torch_npu" in row)
        assert re.search(rf"(?<![\d.]){re.escape(name)}(?![\w.]\w)", row), (name, cann)


def test_doctor_writes_one_json_object_and_says_that_every_op_is_right(monkeypatch, capsys):
    """The packages are looked at by other tests."""
    monkeypatch.setattr(_doctor, "broken_imports", lambda installed: {})
    code = main(["doctor", "--json", "--no-times"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if any(f["level"] == "error" for f in found["findings"]) else 0)
    assert {line["op"] for line in found["ops"]} == set(descriptions.FORMS)
    assert [line for line in found["ops"] if line.get("problem")] == []
    assert found["device"]["kind"] == os.environ["NPU_KERNELS_TEST_DEVICE"]
    assert found["backends"]["rms_norm"]["reason"]


def test_success_is_said_as_success(monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "findings", lambda installed, broken: [])
    monkeypatch.setattr(_doctor, "lost_gains", lambda installed, broken, seconds, runs: [])
    monkeypatch.setattr(_doctor, "broken_imports", lambda installed: {})
    assert main(["doctor", "--no-self-check"]) == 0
    assert capsys.readouterr().out.endswith(
        "\nEverything checked passed: the installation; the ops were not checked.\n"
    )
    line = {"op": "swiglu", "dtype": "float32", "backend": "torch", "backend_op": "swiglu", "reason": "why not"}
    device = {"device": {"kind": "cpu", "name": "cpu", "memory_bytes": 1}, "sized_as": "cpu", "without_npu": None}
    lines = [device, line, {**line, "problem": None}, {"op": "swiglu", "plain": "as fast", "times": None}]
    lines[-1]["measured"] = ["measured here: torch 1 ms"]
    monkeypatch.setattr(_doctor, "self_check", lambda times, seconds: iter(lines))
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("Everything checked passed: the installation, and 1 op against its reference.\n")
    assert "swiglu: torch: why not" in out
    assert "swiglu: measured here: torch 1 ms" in out
    assert "swiglu: left out of models unless asked for: as fast" in out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_timeout_that_is_none(capsys, seconds):
    assert main(["doctor", "--timeout", seconds]) == 2
    assert "--timeout must be positive" in capsys.readouterr().err


def test_a_wrong_option_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as error:
        main(["doctor", "--nonsense"])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "npu-kernels doctor: error: unrecognized arguments: --nonsense" in said
    assert said.startswith("usage: npu-kernels doctor")
