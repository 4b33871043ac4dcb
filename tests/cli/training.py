"""Training commands with `npu-kernels run` in front, switched on and off, on a model and data that are made here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.models import small_model

ROOT = Path(__file__).resolve().parents[2]
CHARACTERS = " 0123456789+=abcdefghijklmnopqrstuvwxyz"


def make_model(folder: Path) -> str:
    """A small Qwen3 whose tokenizer knows a few characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    small_model("qwen3", max_position_embeddings=1024).save_pretrained(folder)
    return str(folder)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(folder: Path, command: list[str], **environment: str) -> str:
    """Runs a command of this environment in a folder; its stdout and stderr."""
    scripts = Path(sys.executable).parent
    kept = {k: v for k, v in os.environ.items() if not k.startswith("NPU_KERNELS_") and k != "TRITON_INTERPRET"}
    # Of a checkout, whatever is installed; this machine's measurements are no part of it.
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "NPU_KERNELS_TUNED": "0"}
    kept["PATH"] = f"{scripts}{os.pathsep}{kept['PATH']}"
    command = [sys.executable, "-m", "npu_trainer_kernels", "run", *command]
    done = subprocess.run(
        command, cwd=folder, env={**kept, **given, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def history(output: Path) -> list[dict[str, float]]:
    """The numbers of the steps from a checkpoint's trainer_state.json, in full."""
    (state,) = output.rglob("checkpoint-*/trainer_state.json")
    return [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


def check(
    folder: Path, command: list[str], option: str, rel: float = 1e-5, plain_run: Callable[[Path], str] | None = None
) -> str:
    """With the kernels and without: the same numbers, and only with them a report. Returns what was printed with them.

    Args:
        option: of the command, that names the output folder: one word with it where it ends with "=".
        rel: how far apart losses and gradient norms may be.
        plain_run: does what the command does, into a folder, and returns what it printed; None: the command itself,
            with the switch off.
    """

    def switched(name: str, value: str) -> str:
        output = [f"{option}{name}"] if option.endswith("=") else [option, name]
        return run(folder, [*command, *output], NPU_KERNELS_RUN=value)

    on = switched("with", "1")
    off = switched("without", "0") if plain_run is None else plain_run(folder / "without")
    fused, plain = history(folder / "with"), history(folder / "without")
    assert len(plain) >= 2
    assert len({entry["loss"] for entry in plain}) > 1 or len({entry["grad_norm"] for entry in plain}) > 1
    for before, after in zip(plain, fused, strict=True):
        for name in ("loss", "grad_norm"):
            assert after[name] == pytest.approx(before[name], rel=rel, abs=rel * 1e-2), name
    assert on.count("NPU kernels on cpu") == 1
    (line,) = (line for line in on.splitlines() if line.startswith("npu-kernels run:"))
    assert line.endswith("NPU_KERNELS_RUN=0 leaves it out")
    assert all("tokens_per_second" in entry for entry in fused)
    assert "NPU kernels" not in off
    assert not any("tokens_per_second" in entry for entry in plain)
    says = "npu-kernels run: NPU_KERNELS_RUN=0, so the command runs without the kernels" in off
    assert says == (plain_run is None)
    return on
