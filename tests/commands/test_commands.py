"""Every command of the pages and of `--help`, run as it is written on a machine that has what the page says."""

import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.commands.environment import Environment, checkout, distributions
from tests.commands.pages import ROOT, commands
from tests.commands.table import ELSEWHERE, LOGGED, RUN, SMALLER, USER, as_run

sys.path.append(str(ROOT / "examples"))
from _common import byte_level_tokenizer

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What the pages ask for by name: `".[trl]"`, Triton for `fit`, PEFT for adapters, matplotlib for figures.
EXTRAS = [*PROJECT["optional-dependencies"]["trl"], "triton", "peft", "matplotlib"]
NAMED = [command for commands in ELSEWHERE.values() for command in commands]
SCRIPT = """
import argparse, sys
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from npu_trainer_kernels import NpuKernelsArguments

lr = argparse.ArgumentParser()
lr.add_argument("--lr", type=float, default=1e-3)
given, rest = lr.parse_known_args()
parser = HfArgumentParser((NpuKernelsArguments, TrainingArguments))
kernels, args = parser.parse_args_into_dataclasses([*rest, "--max_steps", "2", "--report_to", "none"])
args.learning_rate, args.disable_tqdm = given.lr, True
rows = [{"input_ids": list(range(i, i + 24)), "labels": list(range(i, i + 24))} for i in range(16)]
Trainer(AutoModelForCausalLM.from_pretrained("tiny"), args, train_dataset=rows, callbacks=kernels.callbacks()).train()
"""


def test_every_command_of_a_page_is_run_or_stands_in_the_table():
    written = set(commands())
    assert set(RUN).isdisjoint(NAMED)
    assert written - {*RUN, *NAMED} == set(), "a page has a command that nothing runs"
    assert {*RUN, *NAMED} - written == set(), "the table has a command that no page has"
    assert len(NAMED) == len(set(NAMED))


def test_the_table_says_why_and_where():
    for why, where in ELSEWHERE:
        assert why
        assert (ROOT / where).is_file(), where
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ELSEWHERE["every change is held to them", ".ci/run"]:
        assert re.search(rf"^step .*\b{command.removeprefix('make ')}\b", steps, re.MULTILINE), command
    replaced = {re.sub(*next(iter(USER.items())), command) for command in RUN} | set(RUN)
    assert set(SMALLER) <= replaced


class Machine:
    """A machine of a user who has cloned the repository, and has a model, some texts and a script.

    Attributes:
        clone: the checkout, in which the commands run.
        installed: what each `pip install` has printed.
    """

    def __init__(self, folder: Path) -> None:
        self.clone, home = checkout(folder / "clone"), folder / "home"
        home.mkdir()
        environments = {
            False: (Environment(folder / "plain", PROJECT["dependencies"], home), "pip install ."),
            True: (Environment(folder / "extras", [*PROJECT["dependencies"], *EXTRAS], home), 'pip install ".[trl]"'),
        }
        self.environments = {extras: environment for extras, (environment, _) in environments.items()}
        self.installed = {asked: environment.run(asked, self.clone) for environment, asked in environments.values()}
        (folder / "extras" / ".installed").touch()  # what `make` looks for
        self.variables = f"EXTRAS={folder / 'extras'}"
        self._write()
        self.run = cache(self._run)

    def _write(self) -> None:
        tokenizer = byte_level_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(self.clone / "tiny")
        tokenizer.save_pretrained(self.clone / "tiny")
        rows = [{"text": f"row {i}: " + "some text " * (8 + i % 5)} for i in range(48)]
        (self.clone / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.clone / "train.py").write_text(SCRIPT)

    def _run(self, command: str, extras: bool = False) -> tuple[int, str]:
        """Runs a command once, however often it is asked for."""
        if command in self.installed:
            return self.installed[command]
        return self.environments[extras].run(f"{self.variables}; {command}", self.clone)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


def last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


@pytest.mark.parametrize("command", [command for command in RUN if "compare" not in command])
def test_a_command_does_what_the_page_says(machine, command):
    code, output = machine.run(as_run(command), RUN[command].extras)
    assert code == 0, output[-6000:]
    assert "Traceback" not in output, output[-6000:]
    assert re.fullmatch(RUN[command].last, last_line(output)), output[-3000:]


@pytest.mark.parametrize("command", [command for command in RUN if "compare" in command])
def test_runs_are_compared_right_after_them(machine, command):
    """The runs of the first command of README, as it stands and without the flag; nothing is saved besides."""
    sft = SMALLER["python examples/sft.py --use_npu_kernels"][1]
    assert machine.run(sft)[0] == 0
    assert machine.run(f"{sft.replace(' --use_npu_kernels', '')} --output_dir runs/plain")[0] == 0
    assert machine.run("cp -r runs/sft runs/kernels")[0] == 0
    code, output = machine.run(command, RUN[command].extras)
    assert code == 0, output[-6000:]
    assert re.fullmatch(RUN[command].last, last_line(output)), output[-3000:]


def test_the_first_environment_has_what_its_row_installs_and_no_more(machine):
    code, listed = machine.run("pip list --format=freeze && pip check")
    assert code == 0, listed
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed.splitlines() if "==" in line}
    assert names == {*distributions(PROJECT["dependencies"]), "npu-trainer-kernels", "pip", "setuptools"}
    assert names.isdisjoint({"trl", "datasets", "peft", "matplotlib"})
    code, where = machine.run("cd / && python -c 'import npu_trainer_kernels as n; print(n.__file__)'")
    assert code == 0
    assert str(machine.clone.parent / "plain") in where


@pytest.mark.full("grpo")
@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_recipe_with_and_without_and_both_side_by_side(machine, recipe):
    """The recipe's tiny switch, `NPU_KERNELS_RUN=0` and `npu-kernels compare`, as the page says."""
    for name, switch in (("with", ""), ("without", "NPU_KERNELS_RUN=0 ")):
        code, output = machine.run(f"{switch}python examples/recipes/tiny.py {recipe} {LOGGED}", True)
        assert code == 0, output[-6000:]
        assert (" put into " in output) == (name == "with")
        assert machine.run(f"mv runs/recipes/{recipe}/out {recipe}-{name}")[0] == 0
    code, output = machine.run(f"npu-kernels compare {recipe}-with {recipe}-without")
    assert code == 0, output
    assert "loss" in output
