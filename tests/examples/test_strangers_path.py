"""What the README says, by somebody who has a checkout, a machine without an accelerator and nothing else.

The environment is a new one, into which the package is installed from a copy of the checkout. Its other packages are
those of this environment, so that no network is needed.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# What TRL's command is given besides: logs for `npu-kernels compare`, and numbers that do not depend on a run.
LOGGED = ["--save_strategy", "steps", "--save_steps", "3", "--logging_steps", "1", "--seed", "7"]
PATHS = (
    "npu_trainer_kernels", "benchmarks", "docs", "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE",
    "MANIFEST.in",
)  # fmt: skip
pytestmark = pytest.mark.full


class Stranger:
    """A folder with a copy of the checkout, and an environment in which the package was installed from it."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin = folder / "checkout", folder / "env" / "bin"
        self.checkout.mkdir()
        for name in PATHS:
            source = REPOSITORY / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, self.checkout / name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
        (packages,) = (folder / "env" / "lib").glob("python3*/site-packages")
        # This project as it is installed here is no part of it.
        ours = sysconfig.get_path("purelib")
        (packages / "base.pth").write_text(f"{ours}\n")
        self.run(
            sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "-q", "--no-deps",
            "--no-build-isolation", "--force-reinstall", ".",
        )  # fmt: skip
        for name in ("trl", "accelerate"):
            script = self.bin / name
            script.write_text(
                f"#!{self.bin / 'python'}\n" + (Path(sys.executable).parent / name).read_text().split("\n", 1)[1]
            )
            script.chmod(0o755)

    def run(self, *command: str, code: int = 0, **variables: str) -> str:
        """Runs a command in the checkout as a shell would, and returns what it has printed."""
        kept = {
            key: value for key, value in os.environ.items()
            if not key.startswith(("NPU_KERNELS_", "PYTHON", "TRITON_INTERPRET", "COV_"))
        }  # fmt: skip
        path = f"{self.bin}:{kept['PATH']}"
        done = subprocess.run(
            command, cwd=self.checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
            env={**kept, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{' '.join(command)}:\n{done.stdout[-6000:]}"
        assert "Traceback" not in done.stdout, done.stdout[-6000:]
        return done.stdout


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    return Stranger(tmp_path_factory.mktemp("stranger"))


def test_the_package_is_the_installed_one(stranger):
    where = stranger.run("python", "-P", "-c", "import npu_trainer_kernels as n; print(n.__file__)")
    assert where.startswith(str(stranger.bin.parent)), where
    assert stranger.run("npu-kernels", "--version").startswith("npu-kernels 0.")


def test_the_installation_is_looked_at(stranger):
    assert "triton" in stranger.run("npu-kernels", "doctor", "--no-self-check")


def test_the_flag_of_the_script(stranger):
    options = ["--max_steps", "2", "--sequence_length", "32", "--text_characters", "20000"]
    out = stranger.run("python", "examples/sft.py", "--use_npu_kernels", *options)
    assert "linear_cross_entropy" in out
    report = json.loads((stranger.checkout / "runs" / "sft" / "metrics.json").read_text())
    assert report


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_recipe_with_and_without_and_both_side_by_side(stranger, recipe):
    """The recipe's tiny switch, `NPU_KERNELS_RUN=0` and `npu-kernels compare`, as the page says."""
    runs = []
    for name, variables in (("with", {}), ("without", {"NPU_KERNELS_RUN": "0"})):
        out = stranger.run("python", "examples/recipes/tiny.py", recipe, *LOGGED, **variables)
        assert (" put into " in out) == (name == "with")
        shutil.move(stranger.checkout / "runs" / "recipes" / recipe / "out", stranger.checkout / f"{recipe}-{name}")
        runs.append(f"{recipe}-{name}")
    out = stranger.run("npu-kernels", "compare", *runs)
    assert "loss" in out
    config = str(stranger.checkout / runs[0] / "config.json")
    assert "GiB" in stranger.run("npu-kernels", "fit", "--model", config, "--memory", "80")
