"""`npu-kernels prove`: what goes into the archive and what must not, interruption and resumption, parts that fail.

Its processes are stood in for by a script, but for the last tests, which run the parts themselves on small sizes.
"""

import contextlib
import errno
import json
import os
import signal
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import cases, results
from npu_trainer_kernels import descriptions
from npu_trainer_kernels.cli import _doctor, _process, _prove, _prove_archive, _prove_report, _prove_worker, _tune, main
from npu_trainer_kernels.cli._environment import Finding
from npu_trainer_kernels.evidence import tuned

STUB = """
import json, os, signal, sys, time
part, done = sys.argv[1], json.loads(sys.stdin.read())
here = os.path.dirname(os.path.abspath(__file__))
def say(**line):
    print(json.dumps(line), flush=True)
script = json.load(open(os.path.join(here, "script.json")))
items = script.get(part, {"one": {}})
items = dict(list(items.items())[:int(sys.argv[2])]) if sys.argv[2:] else items
say(items=list(items))
for name, what in items.items():
    if name in done:
        continue
    say(begins=name)
    with open(os.path.join(here, "log"), "a") as log:
        print(part, name, file=log)
    exec(what.get("does", ""))
    say(item=name, **{"status": "ok", **what.get("record", {})})
"""
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "triton": None, "triton-ascend": "3.2.0"}
META = {
    "format": 1, "date": "2026-01-02T03:04:05Z",
    "device": {"kind": "npu", "name": "Ascend910B4", "memory_bytes": 1 << 35},
    "packages": {"torch": "2.13.0"}, "sources": "abc",
}  # fmt: skip
RECORD = {"meta": META, "count": 2, "chip": "Ascend910B4", "sized_as": "Ascend910B4", "without_npu": None}
DEVICE = {"device": {"device": {"record": RECORD}}}
PARTS = [part.name for part in _prove.PARTS]


def milliseconds(median: float) -> dict[str, float]:
    return {"median": median, "q1": median, "q3": median, "least": median, "samples": 9}


def kernel(provider: str, ms: float, mode: str = "both", **fields) -> dict:
    return {
        "group": "ops", "op": "swiglu", "shape": "N=8 I=16", "sizes": {"N": 8, "I": 16}, "dtype": "bfloat16",
        "provider": provider, "version": "1", "mode": mode, "status": "ok", "ms": milliseconds(ms), "extra_bytes": 0,
        "verdict": "ok", **fields,
    }  # fmt: skip


def step(provider: str, ms: float, gib: float) -> dict:
    return {
        "group": "end-to-end", "op": "sft-trainer", "shape": "llama 4x16", "sizes": {}, "dtype": "bfloat16",
        "provider": provider, "version": "1", "mode": "step", "status": "ok", "ms": milliseconds(ms),
        "peak_bytes": int(gib * 2**30), "losses": [2.0, 1.0], "grad_norms": [1.0, 1.0],
    }  # fmt: skip


CHOICES = {"choices": {"record": {"choices": {"swiglu": {"backend": "triton", "reason": "so", "plain": None}}}}}


@pytest.fixture(autouse=True)
def look(monkeypatch):
    """An installation; its findings may be added to."""
    here = _doctor.Installation(dict(VERSIONS), {}, {}, [])
    monkeypatch.setattr(_doctor, "look", lambda output: here)
    return here


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Sets what the parts do: {part: {item: {"record": fields, "does": Python}}}."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(_prove, "WORKER", (sys.executable, str(tmp_path / "stub.py")))

    def script(**parts):
        (tmp_path / "script.json").write_text(json.dumps({**DEVICE, **parts}))

    script()
    return script


