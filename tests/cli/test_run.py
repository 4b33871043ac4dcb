"""`npu-kernels run` around real processes: what the command is, how it ends, and what every Python in it does."""

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from npu_trainer_kernels import NpuKernelsArguments
from npu_trainer_kernels.cli import _run, main

ROOT = Path(__file__).resolve().parents[2]
FOLDER = str(ROOT / "npu_trainer_kernels" / "on_path")
# A transformers that is imported in no time: what a Trainer reads when it is built, and nothing else.
TRANSFORMERS = (
    "DEFAULT_CALLBACKS = []\nclass Trainer:\n    def __init__(self):\n        print('callbacks', DEFAULT_CALLBACKS)\n"
)
NONE = (
    "npu-kernels run: no Trainer of transformers was built, so that no kernels were used: if the command failed, its "
    "own message is above; a training loop without a Trainer needs apply_npu_kernels(model)\n"
)
LOST = (
    f"{NONE[:-1]}; if a process that it has started trained, the environment did not reach that process "
    "(PYTHONPATH, NPU_KERNELS_RUN): it was cleared, or Python had the option -I, -E or -S\n"
)


def clean() -> dict[str, str]:
    """The environment of a user who has set nothing."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NPU_KERNELS_")}
    return {**environment, "PYTHONPATH": str(ROOT)}


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "npu_trainer_kernels", "run", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**clean(), **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`npu-kernels run python -c CODE`."""
    return run(*arguments, sys.executable, "-c", code, **environment)


@pytest.fixture
def fake(tmp_path):
    """A folder with a transformers for a PYTHONPATH."""
    (tmp_path / "fake" / "transformers").mkdir(parents=True)
    (tmp_path / "fake" / "transformers" / "__init__.py").touch()
    (tmp_path / "fake" / "transformers" / "trainer.py").write_text(TRANSFORMERS)
    return tmp_path / "fake"


# ---------------------------------------------------------------------------------------------------------------------
# The command is the user's
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "ours", "command"),
    [
        ("trl sft --config a.yaml", "", "trl sft --config a.yaml"),
        ("--ops rms_norm,rope trl --ops x", "--ops rms_norm,rope", "trl --ops x"),
        ("--ops=rope --strict -- --odd name", "--ops=rope --strict", "--odd name"),
        ("--strict -m package.train --lr 1 -- x", "--strict", "-m package.train --lr 1 -- x"),
        ("-- train.py -- a", "", "train.py -- a"),
        ("--print-env --backend torch", "--print-env --backend torch", ""),
        ("", "", ""),
    ],
)
def test_our_options_end_where_the_command_begins(arguments, ours, command):
    assert _run.split(arguments.split()) == (ours.split(), command.split())


def test_every_option_of_the_flag_is_one_of_the_launcher():
    names = {field.name.upper() for field in fields(NpuKernelsArguments)}
    assert set(_run.OPTIONS) == names - {"USE_NPU_KERNELS"}


