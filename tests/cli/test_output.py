"""Where commands write: with --json stdout holds the result and nothing else, whoever prints."""

import io
import json
import sys
from importlib import metadata

import pytest

from npu_trainer_kernels.cli import _model, main
from npu_trainer_kernels.cli.output import Output, UsageError, new_table


@pytest.mark.parametrize("as_json", [False, True])
def test_stdout_holds_the_result_alone(capsys, as_json):
    with Output(as_json) as output:
        print("a library")
        output.text("[for] people")
        output.result({"number": 1.5, "none": float("nan"), "many": (float("inf"), {"a": 1})})
    captured = capsys.readouterr()
    if as_json:
        assert json.loads(captured.out) == {"number": 1.5, "none": None, "many": [None, {"a": 1}]}
        assert captured.err == "a library\n[for] people\n"
    else:
        assert captured.out == "a library\n[for] people\n"


def test_a_result_that_cannot_be_written_is_said_in_a_line(monkeypatch):
    def full(text):
        raise OSError("planted")

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", full)
    with Output(True) as output, pytest.raises(SystemExit, match="the result could not be written to stdout: planted"):
        output.result({})


def shown(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    table = new_table()
    for column in ("op", "where it was", "remark"):
        table.add_column(column)
    table.add_row("rms_norm", "model.layers.0.input_layernorm", "")
    table.add_row("swiglu", "model.layers.0.mlp", "[fine]")
    with Output(False) as output:
        output.show(table)
        output.paragraph("long words " * 10)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_that_does_not_fit_is_shown_row_by_row(capsys, monkeypatch):
    assert shown(capsys, monkeypatch, 100)[0].split() == ["op", "where", "it", "was", "remark"]
    narrow = shown(capsys, monkeypatch, 45)
    assert narrow[:5] == [
        "rms_norm",
        "  where it was  model.layers.0.input_layernorm",
        "swiglu",
        "  where it was  model.layers.0.mlp",
        "  remark        [fine]",
    ]
    assert narrow[5:7] == ["  " + "long words " * 3 + "long words"] * 2
    monkeypatch.delenv("COLUMNS")
    with Output(False) as output:
        output.paragraph("long words " * 50)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_progress_is_a_line_for_each_step_on_stderr_where_there_is_no_terminal(capsys):
    with Output(False) as output, output.progress(2) as progress:
        for what in ("first", "first", "second [of two]"):
            progress.begin(what)
            if what == "first":
                continue
            progress.advance()
    captured = capsys.readouterr()
    assert captured.err == "[1/2] first\n[1/2] second [of two]\n"
    assert captured.out == ""


def test_progress_is_a_bar_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Output(False) as output, output.progress(2) as progress:
        progress.begin("first")
        progress.advance()
    captured = capsys.readouterr()
    assert "1/2" in captured.err
    assert "[1/2]" not in captured.err
    assert captured.out == ""


def test_ctrl_c_is_said_in_a_line(capsys, monkeypatch):
    def interrupted(args, output):
        raise KeyboardInterrupt

    monkeypatch.setattr("npu_trainer_kernels.cli._doctor.run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "npu-kernels doctor: stopped\n"


def test_the_version(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--version"])
    assert error.value.code == 0
    assert capsys.readouterr().out == f"npu-kernels {metadata.version('npu_trainer_kernels')}\n"


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere", "a/b/c", "nowhere/", "nowhere.json", "~/nowhere"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_a_hub(model):
    with pytest.raises(UsageError, match=f"there is no file or folder '{model}', and it is not a hub id"):
        _model.config_of(model)


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "a-b_c/d.e"])
def test_a_hub_id_may_be_one(model):
    _model._check_path(model, "--model")


def test_what_transformers_refuses_is_said_in_its_own_words_and_in_full(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(UsageError) as error:
        _model.config_of(str(tmp_path))
    assert "hidden_size" in str(error.value)
    assert "expected int, got str (value: 'wide')" in str(error.value).splitlines()[-1]


def test_an_error_is_a_result_too(capsys):
    with Output(True) as output:
        output.fail("no [such] thing")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": "no [such] thing"}
    assert captured.err == "no [such] thing\n"


def test_no_command_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "tune", "compile", "fit", "verify", "bench"])
def test_every_command_has_json_and_says_its_exit_codes(capsys, command):
    with pytest.raises(SystemExit) as error:
        main([command, "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "xit code" in text
