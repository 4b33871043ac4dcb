"""examples/recipes/: TRL takes every field, each recipe runs tiny, docs/recipes.md has its command and its memory."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from npu_trainer_kernels import fit
from tests import warm

from .test_examples import EXAMPLES, REPOSITORY

RECIPES = EXAMPLES / "recipes"
PAGE = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
PREDICTED = {each["recipe"]: each for each in json.loads((RECIPES / "fit.json").read_text())}
# Options of `accelerate launch`.
LAUNCH = {"accelerate_config", "num_processes"}
# On a CPU `swiglu` and `rope` are off unless an option asks for them.
OPS = {"rms_norm", "add_rms_norm", "varlen_attention", "linear_logprob"}
ALSO = {"sft-moe": {"moe_experts"}, "long-context": {"swiglu"}}
MODELS = {"sft-moe": "Qwen3Moe", "long-context": "Llama"}


def module(name: str):
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", RECIPES / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


tiny, rewards = module("tiny"), module("rewards")
recipes = pytest.mark.parametrize("name", tiny.NAMES)


def text_of(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


@recipes
def test_trl_takes_every_field(name):
    """TRL passes fields that it does not know on to `accelerate launch`, which a misspelt one would reach."""
    *before, trl, task, option, file = tiny.command_of(name)
    assert (before[:2], trl, option, REPOSITORY / file) == (
        ["npu-kernels", "run"], "trl", "--config", RECIPES / f"{name}.yaml"
    )  # fmt: skip
    parser = importlib.import_module(f"trl.scripts.{task}").make_parser()
    given = ["--config", str(RECIPES / f"{name}.yaml"), "--use_cpu", "True", "--bf16", "False"]
    script, training, model, _, unknown = parser.parse_args_and_config(given, return_remaining_strings=True)
    fields = yaml.safe_load(text_of(name))
    assert {word.removeprefix("--") for word in unknown if word.startswith("--")} == LAUNCH & set(fields)
    assert script.dataset_name == fields["dataset_name"]
    assert model.model_name_or_path == fields["model_name_or_path"]
    assert training.max_steps > 0 or training.num_train_epochs == 1
    assert model.use_peft == (name in ("sft-lora", "qlora", "sft-moe"))
    quantised = (model.load_in_4bit, model.bnb_4bit_quant_type, model.use_bnb_nested_quant)
    assert quantised == ((True, "nf4", True) if name == "qlora" else (False, "nf4", False))


@recipes
def test_a_recipe_runs_tiny(tmp_path, name):
    """The script behind TRL's command with what `npu-kernels run` does in it; two ranks where the recipe has two."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    words = tiny.prepare(name, folder)
    at = words.index("--config")
    *before, trl, task = words[:at]
    options = words[at:]
    for launch in tiny.ALSO["two-devices"] if name == "two-devices" else ():
        at = options.index(f"--{launch}")
        del options[at : at + 2]
    assert trl == "trl"
    # What the command sets for `npu-kernels run`, as that sets it for the process.
    variables = {"--tiled-mlp": "NPU_KERNELS_TILED_MLP", "--audit": "NPU_KERNELS_AUDIT"}
    environment = {variables[key]: value for key, value in zip(before[2::2], before[3::2], strict=True)}
    output = tmp_path / "out.txt"
    if name == "two-devices":
        done = warm.run_ranks(2, "tests.examples.trl_script", task, *options, output=output)
    else:
        script = "tests.examples.trl_script"
        done = warm.run(script, task, *options, folder=REPOSITORY, output=output, **environment)
    assert done.returncode == 0, done.output[-6000:]
    check(name, done.output)
    saved = "adapter_config.json" if yaml.safe_load(text_of(name)).get("use_peft") else "config.json"
    assert (folder / "out" / saved).is_file()


def check(name: str, output: str) -> None:
    """What the report says, and that three steps trained."""
    (line,) = (line for line in output.splitlines() if line.startswith("npu-kernels run: "))
    ops, _, model = line.removeprefix("npu-kernels run: ").partition(" put into ")
    assert set(ops.split(", ")) == OPS | ALSO.get(name, set())
    peft = yaml.safe_load(text_of(name)).get("use_peft")
    assert model.startswith("PeftModelForCausalLM" if peft else f"{MODELS.get(name, 'Qwen3')}ForCausalLM")
    assert f"{MODELS.get(name, 'Qwen3')}RMSNorm" in output
    assert ("longer ones than 32 tokens in slices" in output) == (name == "long-context")
    assert ("\nref_model (Qwen3ForCausalLM): " in output) == (name == "dpo")
    assert "not planned" not in output
    norms = [float(norm) for norm in re.findall(r"'grad_norm': '([^']+)'", output)]
    assert len(norms) == 3
    assert all(norm > 0 for norm in norms)
    assert ("rewards/same_answer/mean" in output) == (name == "grpo")
    # As the page says it.
    for told in re.findall(r"^  (\w+) +torch: ", output, re.MULTILINE):
        assert told in ops