def test_scripts_and_modules_run_under_this_python(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    for command in (["train.py"], ["-m", "train"], [sys.executable, "train.py"]):
        done = run(*command, "--ops", "a b", cwd=tmp_path)
        assert done.stdout == f"{sys.executable} ['--ops', 'a b']\n", done.stderr


def test_the_process_itself_becomes_the_command():
    process = subprocess.Popen(
        [sys.executable, "-m", "npu_trainer_kernels", "run", "sh", "-c", "echo $$; exit 7"],
        env=clean(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    output, _ = process.communicate(timeout=60)
    assert (int(output), process.returncode) == (process.pid, 7)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_are_the_commands(number):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(9))\n"
        "print(1, flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-m", "npu_trainer_kernels", "run", sys.executable, "-c", code]
    process = subprocess.Popen(command, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == (9 if number == signal.SIGINT else -number)


def test_what_cannot_be_executed_ends_as_in_a_shell(tmp_path):
    (tmp_path / "data").write_text("no program")
    missing, forbidden = run("no-such-command", "--config", "x"), run(str(tmp_path / "data"))
    assert (missing.returncode, forbidden.returncode) == (127, 126)
    assert missing.stderr.startswith("npu-kernels run: no-such-command: No such file or directory; is it installed")
    assert f"{tmp_path / 'data'}: Permission denied; a script that is not executable runs by" in forbidden.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "what is to be run is missing"),
        (["--print-env", "trl"], {}, "--print-env runs nothing; leave out 'trl'"),
        (["--ops", "rms_norm,foo", "true"], {}, "--ops must be a list of rms_norm"),
        (["--ops", "rmsnorm", "true"], {}, "got ['rmsnorm']; did you mean 'rms_norm'?"),
        (["true"], {"NPU_KERNELS_OPS": "ropes"}, "NPU_KERNELS_OPS must be a list of rms_norm"),
        (
            ["--tiled-mlp", "many", "true"],
            {},
            "--tiled-mlp must be a number of tokens, or 0 for all at once; got 'many'",
        ),
        (["--tiled-mlp", "8192", "--ops", "rope", "true"], {}, "--tiled-mlp=8192 needs swiglu among ops; got ['rope']"),
        (["--capture", "maybe", "true"], {}, "--capture must be one of auto, on, off; got 'maybe'"),
        (["--backend", "rmsnorm=torch", "true"], {}, "--backend: unknown op 'rmsnorm'; the ops are rms_norm"),
        (["--backend", "fast", "true"], {}, "--backend must be one of"),
        (["true"], {"NPU_KERNELS_BACKEND": "fast"}, "NPU_KERNELS_BACKEND must be one of"),
        (["--report", "long", "true"], {}, "--report must be one of short, full; got 'long'"),
        (["--audit", "never", "true"], {}, "--audit must be 'first', 'off' or a positive number of steps; got 'never'"),
        (["true"], {"NPU_KERNELS_AUDIT": "0"}, "NPU_KERNELS_AUDIT must be 'first', 'off' or a positive number"),
        (["--nonsense", "true"], {}, "unrecognized arguments: --nonsense"),
        (["true"], {"NPU_KERNELS_RUN": "perhaps"}, "NPU_KERNELS_RUN must be one of"),
        (["true"], {"NPU_KERNELS_WARM_UP": "x"}, "NPU_KERNELS_WARM_UP must be one of"),
    ],
)
def test_wrong_usage_is_refused_before_the_command_runs(capsys, monkeypatch, arguments, environment, message):
    for name in [name for name in os.environ if name.startswith("NPU_KERNELS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # What is checked is put into the environment first: for the length of this test.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    try:
        code = main(["run", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "options",
    [
        ["run", "--ops", "rmsnorm", "true"], ["run", "--report", "fulll", "true"], ["run", "--audit", "x", "true"],
        ["run", "--capture", "x", "true"], ["run", "--tiled-mlp", "x", "true"], ["run", "--backend", "x", "true"],
        ["run", "python", "-I", "x.py"], ["--help"], ["run", "--help"], ["fit", "--help"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_nothing_heavy_is_imported_to_refuse_or_to_help(monkeypatch, capsys, options):
    """What is imported is looked at, not the time: all imports of a process of its own were light, and here they are
    made to fail."""
    for name in ("torch", "transformers", "numpy", "trl", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "npu_trainer_kernels.arguments", raising=False)
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("NPU_KERNELS_")})
    try:
        code = main(options)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert (code, bool(captured.err)) == ((0, False) if "--help" in options else (2, True))
    assert "Traceback" not in captured.err


def test_an_option_that_does_not_exist_shows_the_usage_of_run(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--nonsense"])
    assert capsys.readouterr().err.startswith("usage: npu-kernels run [options]")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -I train.py", "python -I: Python ignores PYTHONPATH"),
        ("python3.11 -u -E train.py", "python3.11 -E: Python ignores PYTHONPATH"),
        ("/usr/bin/python3 -S -m train", "python3 -S: Python reads no sitecustomize"),
        ("python -uIm train", "python -I: Python ignores PYTHONPATH"),
        ("python -W ignore -X dev -E train.py", "python -E: Python ignores PYTHONPATH"),
        ("python --check-hash-based-pycs always -I train.py", "python -I: Python ignores"),
        ("env LR=1 python -I train.py", "python -I: Python ignores PYTHONPATH"),
        ("env -i python train.py", "env -i starts the command without PYTHONPATH"),
        ("env --ignore-environment python train.py", "env --ignore-environment starts the command without"),
        ("env -u PYTHONPATH python train.py", "env -u PYTHONPATH starts the command without PYTHONPATH"),
        ("env --unset=NPU_KERNELS_RUN python train.py", "env --unset=NPU_KERNELS_RUN starts the command without"),
        ("env PYTHONPATH=/src python train.py", "env PYTHONPATH=/src starts the command without"),
        ("{folder}/isolated sft", "the first line of {folder}/isolated has python3 -I: Python ignores PYTHONPATH"),
        ("{folder}/by-env sft", "the first line of {folder}/by-env has python3 -E: Python ignores PYTHONPATH"),
    ],
)
def test_a_command_that_the_kernels_cannot_reach_is_refused(tmp_path, monkeypatch, capsys, command, said):
    for name, first in (("isolated", "#!/usr/bin/python3 -I"), ("by-env", "#!/usr/bin/env -S python3 -E")):
        (tmp_path / name).write_text(f"{first}\nprint(1)\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("NPU_KERNELS_RUN", raising=False)
    monkeypatch.setattr(_run, "_execute", pytest.fail)
    assert main(["run", *command.format(folder=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert said.format(folder=tmp_path) in error
    assert "leave" in error or "put `npu-kernels run` behind it" in error


@pytest.mark.parametrize(
    "command",
    [
        "python -P train.py", "python -s -u train.py -I", "python -m train -E", "python -c pass -S", "python - -I",
        "python", "python -WI train.py", "python -X I train.py", "train.py -I", "-m train -I", "trl sft -I",
        "env LR=1 -u HOME python train.py -I", "env", "env -u",
        "env NPU_KERNELS_RUN=0 python train.py", "no-such-command -I", "{folder}", "{folder}/binary -I",
    ],
)  # fmt: skip
def test_a_command_that_the_kernels_reach_is_run(tmp_path, monkeypatch, command):
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff\x00")
    (tmp_path / "binary").chmod(0o755)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("NPU_KERNELS_RUN", raising=False)
    done = []

    def execute(command):
        done.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(_run, "_execute", execute)
    given = command.format(folder=tmp_path).split()
    with pytest.raises(SystemExit):
        main(["run", *given])
    assert done == [given]


def test_without_the_kernels_any_command_is_run():
    done = run(sys.executable, "-I", "-c", "print(1)", NPU_KERNELS_RUN="0")
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_python_without_an_unsafe_path_gets_the_kernels():
    done = run(sys.executable, "-P", "-s", "-c", "import sitecustomize; print(sitecustomize.__file__)")
    assert done.stdout == f"{FOLDER}/sitecustomize.py\n", done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# The environment
# ---------------------------------------------------------------------------------------------------------------------


def test_python_path_is_put_in_front_of_and_kept():
    code = "import os; print(os.environ['PYTHONPATH'])"
    for before in (f"{ROOT}:/toolkit/python", f"{FOLDER}:{ROOT}:/toolkit/python", f"/toolkit::{ROOT}"):
        kept = before.removeprefix(f"{FOLDER}:")
        assert python(code, PYTHONPATH=before).stdout == f"{FOLDER}:{kept}\n"


def test_options_are_variables():
    options = ["--ops", "rope,swiglu", "--backend", "torch", "--strict", "--no-warm-up", "--report", "full"]
    options += ["--no-balance", "--tiled-mlp", "8192", "--audit", "off"]
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('NPU_KERNELS_')}))"
    found = json.loads(python(code, *options).stdout)
    assert found.pop("NPU_KERNELS_RUN_PID").isdigit()
    assert Path(found.pop("NPU_KERNELS_RUN_SEEN")).parent.is_dir()
    assert found == {
        "NPU_KERNELS_RUN": "1", "NPU_KERNELS_OPS": "rope,swiglu", "NPU_KERNELS_BACKEND": "torch",
        "NPU_KERNELS_STRICT": "1", "NPU_KERNELS_WARM_UP": "0", "NPU_KERNELS_REPORT": "full",
        "NPU_KERNELS_BALANCE": "0",
        "NPU_KERNELS_TILED_MLP": "8192", "NPU_KERNELS_AUDIT": "off",
    }  # fmt: skip


def test_print_env_is_for_a_shell(fake):
    """For those who cannot put a word in front of their command."""
    printed = run("--print-env", "--ops", "rope", PYTHONPATH=f"{ROOT}:/with space").stdout
    script = f'{printed}{shlex.quote(sys.executable)} -c "import os; print(os.environ)"'
    done = subprocess.run(["sh", "-c", script], env=clean(), capture_output=True, text=True, check=True)
    for entry in (
        f"'PYTHONPATH': '{FOLDER}:{ROOT}:/with space'",
        "'NPU_KERNELS_RUN': '1'",
        "'NPU_KERNELS_OPS': 'rope'",
    ):
        assert entry in done.stdout
    # Nobody has asked for kernels in this command in particular: a tool that is no training says nothing.
    assert done.stderr == ""


@pytest.mark.parametrize("value", ["0", "off"])
def test_the_switch_runs_the_command_as_it_is(value):
    done = python("import os; print(os.environ['PYTHONPATH'])", NPU_KERNELS_RUN=value)
    assert done.stdout == f"{ROOT}\n"
    assert done.stderr == f"npu-kernels run: NPU_KERNELS_RUN={value}, so the command runs without the kernels\n"


# ---------------------------------------------------------------------------------------------------------------------
# Every Python of the command
# ---------------------------------------------------------------------------------------------------------------------


def test_starting_python_imports_nothing_heavy_and_changes_nothing():
    code = "import sys; print({'torch', 'transformers', 'numpy', 'npu_trainer_kernels.run'} & set(sys.modules))"
    assert python(code).stdout == "set()\n"


def test_the_next_sitecustomize_runs_first_and_keeps_its_name(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; print('next', len(sys.meta_path)); mark = 5")
    code = "import sys, sitecustomize; print(sitecustomize.mark, len(sys.meta_path), sitecustomize.__file__)"
    environment = {**clean(), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    plain = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, second, *rest = plain.stdout.split()
    done = python(code, PYTHONPATH=f"{ROOT}:{tmp_path}")
    # That of `npu-kernels` itself, then that of the command, with one finder more after it than without us.
    assert done.stdout == f"{first} {second}\n" * 2 + " ".join([rest[0], str(int(rest[1]) + 1), *rest[2:]]) + "\n"


def test_a_next_sitecustomize_that_fails_is_reported_by_python_and_ours_works(tmp_path, fake):
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('planted')")
    done = python("import transformers.trainer as t; t.Trainer()", PYTHONPATH=f"{ROOT}:{fake}:{tmp_path}")
    assert done.returncode == 0
    assert "RuntimeError: planted" in done.stderr
    assert "trains without the kernels" in done.stderr  # this transformers is none


def test_without_a_trainer_it_says_so_once_at_the_end():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)']); print(2)"
    done = python(code)
    assert (done.stdout, done.stderr) == ("1\n2\n", LOST)


@pytest.mark.parametrize("given", ["env={}", "env=None, args=[sys.executable, '-I', '-c', 'pass']"])
def test_a_process_that_the_environment_does_not_reach_is_named_as_a_cause(given):
    call = given if "args" in given else f"args=[sys.executable, '-c', 'pass'], {given}"
    assert python(f"import subprocess, sys; subprocess.run({call})").stderr == LOST
    assert python("print(1)").stderr == NONE


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_a_command_that_shows_its_help_is_not_blamed(option):
    assert run(sys.executable, "-c", "print(1)", option).stderr == ""


def test_a_failing_command_without_a_trainer_fails_as_before():
    done = python("raise SystemExit(3)")
    assert (done.returncode, done.stderr) == (3, NONE)


def test_a_fork_says_nothing(tmp_path):
    code = "import os, sys\nif os.fork() == 0: sys.exit(0)\nos.wait()"
    assert python(code).stderr == LOST


def test_tools_of_a_shell_script_say_nothing():
    done = run("sh", "-c", f"{sys.executable} -c 'print(1)'; {sys.executable} -c 'print(2)'")
    assert (done.stdout, done.stderr) == ("1\n2\n", "")


STAND_IN = """
def put_into(module, built):
    original = module.Trainer.__init__
    def __init__(self):
        built()
        original(self)
    module.Trainer.__init__ = __init__
    print('put into', module.__name__)
"""


@pytest.fixture
def stand_in(fake):
    """In place of this package: what the sitecustomize calls, without torch."""
    (fake / "npu_trainer_kernels" / "support").mkdir(parents=True)
    for name, text in (
        ("__init__", ""),
        ("run", STAND_IN),
        ("support/__init__", ""),
        ("support/switch", (ROOT / "npu_trainer_kernels/support/switch.py").read_text()),
    ):
        (fake / "npu_trainer_kernels" / f"{name}.py").write_text(text)
    return f"{FOLDER}:{fake}"


def with_sitecustomize(code: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command with the variables set by hand."""
    environment = {**clean(), "PYTHONPATH": path, "NPU_KERNELS_RUN": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


BUILD = "from transformers.trainer import Trainer; Trainer()"


def test_put_in_when_the_trainer_is_imported_in_whatever_process(stand_in):
    code = f"import subprocess, sys; print(0, flush=True); subprocess.run([sys.executable, '-c', {BUILD!r}])"
    done = with_sitecustomize(code, stand_in)
    assert done.stdout == "0\nput into transformers.trainer\ncallbacks []\n", done.stderr
    assert done.stderr == ""


def test_a_loader_is_left_as_it_was(stand_in):
    code = (
        "import sys, inspect, transformers.trainer as t\n"
        "assert vars(t.__loader__).keys() == {'name', 'path'}, vars(t.__loader__)\n"
        "assert 'DEFAULT_CALLBACKS' in inspect.getsource(t)"
    )
    done = with_sitecustomize(code, stand_in)
    assert done.returncode == 0, done.stderr


def test_imported_but_never_built_is_said_also_where_the_command_is_not_ours_to_name(stand_in):
    assert with_sitecustomize("import transformers.trainer", stand_in).stderr == NONE
    assert with_sitecustomize("import transformers", stand_in).stderr == ""


def test_no_file_is_left_behind(stand_in, tmp_path):
    (tmp_path / "tmp").mkdir()
    with_sitecustomize(BUILD, stand_in, TMPDIR=str(tmp_path / "tmp"))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("value", ["", "0", "no"])
def test_variables_by_hand_are_switched_off(stand_in, value):
    done = with_sitecustomize(BUILD, stand_in, NPU_KERNELS_RUN=value)
    assert (done.stdout, done.stderr) == ("callbacks []\n", "")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "from npu_trainer_kernels import cli; assert cli.main(['tune', '--tokens', '0']) == 2",
            "npu-kernels tune: --tokens must be at least 8; got 0\n",
        ),
        ("import benchmarks", ""),
    ],
)
def test_our_other_commands_say_themselves_which_trainer_has_the_kernels(fake, code, error):
    """In a shell with the variables set `verify` and `bench` would compare the kernels with themselves."""
    done = with_sitecustomize(f"{code}; {BUILD}", f"{FOLDER}:{ROOT}:{fake}")
    assert (done.stdout, done.stderr) == ("callbacks []\n", error)


def test_a_switch_that_is_neither_is_a_warning(stand_in):
    done = with_sitecustomize(BUILD, stand_in, NPU_KERNELS_RUN="perhaps")
    assert (done.returncode, done.stdout) == (0, "callbacks []\n")
    assert done.stderr.count("\n") == 1
    assert "NPU_KERNELS_RUN must be one of" in done.stderr


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "AttributeError"])
def test_a_python_that_cannot_use_the_package_trains_with_one_warning(fake, error):
    (fake / "npu_trainer_kernels" / "support").mkdir(parents=True)
    (fake / "npu_trainer_kernels" / "__init__.py").touch()
    (fake / "npu_trainer_kernels" / "run.py").write_text(f"raise {error}('planted')")
    done = with_sitecustomize(BUILD, f"{FOLDER}:{fake}")
    assert (done.returncode, done.stdout) == (0, "callbacks []\n")
    assert done.stderr == (
        "npu-kernels run: trains without the kernels: npu_trainer_kernels cannot be used by "
        f"{sys.executable} ({error}: planted)\n"
    )


def test_a_trainer_that_cannot_be_imported_fails_as_without(stand_in, fake):
    (fake / "transformers" / "trainer.py").write_text("import no_such_module")
    done = with_sitecustomize("import transformers.trainer", stand_in)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
    assert "npu-kernels" not in done.stderr


def test_start_up_costs_little():
    """Nothing is timed here: what is imported is counted."""
    code = "import sys; print(len([name for name in sys.modules if name.startswith('npu_trainer_kernels')]))"
    assert int(python(code).stdout) == 3  # the package and support, which load nothing, and support.switch
