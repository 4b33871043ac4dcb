"""Wrong input to every command: exit code 2, a message that names argument and value, no traceback."""

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_trainer_kernels.cli import _compile, main, make_parser
from tests.cli.test_fit import CONFIG

# Of each command what it needs besides the wrong argument; {model} is a folder with a config, {folder} has the files of
# `files`, below.
NEEDS = {
    "fit": "--model {model} --memory 80",
    "tune": "--model {model}",
    "verify": "--model {model}",
    "doctor": "--no-self-check",
    "bench": "--device cpu --output {folder}/results",
    "prove": "--output {folder}/out",
    "compile": "--model {model}",
    "compare": "",
    "run": "",
}
# By command: (arguments, what the message says, each part of it).
WRONG: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "fit": [
        ("--model {folder}/nowhere", ("--model", "{folder}/nowhere", "name a folder with a config.json")),
        ("--model {folder}/empty", ("--model", "{folder}/empty", "has no config.json; name a folder")),
        ("--model {folder}/nothing.json", ("--model", "nothing.json")),
        ("--model no-such-model", ("--model 'no-such-model'", "there is no such folder here")),
        ("--model {folder}/damaged", ("--model '{folder}/damaged'",)),
        ("--model {folder}/headless", ("--model '{folder}/headless'", "num_attention_heads = 0", "at least 1")),
        ("--model {folder}/negative", ("--model '{folder}/negative'", "num_key_value_heads", "-2")),
        ("--model {folder}/image", ("--model '{folder}/image'", "no language model")),
        ("--memory 80GB", ("--memory", "without a unit, like 80", "80GB")),
        ("--memory 0", ("--memory must be a positive number of GiB; got 0",)),
        ("--memory nan", ("--memory must be a positive number", "nan")),
        ("--memory 1", ("--memory must be more than the 2 GiB that are kept free by default", "--reserve", "got 1")),
        ("--memory 4 --reserve 4", ("--reserve must be at least 0 and less than --memory 4; got 4",)),
        ("--reserve -1", ("--reserve must be at least 0", "got -1")),
        ("--seq 1", ("--seq must be at least 2; got 1",)),
        ("--seq many", ("--seq", "'many'")),
        ("--batch 0", ("--batch must be at least 1; got 0",)),
        ("--devices 0", ("--devices must be at least 1; got 0",)),
        ("--lora -1", ("--lora must be at least 0; got -1",)),
        ("--sharding fsdp2", ("--sharding fsdp2 does nothing on one device", "--devices")),
        ("--sharding fsdp3 --devices 2", ("--sharding", "'fsdp3'", "ddp")),
        ("--trainer ppo", ("--trainer", "'ppo'", "grpo")),
        ("--dtype fp8", ("--dtype", "'fp8'", "bf16")),
        ("--prompt 4", ("--prompt 4 does nothing with --trainer sft", "leave it out")),
        ("--trainer grpo --seq 8 --prompt 9", ("--prompt must be less than --seq 8; got 9",)),
        ("--figure fit.txt", ("--figure must end with .png, .svg, .pdf; got 'fit.txt'",)),
        ("--figure {folder}/nowhere/fit.png", ("--figure must be in a folder that is there", "nowhere/fit.png")),
        ("--nonsense", ("unrecognized arguments: --nonsense",)),
    ],
    "tune": [
        ("--tokens 7", ("--tokens must be at least 8; got 7",)),
        ("--tokens few", ("--tokens", "'few'")),
        ("--dtype int8", ("--dtype", "'int8'", "fp32")),
        ("--model {folder}/empty", ("--model", "{folder}/empty", "has no config.json")),
        ("--model {folder}/sizeless", ("--model '{folder}/sizeless'", "vocab_size")),
    ],
    "verify": [
        ("--steps 0", ("--steps must be at least 1; got 0",)),
        ("--batch-size 0", ("--batch-size must be at least 1; got 0",)),
        ("--sequence-length 1", ("--sequence-length must be at least 2; got 1",)),
        ("--noise-runs 1", ("--noise-runs must be at least 2; got 1",)),
        ("--learning-rate 0", ("--learning-rate must be a positive number; got 0",)),
        ("--learning-rate nan", ("--learning-rate must be a positive number; got nan",)),
        ("--seed -1", ("--seed must be at least 0", "got -1")),
        ("--precision fp8", ("--precision", "'fp8'", "bf16-autocast")),
        ("--capture maybe", ("--capture", "'maybe'", "auto")),
        ("--ops rmsnorm", ("--ops must be a list of", "got ['rmsnorm']; did you mean 'rms_norm'?")),
        ("--backend tritn", ("--backend must be one of", "got 'tritn'; did you mean 'triton'?")),
        ("--backend norm=torch", ("--backend: unknown op 'norm'",)),
        ("--split test", ("--split test does nothing without --dataset; leave it out",)),
        ("--text-column words", ("--text-column words does nothing without --dataset",)),
        ("--dataset {folder}/rows.jsonl --split test", ("--split test does nothing with a file; leave it out",)),
        ("--dataset {folder}/nowhere.csv", ("--dataset must be a file", "{folder}/nowhere.csv")),
        ("--dataset {folder}/rows.jsonl", ("--text-column must be one of words; got 'text'",)),
        ("--model {folder}/nowhere", ("--model", "{folder}/nowhere")),
    ],
    "doctor": [
        ("--timeout 0", ("--timeout must be positive; got 0",)),
        ("--timeout soon", ("--timeout", "'soon'")),
        ("--quick", ("unrecognized arguments: --quick",)),
    ],
    "bench": [
        ("--groups kernels", ("--groups must name ops, end-to-end, scaling; got 'kernels'",)),
        ("--steps 0", ("--steps must be at least 1; got 0",)),
        ("--budget-seconds 0", ("--budget-seconds must be positive; got 0",)),
        ("--only nosuch", ("--only 'nosuch' leaves no row", "--list prints")),
        ("--device fpga9000", ("--device must be cuda, cpu, or with torch_npu npu; got 'fpga9000'",)),
        ("--compare a b c", ("--compare takes one or two files; got 3",)),
        ("--compare {folder}/nowhere.json", ("no such file: {folder}/nowhere.json",)),
        ("--nonsense", ("unrecognized arguments: --nonsense",)),
    ],
    "prove": [
        ("--minutes 0", ("--minutes must be positive", "got 0")),
        ("--minutes 9999", ("--minutes must be positive, and at most a day; got 9999",)),
        ("--minutes soon", ("--minutes", "'soon'")),
        ("--output {folder}/rows.jsonl", ("--output: {folder}/rows.jsonl cannot be written: File exists",
                                          "give it another folder")),
        ("--quick", ("unrecognized arguments: --quick",)),
    ],
    "compile": [
        ("--workers 0", ("--workers must be at least 1; got 0",)),
        ("--target Ascend910B", ("--target must be one of Ascend910B1", "got 'Ascend910B'; did you mean 'Ascend910B")),
        ("--dtype fp64", ("--dtype", "'fp64'", "bf16")),
        ("--target Ascend910B4 --all-targets", ("--all-targets", "not allowed with", "--target")),
        ("--model {folder}/nowhere", ("--model", "{folder}/nowhere")),
        ("--model {folder}/image", ("--model '{folder}/image'", "vocab_size")),
    ],
    "compare": [
        ("", ("the following arguments are required: RUN_A, RUN_B",)),
        ("{folder}/run", ("the following arguments are required: RUN_B",)),
        ("nowhere {folder}/run", ("RUN_A: there is no folder or file 'nowhere'; name the output_dir of a run",)),
        ("{folder}/run {folder}/nowhere", ("RUN_B: there is no folder or file", "trainer_state.json")),
        ("{folder}/run {folder}/empty", ("RUN_B: there is no trainer_state.json in", "--save_strategy steps")),
        ("{folder}/run {folder}/rows.jsonl", ("RUN_B", "rows.jsonl' is no trainer_state.json of the Trainer")),
        ("{folder}/run {folder}/silent", ("has no logged numbers; --logging_steps says how often they are",)),
        ("{folder}/run {folder}/later", ("have logged no quantity at a common step",)),
        ("{folder}/run {folder}/run --noise {folder}/run", ("--noise needs at least 2 runs; got 1",)),
        ("{folder}/run {folder}/run --figure runs.txt", ("--figure must end with .png, .svg, .pdf; got 'runs.txt'",)),
        ("{folder}/run {folder}/run --figure {folder}/no/runs.png", ("--figure must be in a folder that is there",)),
        ("{folder}/run {folder}/run --nonsense", ("unrecognized arguments: --nonsense",)),
    ],
    "run": [
        ("", ("what is to be run is missing", "npu-kernels run [options] [--] COMMAND")),
        ("--print-env trl", ("--print-env runs nothing; leave out 'trl'",)),
        ("--ops rmsnorm trl", ("--ops must be a list of rms_norm", "got ['rmsnorm']; did you mean 'rms_norm'?")),
        ("--ops rope,,swiglu trl", ("--ops must be a list of rms_norm", "got ['rope', '', 'swiglu']")),
        ("--backend npu trl", ("--backend must be one of triton, torch, vendor", "got 'npu'")),
        ("--report ful trl", ("--report must be one of short, full; got 'ful'; did you mean 'full'?",)),
        ("--audit 0 trl", ("--audit must be 'first', 'off' or a positive number of steps; got '0'",)),
        ("--capture maybe trl", ("--capture must be one of auto, on, off; got 'maybe'",)),
        ("--tiled-mlp -1 trl", ("--tiled-mlp must be a number of tokens, or 0 for all at once; got '-1'",)),
        ("--tiled-mlp 1 --ops rope trl", ("--tiled-mlp=1 needs swiglu among ops; got ['rope']",)),
        ("--strict=2 trl", ("--strict", "'2'")),
        ("--nonsense trl", ("unrecognized arguments: --nonsense",)),
        ("python -I train.py", ("python -I: Python ignores PYTHONPATH", "leave -I out")),
    ],
}  # fmt: skip
CASES = [(command, arguments, said) for command, cases in WRONG.items() for arguments, said in cases]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty").mkdir()
    (folder / "rows.jsonl").write_text('{"words": "some text"}\n' * 9)
    (folder / "rows.csv").write_text("words\nsome text\n")
    configs = {
        "model": CONFIG,
        "headless": {**CONFIG, "num_attention_heads": 0},
        "negative": {**CONFIG, "num_key_value_heads": -2},
        "sizeless": {**CONFIG, "vocab_size": 0},
        "image": {"model_type": "vit"},
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    logs = {"run": {"step": 1, "loss": 1.0}, "later": {"step": 9, "loss": 1.0}, "silent": {"step": 1, "epoch": 1.0}}
    for name, entry in logs.items():
        (folder / name).mkdir()
        (folder / name / "trainer_state.json").write_text(json.dumps({"log_history": [entry]}))
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text("{")
    return folder


@pytest.fixture
def environment(monkeypatch, tmp_path) -> Iterator[None]:
    """The environment of a user who has set nothing, whatever the command puts into it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("NPU_KERNELS_")}
    monkeypatch.setattr(os, "environ", {**kept, "NPU_KERNELS_CACHE": str(tmp_path), "COLUMNS": "500"})
    # The compiler is not what is tested.
    monkeypatch.setattr(_compile, "_ready", lambda: None)


def said_by(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[object, str, str]:
    try:
        code: object = main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, " ".join(captured.err.split())


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("command", "arguments", "said"), CASES, ids=[f"{c} {a}" for c, a, _ in CASES])
def test_wrong_input_is_exit_code_2_and_a_message(files, capsys, command, arguments, said):
    names = {"folder": files, "model": files / "model"}
    # argparse takes the last of an option that is given twice.
    needs = f" {NEEDS[command]} " if NEEDS[command] else ""
    given = shlex.split(f"{command} {needs}{arguments}".format(**names))
    code, out, message = said_by(capsys, given)
    assert code == 2, message
    for part in said:
        assert part.format(**names) in message
    assert "Traceback" not in message
    assert out == ""


def test_every_command_is_here():
    (commands,) = (action.choices for action in make_parser()._actions if action.dest == "command")
    assert sorted(WRONG) == sorted(NEEDS) == sorted(commands)
    assert len(CASES) >= 60


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("command", ["fit", "compile", "verify"])
def test_without_a_model(capsys, command):
    code, _, message = said_by(capsys, [command])
    assert code == 2
    assert "the following arguments are required: --model" in message


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("command", ["fit --memory 1", "tune --tokens 1", "verify --steps 0", "doctor --timeout 0",
                                     "prove --minutes 0", "compile --workers 0"])  # fmt: skip
def test_an_error_is_a_json_object_too(files, capsys, command):
    name, *options = command.split()
    model = [] if name in ("doctor", "prove") else ["--model", str(files / "model")]
    code, out, message = said_by(capsys, [name, *model, *options, "--json"])
    assert code == 2
    assert json.loads(out)["error"] == message


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense"]], ids=str)
def test_no_command_that_there_is(capsys, arguments):
    code, _, message = said_by(capsys, arguments)
    assert code == 2
    assert "COMMAND" in message
    assert all(word in message for word in arguments)