@pytest.mark.full(quick="test_a_recipe_runs_tiny")
def test_the_whole_command_runs(tmp_path):
    """As a user starts it: TRL's command, accelerate's launcher with the recipe's file, two ranks."""
    scripts = Path(sys.executable).parent
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {
        **{key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "PATH": f"{scripts}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(RECIPES / "tiny.py"), "two-devices", "--seed", "7"], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    check("two-devices", done.stdout)
    # 24 rows, three steps of four rows on each of two ranks: the whole of the data.
    assert "'epoch': '1'" in done.stdout
    assert (tmp_path / "runs" / "recipes" / "two-devices" / "out" / "config.json").is_file()


def test_the_tiny_run_has_the_reward_of_the_recipe(tmp_path):
    (reward,) = yaml.safe_load(text_of("grpo"))["reward_funcs"]
    assert reward == f"examples.recipes.rewards.{rewards.same_answer.__name__}"
    assert reward in tiny.prepare("grpo", tmp_path)


def test_an_unknown_recipe_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tiny.py", "sft_lora"])
    assert tiny.main() == 2
    assert ", ".join(tiny.NAMES) in capsys.readouterr().out


@pytest.mark.parametrize("there", [False, True])
def test_quantisation_is_left_out_where_bitsandbytes_is_missing_and_that_is_said(monkeypatch, capsys, tmp_path, there):
    monkeypatch.setattr(tiny.importlib.util, "find_spec", lambda name: object() if there else None)
    words = tiny.prepare("qlora", tmp_path)
    assert ("--load_in_4bit" in words) != there
    assert ("bitsandbytes is not installed" in capsys.readouterr().out) != there
    assert not there or "--load_in_4bit" not in tiny.prepare("sft", tmp_path)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{12}", "12"),
        ("\\boxed{1} or \\boxed{ \\frac{1}{2} }.", "\\frac{1}{2}"),
        ("\\boxed{12", None),
        ("12", None),
        ("", None),
    ],
)
def test_the_box(text, answer):
    assert rewards.boxed(text) == answer


def test_the_reward():
    texts = ["\\boxed{12}", "12", "\\boxed{13}", "\\boxed{1 2}"]
    forms = [texts, [[{"role": "assistant", "content": text}] for text in texts]]
    for form in forms:
        for solution in ("12", "$12$", "\\boxed{12}"):
            given = rewards.same_answer(completions=form, solution=[solution] * 4, prompts=[""] * 4)
            assert given == [1.0, 0.0, 0.0, 1.0]


@recipes
def test_the_page_has_the_command_and_the_memory(name):
    section = PAGE.partition(f"\n## {headings()[name]}\n")[2].partition("\n## ")[0]
    for file in (f"examples/recipes/{name}.yaml", " ".join(tiny.command_of(name)), f"examples/recipes/tiny.py {name}"):
        assert file in section
    fields = yaml.safe_load(text_of(name))
    assert f"`{fields['model_name_or_path']}`" in section
    assert f"`{fields['dataset_name']}`" in section
    assert (name in PREDICTED) == (name != "qlora")
    if name in PREDICTED:
        predicted = PREDICTED[name]
        assert predicted["command"] in section
        told = {row["variant"]: f"{row['peak_bytes'] / 2**30:.1f} GiB" for row in predicted["rows"]}
        words = {"plain": "plain", "kernels": "with the kernels", "kernels, tiled MLP": "and MLPs in slices"}
        assert ", ".join(f"{told[each]} {words[each]}" for each in told) in " ".join(section.split())


def headings() -> dict[str, str]:
    """The heading of each recipe's section: the one whose section names the file."""
    sections = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    return {name: next(head for head, text in found.items() if f"recipes/{name}.yaml" in text) for name in tiny.NAMES}


@pytest.mark.parametrize("name", PREDICTED)
def test_the_command_of_fit_is_that_of_the_recipe(name):
    from npu_trainer_kernels.cli import make_parser

    fields, predicted = yaml.safe_load(text_of(name)), PREDICTED[name]
    asked = make_parser().parse_args(predicted["command"].split()[1:])
    assert asked.model == fields["model_name_or_path"]
    assert asked.batch == fields["per_device_train_batch_size"]
    assert asked.lora == (fields["lora_r"] if fields.get("use_peft") else 0)
    assert asked.devices == fields.get("num_processes", 1)
    assert asked.seq == fields.get("max_length", fields.get("max_completion_length", 0) + asked.prompt)
    assert asked.trainer == tiny.command_of(name)[-3]
    assert {row["checkpointing"] for row in predicted["rows"]} == {fields["gradient_checkpointing"]}


@pytest.mark.parametrize("variant", ["plain", "kernels"])
def test_a_prediction_is_that_of_today(variant):
    """Of the recipe that takes least time to predict."""
    predicted = PREDICTED["sft"]
    (row,) = (row for row in predicted["rows"] if row["variant"] == variant)
    config = AutoConfig.for_model(**predicted["config"])
    setup = fit.Setup(
        "sft", 8, 2048, 0, torch.bfloat16, True, variant, row["checkpointing"], 0, "none", 1, 80 << 30
    )  # fmt: skip
    assert fit.predict(config, setup).peak_bytes == row["peak_bytes"]
