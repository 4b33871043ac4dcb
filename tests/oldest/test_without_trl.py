"""The oldest versions that pyproject.toml allows, without TRL and datasets: what needs them says what to install."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.cli import main
from npu_trainer_kernels.verify import verify
from tests.models import batch, byte_tokenizer, small_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path) -> str:
    """A Llama with its tokenizer, on disk."""
    small_model("llama", vocab_size=263).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["cuda"])]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_these_are_the_oldest(requirement):
    """Of a bound with two numbers any patch release."""
    (bound,) = requirement.specifier
    installed = Version(metadata.version(requirement.name)).release
    wanted = Version(bound.version).release
    assert installed[: len(wanted)] == wanted


@pytest.mark.parametrize("name", ["trl", "datasets"])
def test_they_are_not_installed(name):
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version(name)


def test_the_report_says_what_trl_would_bring():
    model = small_model("llama")
    with apply_npu_kernels(model) as kernels:
        model(**batch()).loss.backward()
        left = {each.op: each.reason for each in kernels.report().left_alone}
    assert left["linear_logprob"] == "TRL is not installed (pip install 'trl>=1.15,<2')"


def test_the_example_of_a_plain_trainer_needs_neither(tmp_path):
    command = [
        sys.executable,
        "examples/sft.py",
        "--use_npu_kernels",
        "--max_steps",
        "1",
        "--output_dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "what", "missing"),
    [
        (["examples/grpo.py"], "this example", "trl and datasets"),
        (["examples/trl_dpo.py"], "this example", "trl and datasets"),
        (["-m", "convergence", "--list"], "the convergence suite", "trl and datasets"),
        (["-c", "from npu_trainer_kernels import GRPOTrainer"], "GRPOTrainer", "TRL"),
    ],
    ids=str,
)
def test_what_needs_them_says_what_to_install(command, what, missing):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "MissingDependencyError: " in last
    assert f"{what} needs {missing}" in last
    assert "pip install 'trl>=1.15,<2' 'datasets>=4.0'" in last


def test_verify_trains_without_datasets(model):
    verdict = verify(model, steps=2, noise_runs=2, sequence_length=32)
    assert {"loss", "gradient norm"} <= {check.name for check in verdict.checks}
    assert verdict.passed


def test_verify_of_a_dataset_says_what_to_install(model, tmp_path, capsys):
    (tmp_path / "rows.json").write_text('[{"text": "one"}]')
    assert main(["verify", "--model", model, "--dataset", str(tmp_path / "rows.json")]) == 2
    assert "pip install 'datasets>=4.0'" in capsys.readouterr().err
