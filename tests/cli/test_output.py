"""Where commands write: with --json stdout holds the result and nothing else, whoever prints."""

import json

import pytest

from npu_trainer_kernels.cli import main
from npu_trainer_kernels.cli._output import Output


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


@pytest.mark.parametrize("command", ["doctor", "tune", "compile", "verify", "bench"])
def test_every_command_has_json_and_says_its_exit_codes(capsys, command):
    with pytest.raises(SystemExit) as error:
        main([command, "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "xit code" in text