def run(tmp_path, capsys, *options, minutes="1"):
    code = main(["prove", "--minutes", minutes, "--output", str(tmp_path / "out"), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def archive(tmp_path) -> dict[str, str]:
    (path,) = (tmp_path / "out").glob("*.zip")
    with zipfile.ZipFile(path) as packed:
        assert [info.orig_filename for info in packed.infolist()] == packed.namelist()
        return {path.name: "", **{name: packed.read(name).decode() for name in packed.namelist()}}


def log(tmp_path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def test_every_part_is_run_and_packed(tmp_path, stub, capsys):
    code, found = run(tmp_path, capsys)
    assert (code, found["stopped"], found["failures"]) == (0, False, [])
    assert log(tmp_path) == ["device device", *(f"{part} one" for part in PARTS)]
    assert set(_prove_worker.PARTS) == {"device", *PARTS}
    files = archive(tmp_path)
    assert set(files) == {"prove-ascend910b4.zip", "prove.json", "report.md", "tuned.json"}
    packed = json.loads(files["prove.json"])
    assert packed["schema"] == _prove_archive.SCHEMA == 1
    assert packed["meta"]["device"]["name"] == "Ascend910B4"
    assert {"schema", "meta", "rows", "checks", "choices", "convergence", "tuning", "tuned", "failures", "absent",
            "parts", "environment", "written"} == set(packed)  # fmt: skip


def test_a_quick_run_measures_a_little_of_most_parts(tmp_path, stub, capsys):
    stub(checks={"a": {}, "b": {}, "c": {}}, table={"a": {}, "b": {}})
    code, found = run(tmp_path, capsys, "--quick")
    assert (code, found["failures"], found["meta"]["command"]) == (0, [], "npu-kernels prove --quick")
    one = [f"{part} one" for part in ("kernels", "steps")]
    assert log(tmp_path) == ["device device", "checks a", "checks b", *one, "table a"]
    assert set(found["parts"]) == set(PARTS) - {"convergence", "ranks"}
    assert archive(tmp_path)["report.md"].startswith("# npu-kernels prove --quick\n")
    # The rest is not measured into the same archive.
    assert main(["prove", "--output", str(tmp_path / "out")]) == 2
    assert "what is there was measured with --quick" in capsys.readouterr().err


def test_a_run_that_measures_nothing_fails(tmp_path, stub, capsys):
    stub(device={"device": {"does": "time.sleep(60)"}})
    code = main(["prove", "--minutes", "0.03", "--output", str(tmp_path / "out")])
    assert code == 1
    assert "Nothing was measured: --minutes must be more than 0.03 here." in capsys.readouterr().out


def test_a_short_run_gives_the_first_part_time_to_start(tmp_path, stub, capsys):
    """A share of the time in which a process cannot import torch would measure nothing."""
    stub(checks={"a": {"does": "time.sleep(1.5)"}})
    code, found = run(tmp_path, capsys, minutes=str((_prove.LEAST_SECONDS + 4) / 60))
    assert (code, found["parts"]["checks"]["done"]) == (0, 1)


# ------------------------------------------------------------------------------------------------ what it must not have
HOST, USER, SECRET = "kassandra-17", "penthesilea", "hf_0123456789abcdef"
PLANTED = {
    "host name": HOST,
    "user name": USER,
    "home": f"/home/{USER}/private/models",
    "another's folder": "/scratch/odysseus/run 3",
    "compiler's option": "-I/opt/achilles/include",
    "secret": SECRET,
    "address": "10.11.12.13",
    "mail": "helena@troy.example",
    "url": "https://proxy.troy.example:3128",
}
FORBIDDEN = (HOST, HOST.upper(), USER, "odysseus", "achilles", "private", SECRET, "10.11.12.13", "troy", "sesame")


@pytest.fixture
def planted(monkeypatch, stub, look):
    """What names the machine and its owner, wherever free text comes from."""
    monkeypatch.setattr(_prove_archive.socket, "gethostname", lambda: f"{HOST}.troy.example")
    monkeypatch.setenv("USER", USER)
    monkeypatch.setenv("HOME", f"/home/{USER}")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("MY_PASSWORD", "open sesame")
    said = "; ".join(PLANTED.values()) + "; open sesame"
    row = {"status": "failed", "reason": said}
    stub(
        checks={"a": {"record": {"op": "swiglu", "backend": "torch", "dtype": "float32", "shape": "N=1", **row}}},
        kernels={"b": {"record": {**row, "rows": [kernel("reference", 1.0, status="error", reason=said)]}}},
        steps={"c": {"record": {**row, "rows": [{**step("plain", 1.0, 1.0), "status": "error", "reason": said}]}}},
        convergence={"d": {"record": {**row, "status": "absent"}}},
        ranks={"e": {"does": f"sys.exit({said!r})"}},
        table={said: {"record": row}},
        device={"device": {"record": {**DEVICE["device"]["device"]["record"], "without_npu": said}}},
    )
    look.findings.append(Finding("warning", "launcher", said, f"install {said}"))
    look.broken["trl"] = said
    look.launcher["C++ compiler"] = f"/home/{USER}/bin/g++"


def leaks(tmp_path) -> set[str]:
    text = "\n".join(part for pair in archive(tmp_path).items() for part in pair)
    return {word for word in FORBIDDEN if word in text}


@pytest.mark.usefixtures("planted")
def test_the_archive_names_nobody_and_nothing_of_the_machine(tmp_path, capsys):
    run(tmp_path, capsys)
    assert leaks(tmp_path) == set()
    packed = json.loads(archive(tmp_path)["prove.json"])
    assert str(tmp_path) not in json.dumps(packed)
    assert packed["environment"]["launcher"] == {"C++ compiler": True}
    # What it is for is still there.
    assert packed["meta"]["device"]["name"] == "Ascend910B4"
    assert {f["part"] for f in packed["failures"]} == {"checks", "kernels", "steps", "ranks", "table"}
    assert "<secret>" in packed["failures"][0]["reason"]


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("fault", "seen"),
    [("_names", {HOST, USER}), ("_secrets", {SECRET, "sesame"}), ("_PATH", {"odysseus", "achilles", "private"}),
     ("_ADDRESSES", {"10.11.12.13", "troy"})],
)  # fmt: skip
def test_the_search_sees_what_is_not_taken_out(tmp_path, monkeypatch, capsys, fault, seen):
    never = _prove_archive.re.compile(r"(?!)")
    init = _prove_archive.Scrubber.__init__

    def faulty(self, environment):
        init(self, environment)
        setattr(self, fault, never)

    if fault in ("_names", "_secrets"):
        monkeypatch.setattr(_prove_archive.Scrubber, "__init__", faulty)
    else:
        monkeypatch.setattr(_prove_archive, fault, never)
    run(tmp_path, capsys)
    assert leaks(tmp_path) >= seen


@pytest.mark.parametrize(
    "text",
    ["24.1.0.3", "2.7.1.post2+cpu", "N=8192 H=4096", "ops/swiglu/N=8 I=16/bfloat16/ours-triton", "1.5 ms / 3", "npu",
     "libruntime.so: cannot open shared object file", "end-to-end/grpo-trl/qwen3-0.6b 8x(512+..2048 exponential)",
     "end-to-end/dpo-trl/llama 2x2x(16+14..120)/float32/plain"],
)  # fmt: skip
def test_what_says_nothing_of_a_machine_stays(monkeypatch, text):
    monkeypatch.setattr(_prove_archive.socket, "gethostname", lambda: "npu")
    assert _prove_archive.Scrubber({"USER": "cpu"}).text(text) == text


def test_of_a_path_the_name_of_a_library_stays():
    scrubber = _prove_archive.Scrubber({})
    assert scrubber.text("OSError: /usr/lib64/libhccl.so.2: not found") == "OSError: <path>/libhccl.so.2: not found"
    assert scrubber.text("no folder '/data/secret-project'") == "no folder '<path>'"


# --------------------------------------------------------------------------------------------------- trouble on the way
def test_a_part_that_crashes_is_recorded_and_the_others_go_on(tmp_path, stub, capsys):
    stub(kernels={"a": {}, "b": {"does": "os.kill(os.getpid(), signal.SIGSEGV)"}, "c": {}})
    code, found = run(tmp_path, capsys)
    assert code == 1
    assert [(f["part"], f["item"], f["reason"]) for f in found["failures"]] == [
        ("kernels", "b", "its process was killed by SIGSEGV")
    ]
    assert found["parts"]["kernels"] == {"done": 3, "left": [], "begun": True}
    assert log(tmp_path)[-1] == "table one"


def test_a_part_that_cannot_start_is_recorded(tmp_path, stub, capsys):
    (tmp_path / "stub.py").write_text(
        "import sys\nif sys.argv[1] == 'steps':\n    import nothing_of_that_name\n" + STUB
    )
    code, found = run(tmp_path, capsys)
    assert code == 1
    (failure,) = found["failures"]
    assert (failure["part"], failure["item"]) == ("steps", "start")
    assert "No module named 'nothing_of_that_name'" in failure["reason"]
    assert log(tmp_path)[-1] == "table one"


def test_an_item_that_hangs_is_recorded_and_the_others_go_on(tmp_path, stub, capsys, monkeypatch):
    stub(steps={"a": {"does": "time.sleep(600)"}, "b": {}})
    parts = [_prove.Part(p.name, p.weight, 3.0 if p.name == "steps" else p.silence) for p in _prove.PARTS]
    monkeypatch.setattr(_prove, "PARTS", parts)
    code, found = run(tmp_path, capsys, minutes="5")
    assert code == 1
    assert [(f["item"], f["reason"]) for f in found["failures"]] == [("a", "it did not come back within 3 s")]
    assert found["parts"]["steps"]["done"] == 2
    assert log(tmp_path)[-1] == "table one"


def test_what_time_did_not_reach_is_no_failure_and_comes_next_time(tmp_path, stub, capsys, monkeypatch):
    monkeypatch.setattr(_prove, "PARTS", [_prove.Part("checks", 1, 300.0)])
    monkeypatch.setattr(_prove, "LEAST_SECONDS", 0.0)
    stub(checks={"a": {}, "b": {"does": "time.sleep(600)"}, "c": {}})
    code, found = run(tmp_path, capsys, minutes="0.05")
    assert (code, found["failures"]) == (0, [])
    assert found["parts"]["checks"] == {"done": 1, "left": ["b", "c"], "begun": True}
    assert "2 left" in archive(tmp_path)["report.md"]
    stub(checks={"a": {}, "b": {}, "c": {}})
    (tmp_path / "log").unlink()
    _, found = run(tmp_path, capsys)
    assert log(tmp_path) == ["device device", "checks b", "checks c"]
    assert found["parts"]["checks"] == {"done": 3, "left": [], "begun": True}


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_an_interruption_keeps_what_was_measured_and_the_next_run_goes_on(tmp_path, stub, capsys, number):
    # When what came before has arrived.
    journal = "os.path.join(here, 'out', 'journal.jsonl')"
    wait = f'while \'"item": "a"\' not in open({journal}).read(): time.sleep(0.01)'
    stop = f"{wait}\nos.kill(os.getppid(), signal.{number}); time.sleep(60)"
    stub(checks=CHOICES, kernels={"a": {"record": {"rows": [kernel("ours-triton", 1.0)]}}, "b": {"does": stop}})
    before = signal.getsignal(signal.SIGTERM)
    # A shell starts what runs in its background with SIGINT ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, found = run(tmp_path, capsys)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert (code, found["stopped"], found["failures"]) == (130, True, [])
    assert [row["provider"] for row in json.loads(archive(tmp_path)["prove.json"])["rows"]] == ["ours-triton"]
    assert signal.getsignal(signal.SIGTERM) is before
    stub(checks=CHOICES, kernels={"a": {}, "b": {"record": {"rows": [kernel("reference", 2.0)]}}})
    (tmp_path / "log").unlink()
    code, found = run(tmp_path, capsys)
    assert (code, found["stopped"]) == (0, False)
    assert log(tmp_path) == ["device device", "kernels b", *(f"{part} one" for part in PARTS[2:])]
    assert [row["provider"] for row in found["rows"]] == ["ours-triton", "reference"]


def test_again_tries_what_failed(tmp_path, stub, capsys):
    stub(checks={"a": {}, "b": {"record": {"status": "wrong", "reason": "result 0"}}})
    assert run(tmp_path, capsys)[0] == 1
    stub(checks={"a": {}, "b": {}})
    assert run(tmp_path, capsys)[0] == 1
    (tmp_path / "log").unlink()
    code, found = run(tmp_path, capsys, "--again")
    assert (code, found["failures"]) == (0, [])
    assert log(tmp_path) == ["device device", "checks b"]


def test_a_journal_that_was_cut_off(tmp_path, stub, capsys):
    run(tmp_path, capsys)
    journal = tmp_path / "out" / "journal.jsonl"
    text = journal.read_text()
    journal.write_text(text[: text.rindex('{"part": "table"') + 20])
    (tmp_path / "log").unlink()
    code, found = run(tmp_path, capsys)
    assert (code, found["parts"]["table"]["left"]) == (0, [])
    assert log(tmp_path) == ["device device", "table one"]


def test_a_broken_torch_is_said_and_nothing_is_run(tmp_path, stub, look, capsys):
    look.broken["torch"] = "ImportError: libhccl.so"
    look.findings.append(Finding("error", "torch-broken", "torch cannot be imported", "mend it"))
    code, found = run(tmp_path, capsys)
    assert code == 1
    assert not (tmp_path / "log").exists()
    assert "torch cannot be imported" in archive(tmp_path)["report.md"]
    assert found["meta"]["device"]["kind"] == "unknown"


def test_versions_of_two_kinds_do_not_belong_into_one_archive(tmp_path, stub, look, capsys):
    run(tmp_path, capsys)
    look.versions["torch"] = "2.14.0"
    code, found = run(tmp_path, capsys)
    assert code == 2
    assert "other versions (torch 2.13.0 -> 2.14.0)" in found["error"]


def test_what_doctor_says_of_the_device_is_there(tmp_path, stub, look, capsys):
    look.versions["triton-ascend"] = None
    _, found = run(tmp_path, capsys)
    assert [finding["code"] for finding in found["environment"]["findings"]] == ["no-triton"]
    assert "pip install triton-ascend pybind11" in " ".join(archive(tmp_path)["report.md"].split())


def test_two_devices_do_not_belong_into_one_archive(tmp_path, stub, capsys):
    run(tmp_path, capsys)
    device = DEVICE["device"]["device"]["record"]
    stub(device={"device": {"record": {**device, "chip": "NVIDIA H200"}}})
    for _ in range(2):
        code, found = run(tmp_path, capsys)
        assert code == 2
        assert "was measured on Ascend910B4, this is NVIDIA H200" in found["error"]


def test_two_in_one_folder(tmp_path, stub, capsys):
    other = _prove_archive.Journal(tmp_path / "out")
    code, found = run(tmp_path, capsys)
    other.close()
    assert code == 2
    assert "another npu-kernels prove is writing" in found["error"]


@pytest.mark.parametrize("minutes", ["0", "-3", "nan", "100000"])
def test_minutes_that_are_none(tmp_path, capsys, minutes):
    code, found = run(tmp_path, capsys, minutes=minutes)
    assert code == 2
    assert "--minutes must be positive" in found["error"]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    code, found = run(tmp_path, capsys)
    assert code == 2
    assert "cannot be written" in found["error"]


def test_a_disk_that_is_full_half_way(tmp_path, stub, capsys, monkeypatch):
    add = _prove_archive.Journal.add

    def full(journal, record):
        if record.get("part") == "steps":
            raise OSError("no space left on the device")
        add(journal, record)

    monkeypatch.setattr(_prove_archive.Journal, "add", full)
    code, found = run(tmp_path, capsys)
    assert code == 1
    assert {part for part, state in found["parts"].items() if state["done"]} == {"checks", "kernels"}
    assert set(archive(tmp_path)) >= {"prove.json"}


def test_an_archive_that_cannot_be_written_is_said(tmp_path, stub, capsys, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(_prove_archive, "write", full)
    code, found = run(tmp_path, capsys)
    assert (code, found["archive"]) == (1, None)
    assert found["problem"] == (
        "The archive could not be written: nothing could be written to somewhere: No space left on device; make room "
        "there, and the same command packs what is measured"
    )
    assert all(state["done"] for state in found["parts"].values())


def test_the_device_is_named(tmp_path, stub, capsys):
    main(["prove", "--minutes", "1", "--output", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert "Device: Ascend910B4 (npu)\n" in captured.out
    assert "device: device" not in captured.out + captured.err
    assert "finding the device\n" in captured.err


def test_a_device_that_is_not_found_is_one_name_in_the_report(tmp_path, stub, capsys):
    stub(device={"device": {"does": "sys.exit('no driver')"}})
    main(["prove", "--minutes", "1", "--output", str(tmp_path / "out")])
    assert "- device: failed: no driver" in capsys.readouterr().out


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit) as error:
        main(["prove", "--nonsense"])
    assert error.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


def test_what_a_user_has_set_changes_no_result():
    given = {
        "NPU_KERNELS_BACKEND": "torch",
        "TRITON_INTERPRET": "1",
        "ASCEND_LAUNCH_BLOCKING": "1",
        "NPU_KERNELS_RUN": "1",
        "WORLD_SIZE": "8",
        "NPU_KERNELS_CACHE": "y",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "PATH": "x",
    }
    found = _prove.environment_of("checks", given)
    assert {"NPU_KERNELS_BACKEND", "NPU_KERNELS_RUN", "TRITON_INTERPRET", "WORLD_SIZE"}.isdisjoint(found)
    assert found["NPU_KERNELS_CACHE"] == "y"
    assert (found["CUDA_VISIBLE_DEVICES"], found["NPU_KERNELS_STRICT"], found["PATH"]) == ("4", "1", "x")
    # A failure in the queue is that of the op under way; times are not taken like that.
    assert found["ASCEND_LAUNCH_BLOCKING"] == "1"
    assert "ASCEND_LAUNCH_BLOCKING" not in _prove.environment_of("kernels", given)
    assert _prove.environment_of("ranks", given)["CUDA_VISIBLE_DEVICES"] == "4,5"


def _ends(pid: int, seconds: float = 60.0) -> bool:
    """Whether a process that was killed goes: on a busy machine not at once."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            if "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.05)
                continue
        return True
    return False


def test_whatever_a_child_started_ends_with_it():
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('{\"pid\": %d}' % child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    lines = _process.read([sys.executable, "-c", code], 600.0, environment=os.environ)
    pid = next(lines)["pid"]
    lines.close()
    assert _ends(pid)


def test_a_child_that_is_silent_is_ended():
    lines = list(_process.read(["sleep", "600"], 600.0, environment=os.environ, silence=1.0))
    assert lines == [{"ended": "it did not come back within 1 s", "why": "silent"}]


def test_a_child_that_does_not_end_before_the_time_is_over_is_out_of_time():
    code = "import os, time; os.close(1); time.sleep(600)"
    lines = list(_process.read([sys.executable, "-c", code], 2.0, environment=os.environ, silence=60.0))
    assert lines == [{"ended": "it was not done after 2 s", "why": "out of time"}]


def test_what_is_printed_from_c_breaks_no_line():
    code = (
        "import os; print('a library is imported')\n"
        "from npu_trainer_kernels.cli._process import Lines\n"
        "lines = Lines(); os.write(1, b'a driver says hello\\n'); print('so do I'); lines.write(found=1)\n"
    )
    assert list(_process.read([sys.executable, "-c", code], 60.0, environment=os.environ)) == [{"found": 1}]


# --------------------------------------------------------------------------------------------------------------- report
LOSING = {
    "checks": CHOICES,
    "kernels": {
        "a": {"record": {"rows": [kernel("ours-triton", 2.0, extra_bytes=9 << 20), kernel("reference", 1.5),
                                  kernel("ours-triton", 2.0, "forward"), kernel("reference", 1.0, "forward"),
                                  kernel("ours-vendor", 1.0), kernel("ours-torch", 2.5)]}},
        "b/reference": {"record": {"status": "failed", "reason": "OutOfMemoryError: no room", "rows": []}},
    },
    "steps": {"a": {"record": {"rows": [step("plain", 100.0, 2.0), step("flag", 120.0, 3.0)]}}},
    "table": {"swiglu": {"record": {"outcomes": [{
        "shape": "N=64 I=16", "tokens": 64, "dtype": "bfloat16", "problems": {}, "tiles": [], "winner": "plain",
        "times": {"triton": milliseconds(3.0), "plain": milliseconds(2.0)},
    }]}}},
}  # fmt: skip


def test_where_we_lose_is_printed(tmp_path, stub, capsys):
    stub(**LOSING)
    code, found = run(tmp_path, capsys)
    # Losing is no failure, and plain PyTorch out of memory is none of ours.
    assert (code, found["failures"]) == (0, [])
    assert found["losses"] == [
        "a step of sft-trainer llama 4x16: 120 ms against 100 (1.20 x) plain",
        "a step of sft-trainer llama 4x16: 3.00 GiB, plain 2.00",
        "swiglu N=8 I=16 bfloat16, triton and eager: forward 2 ms against 1 (2.00 x), both 2 ms against 1.5 (1.33 x)",
        "swiglu N=8 I=16 bfloat16, triton and vendor: both 2 ms against 1 (2.00 x)",
        "swiglu N=8 I=16 bfloat16: triton needs 9.0 MiB, eager 0.0",
        "swiglu N=64 I=16 bfloat16, triton and eager: both 3 ms against 2 (1.50 x)",
    ]
    assert found["losses_unused"] == []
    assert main(["prove", "--minutes", "1", "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "## Where we lose\n\n- a step of sft-trainer llama 4x16: 120 ms against 100 (1.20\n  x) plain\n" in out
    assert "prove-ascend910b4.zip" in out


@pytest.mark.parametrize(("both", "lost"), [(3.1, 0), (3.6, 1)])
def test_of_the_head_both_ways_count(tmp_path, stub, capsys, both, lost):
    """Its gradient may be formed in forward, and then backward is next to nothing."""
    head = {"op": "linear_cross_entropy", "shape": "BT=8 H=4 V=9", "sizes": {"BT": 8, "H": 4, "V": 9}}
    chosen = {"linear_cross_entropy": {"backend": "torch", "reason": "so", "plain": None}}
    times = {"forward": (3.0, 1.0), "backward": (0.1, 2.5), "both": (both, 3.5)}
    rows = [kernel(who, ms, mode, **head) for mode, of_mode in times.items()
            for who, ms in zip(("ours-torch", "reference"), of_mode, strict=True)]  # fmt: skip
    stub(checks={"choices": {"record": {"choices": chosen}}}, kernels={"a": {"record": {"rows": rows}}})
    assert len(run(tmp_path, capsys)[1]["losses"]) == lost


def test_where_models_keep_their_own_code_is_said_apart(tmp_path, stub, capsys):
    kept = {"choices": {"record": {"choices": {"swiglu": {"backend": "triton", "reason": "so", "plain": "as fast"}}}}}
    stub(**{**LOSING, "checks": kept})
    _, found = run(tmp_path, capsys)
    assert [line.split()[0] for line in found["losses"]] == ["a", "a"]
    assert [line.split()[0] for line in found["losses_unused"]] == ["swiglu"] * 4
    report = archive(tmp_path)["report.md"]
    assert report.index("## Where we lose\n") < report.index("## Where we would lose, and are not used\n")


def test_the_report_is_legible_on_a_phone(tmp_path, stub, capsys):
    stub(
        checks=LOSING["checks"], kernels=LOSING["kernels"], steps=LOSING["steps"],
        convergence={"sft": {"record": {
            "steps": 2, "losses": {"with": [2.0, 1.0], "without": [2.0, 1.0]}, "status": "wrong", "reason": "loss: inf",
            "checks": [{"name": "loss", "noise_floors": float("inf"), "allowed": 3.0}]}}},
        ranks={"two": {"record": {"status": "absent", "reason": "there is one npu device " * 9, "rows": []}}},
        table={"swiglu": {"record": {"machine": machine("swiglu", "torch")}}},
    )  # fmt: skip
    code, _ = run(tmp_path, capsys)
    assert code == 1
    report = archive(tmp_path)["report.md"]
    assert {line for line in report.splitlines() if len(line) > _prove_report.WIDTH} == set()
    for said in (
        "NOT the same", "there is one npu device", "two ranks: 0 done, 1 not possible here", "sources abc", "triton*",
        "swiglu: torch (torch 1 ms, eager 2;", "vendor",
    ):  # fmt: skip
        assert said in report


# --------------------------------------------------------------------------------------------------- what it is read by
def machine(op: str, backend: str) -> dict:
    entry = tuned.Entry(backend, 1.0, 2.0, False, "bfloat16", (("I", 16),), (8, 64))
    return tuned.machine_of({op: [entry]}, {}).as_json()


def test_the_table_is_the_one_that_tune_would_write(tmp_path, stub, capsys, monkeypatch):
    stub(table={op: {"record": {"machine": machine(op, "torch")}} for op in ("swiglu", "rope")})
    run(tmp_path, capsys)
    monkeypatch.setenv("NPU_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NPU_KERNELS_TUNED")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tuned.json").write_text(archive(tmp_path)["tuned.json"])
    tuned.forget()
    found = tuned.machine("Ascend910B4")
    tuned.forget()
    assert found is not None
    assert set(found.ops) == {"swiglu", "rope"}
    assert found.at("swiglu", "bfloat16", 32, (16,)).backend == "torch"


def test_the_archives_rows_are_a_results_file(tmp_path, stub, capsys):
    stub(**LOSING)
    run(tmp_path, capsys)
    (tmp_path / "proved.json").write_text(archive(tmp_path)["prove.json"])
    meta, rows = results.read(tmp_path / "proved.json")
    assert meta["device"]["kind"] == "npu"
    assert [results.key_of(row) for row in rows][:2] == [
        "ops/swiglu/N=8 I=16/bfloat16/ours-triton/both", "ops/swiglu/N=8 I=16/bfloat16/reference/both",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- the parts themselves
class Said:
    """Lines of a part that runs in this process."""

    def __init__(self) -> None:
        self.lines: list[dict] = []

    def write(self, **line):
        self.lines.append(json.loads(json.dumps(line)))


def do(part: str, done=()) -> dict[str, dict]:
    """What a part records, by item; every one of them was announced and begun."""
    said = Said()
    _prove_worker.PARTS[part](_prove_worker.Items(said, set(done)))
    announced = said.lines[0]["items"]
    records = {line["item"]: line for line in said.lines if "item" in line}
    assert [line["begins"] for line in said.lines if "begins" in line] == list(records)
    assert set(records) == set(announced) - set(done)
    return records


def test_checks_see_a_wrong_backend(monkeypatch):
    monkeypatch.setattr(_prove_worker, "DTYPES", ("float32",))
    monkeypatch.setattr(
        _prove_worker, "of_model", lambda *args: [w for w in descriptions.of_model(*args) if w.op == "rope"]
    )
    monkeypatch.setattr(_tune, "candidates", lambda work, where: ["torch", "vendor"])
    found = do("checks")
    assert {name: r["status"] for name, r in found.items()} == {
        "rope/torch/float32": "ok", "rope/vendor/float32": "absent", "choices": "ok",
    }  # fmt: skip
    assert "it runs on Ascend NPUs" in found["rope/vendor/float32"]["reason"]
    assert found["choices"]["choices"]["rope"]["backend"] == "torch"
    assert next(iter(found)) == "choices"
    monkeypatch.setattr(_prove_worker, "check", lambda work, where, backend: "result 0: wrong")
    assert do("checks", done=["choices"])["rope/torch/float32"]["status"] == "wrong"


def test_kernels_are_measured_beside_eager(monkeypatch):
    case = cases.OpCase("swiglu", {"N": 16, "I": 24}, "float32")
    monkeypatch.setattr(_prove_worker, "_cases", lambda where: [case])
    found = do("kernels")
    assert {name.rpartition("/")[2]: r["status"] for name, r in found.items()} == {
        "ours-triton": "ok" if os.environ.get("TRITON_INTERPRET") else "absent", "ours-torch": "ok",
        "ours-vendor": "absent", "reference": "ok",
    }  # fmt: skip
    rows = found[f"{case.key}/ours-torch"]["rows"]
    assert [row["mode"] for row in rows] == ["forward", "backward", "both"]
    assert all(row["ms"]["samples"] >= 5 and row["extra_bytes"] >= 0 for row in rows)


@pytest.mark.parametrize(
    ("rows", "status", "reason"),
    [
        ([kernel("ours-triton", 1.0)], "ok", None),
        ([kernel("ours-triton", 1.0, verdict="inaccurate", errors={"out0": 1e-3, "dx": 0.05})], "wrong",
         "inaccurate: dx is off by 0.05 of its norm"),
        ([kernel("ours-triton", 1.0, status="error", reason="ValueError: x")], "failed", "ValueError: x"),
        ([kernel("ours-vendor", 1.0, status="error", reason="ValueError: x")], "absent", "ValueError: x"),
        ([kernel("ours-vendor", 1.0, status="error", reason="RuntimeError: x")], "failed", "RuntimeError: x"),
        ([kernel("ours-triton", 1.0, status="absent", reason="Absent: x")], "absent", "Absent: x"),
    ],
)  # fmt: skip
def test_what_a_row_of_the_benchmark_comes_to(rows, status, reason):
    """What the vendor's operator does not cover is no failure, and everything else that raises is one."""
    assert (_prove_worker._status(rows), _prove_worker._reason(rows)) == (status, reason)


def test_the_table_is_measured(monkeypatch):
    small = descriptions.ModelShapes(hidden=32, intermediate=40, vocabulary=97, heads=2, kv_heads=1, head_dim=16)
    monkeypatch.setattr(_prove_worker, "TIMED", {False: (small, 64)})
    monkeypatch.setattr(_prove_worker, "TABLE", {"swiglu": _prove_worker.TABLE["swiglu"]})
    (found,) = do("table").values()
    (entry,) = tuned.Machine.parse(found["machine"]).ops["swiglu"]
    assert (entry.tokens, entry.sizes) == ((8, 64), (("I", 40),))
    assert {"torch", "plain"} == set(found["outcomes"][0]["times"])


def test_what_needs_trl_says_so_where_there_is_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(_prove_worker._benchmarks("endtoend"), "run", lambda *args: step("plain", 1.0, 1.0))
    found = do("steps")
    assert {name.split("/")[1]: r["status"] for name, r in found.items()} == {
        "sft-trainer": "ok", "grpo-trl": "absent", "dpo-trl": "absent",
    }  # fmt: skip
    assert all("pip install" in r["reason"] for r in found.values() if r["status"] == "absent")


def test_a_training_that_the_kernels_change_is_seen(monkeypatch):
    monkeypatch.setattr(_prove_worker, "CONVERGENCE_STEPS", 3)
    monkeypatch.setattr(_prove_worker, "NOISE_RUNS", 4)
    rest = ["grpo, qwen3, fp32", "dpo, llama, fp32", "sft, gemma3, bf16 autocast"]
    (found,) = do("convergence", done=rest).values()
    assert (found["status"], found["reason"]) == ("ok", None)
    assert len(found["losses"]["with"]) == 3
    record = _prove_worker.record

    def faulty(trainer, held_out, variant):
        if variant.patched:
            next(trainer.model.parameters()).register_hook(lambda gradient: 1.01 * gradient)
        return record(trainer, held_out, variant)

    monkeypatch.setattr(_prove_worker, "record", faulty)
    (found,) = do("convergence", done=rest).values()
    assert found["status"] == "wrong"
    assert "gradient norm" in found["reason"]
