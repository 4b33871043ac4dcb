"""LLaMA-Factory and ms-swift under `npu-kernels run`, each where it is installed: `make test-frameworks`."""

import importlib.util
import json

import pytest

from tests.cli.training import check, make_model, write_rows

STEPS = {
    "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 0.01, "report_to": "none",
    "save_strategy": "steps", "save_steps": 3, "use_cpu": True, "optim": "sgd",
}  # fmt: skip
SUMS = [(f"{a}+3=", str(a + 3)) for a in range(16)]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def test_one_of_them_is_installed():
    assert installed("llamafactory") or installed("swift")


@pytest.mark.skipif(not installed("llamafactory"), reason="this is ms-swift's environment")
def test_llama_factory(tmp_path):
    rows = [{"instruction": prompt, "input": "", "output": answer} for prompt, answer in SUMS]
    (tmp_path / "sums.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))
    settings = {
        "model_name_or_path": make_model(tmp_path / "model"), "stage": "sft", "do_train": True, "dataset": "sums",
        "finetuning_type": "full", "dataset_dir": ".", "template": "empty", "cutoff_len": 64, **STEPS,
    }  # fmt: skip
    # A .yaml may hold JSON.
    (tmp_path / "sft.yaml").write_text(json.dumps({**settings, "output_dir": "out"}))
    # `llamafactory-cli train FILE KEY=VALUE`: as in `output_dir=with`.
    printed = check(tmp_path, ["llamafactory-cli", "train", "sft.yaml"], "output_dir=")
    assert "linear_cross_entropy" in printed


@pytest.mark.skipif(not installed("swift"), reason="this is LLaMA-Factory's environment")
def test_ms_swift(tmp_path):
    """It puts a list of its own in the place of the Trainer's callbacks, and takes token accuracy from the logits."""
    messages = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in SUMS
    ]
    write_rows(tmp_path / "sums.jsonl", messages)
    settings = {
        "model": make_model(tmp_path / "model"), "model_type": "qwen3", "template": "qwen3", "dataset": "sums.jsonl",
        "tuner_type": "full", "torch_dtype": "float32", "use_hf": True, "max_length": 512, **STEPS,
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    printed = check(tmp_path, ["swift", "sft", *options], "--output_dir")
    assert "linear_cross_entropy" in printed
