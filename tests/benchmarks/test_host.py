"""Instructions per call: what is counted is the way to a GPU's kernel, and a machine that cannot count says so."""

import inspect
import json
from collections import Counter

import pytest

from benchmarks import host, instructions
from npu_trainer_kernels.ops.launch import use_launcher
from npu_trainer_kernels.patching import handle_of


class Calls:
    """In the place of instructions, which take long to count: one for each call."""

    name, calls = "calls", 3

    def count(self, function):
        return function(), 1000


def test_every_call_launches_what_a_gpu_would_be_given():
    launched: Counter[str] = Counter()

    def launcher(kernel, grid, args, constexprs):
        launched[kernel.__name__] += 1

    with host.gpu_that_does_nothing(), use_launcher(launcher):
        row = host.measure(host.CASES["rms_norm"], Calls(), calls=3)
    assert set(row) == {"forward", "backward"}
    assert launched == dict.fromkeys(("_forward_kernel", "_backward_kernel", "_sum_kernel"), 3 + host.WARM_UP)


def test_a_captured_body_is_replayed():
    with host.gpu_that_does_nothing(), use_launcher(lambda *_: None):
        call = host.CASES["two layers, captured"]()
        host.measure(lambda: call, Calls(), calls=3)
        model = inspect.getclosurevars(call).nonlocals["model"]
        assert handle_of(model).report().capture.as_dict()["replayed"] == 2 + host.WARM_UP
    assert handle_of(host._model(True)).report().capture is None


def test_figures_say_what_counted_and_how_many_calls(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(instructions.COUNTERS, "steps", Calls)
    file = tmp_path / "host.json"
    chosen = ["--only", "rms_norm", "--only", "swi*", "--counter", "steps", "--output", str(file)]
    with use_launcher(lambda *_: None):
        assert host.main(chosen) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["rows"] == {name: {"forward": 1.0, "backward": 1.0} for name in ("rms_norm", "swiglu")}
    assert (content["meta"]["counter"], content["meta"]["calls"]) == ("calls", 3)
    assert "counted by calls, calls per case: 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--only", "softmax"], "--only softmax matches none of: rms_norm, "),
        (["--calls", "0"], "--calls 0 is not at least 1"),
    ],
)
def test_a_wrong_value_is_named(given, said, capsys):
    with pytest.raises(SystemExit):
        host.main(given)
    assert said in capsys.readouterr().err


def test_a_machine_that_counts_nothing_says_so(monkeypatch, capsys):
    monkeypatch.setattr(instructions.platform, "machine", lambda: "riscv64")
    with pytest.raises(SystemExit):
        host.main([])
    where = f"are known on {instructions.sys.platform} riscv64"
    assert f"no hardware counters {where}; no single steps {where}" in capsys.readouterr().err
