"""The examples: their data, rewards and arguments, and a few steps of each script as a user would run it."""

import importlib
import json
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from tests import warm

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
# Free to use an accelerator, but small on any device.
FEW_STEPS = ["--max_steps", "3", "--logging_steps", "1", "--disable_tqdm", "True"]
SFT = ["--sequence_length", "32", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"]
GRPO = ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "64", "--num_generations", "4"]


def example(name: str) -> ModuleType:
    """A script as a module; it finds its neighbours as when it is run."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


common, sft, grpo, demo = (example(name) for name in ("_common", "sft", "grpo", "demo"))


def run(script: str, output_dir: Path, *options: str) -> warm.Ended:
    """Runs a script in its own process."""
    output_dir.mkdir(exist_ok=True)
    arguments = ["--output_dir", str(output_dir), *FEW_STEPS, *options]
    return warm.run(str(EXAMPLES / script), *arguments, folder=REPOSITORY, output=output_dir.with_suffix(".txt"))


def metrics_of(script: str, output_dir: Path, *options: str) -> dict:
    """Runs a script that must succeed and returns its metrics."""
    result = run(script, output_dir, *options)
    assert result.returncode == 0, result.output
    return json.loads((output_dir / "metrics.json").read_text())


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model and its tokenizer, as a user's local path."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = common.byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # naïve\n", "12+7=19", "漢字 🙂", ""])
def test_byte_level_tokenizer_round_trip(text: str) -> None:
    tokenizer = common.byte_level_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == common.SMALLEST_VOCAB
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_trained_tokenizer_round_trip_and_vocabulary(tmp_path: Path) -> None:
    texts = sft.standard_library_texts(60_000, seed=1)
    tokenizer = common.byte_level_tokenizer(texts, vocab_size=607)
    tokenizer.save_pretrained(tmp_path)
    again = common.load_tokenizer(str(tmp_path))
    assert len(again) == 607
    assert (again.pad_token, again.eos_token) == (common.PAD, common.EOS)
    for text in texts:
        ids = again(text)["input_ids"]
        assert again.decode(ids) == text
        assert len(ids) < len(text.encode())


def test_standard_library_texts_are_seeded_and_limited() -> None:
    texts = sft.standard_library_texts(100_000, seed=3)
    assert sum(map(len, texts)) == 100_000
    assert texts == sft.standard_library_texts(100_000, seed=3)
    assert texts != sft.standard_library_texts(100_000, seed=4)


@pytest.mark.parametrize("length", [2, 3, 7])
def test_packing_loses_only_the_remainder(length: int) -> None:
    documents, end = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]], 0
    stream = list(chain.from_iterable([*document, end] for document in documents))
    sequences = list(sft.pack(documents, length, end))
    assert all(len(sequence) == length for sequence in sequences)
    assert list(chain.from_iterable(sequences)) == stream[: len(stream) // length * length]


def test_packing_refuses_too_little_text() -> None:
    with pytest.raises(ValueError, match="sequence_length=100"):
        sft.packed_dataset(["short"], common.byte_level_tokenizer(), 100)


def test_sums_are_right_different_and_held_out() -> None:
    args = grpo.ScriptArguments(num_prompts=300, largest_operand=30)
    train, held_out = grpo.load_prompts(args, seed=5)
    assert (len(train), len(held_out)) == (300, grpo.HELD_OUT)
    for row in [*train, *held_out]:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(left) + int(right) == int(row["answer"])
        assert max(int(left), int(right)) <= 30
    assert len({*train["prompt"], *held_out["prompt"]}) == 300 + grpo.HELD_OUT
    with pytest.raises(ValueError, match="num_prompts must be 1 to 57"):
        grpo.load_prompts(grpo.ScriptArguments(num_prompts=58, largest_operand=10), seed=5)


@pytest.mark.parametrize(
    ("completion", "ended", "exact", "graded"),
    [
        ("19", True, 1.0, 1.0),
        ("19", False, 1.0, 2 / 3),
        ("20", True, 0.0, 1.0),
        ("019", True, 0.0, 2 / 3),
        ("1a", True, 0.0, 2 / 3),
        (" 19", True, 0.0, 1 / 3),
        ("²²", True, 0.0, 2 / 3),
        ("", True, 0.0, 1 / 3),
        ("abc", False, 0.0, 0.0),
    ],
)
def test_rewards(completion: str, ended: bool, exact: float, graded: float) -> None:
    end, ids = 1, [70, 71, *([1] if ended else [])]
    for form in (completion, [{"role": "assistant", "content": completion}]):
        assert grpo.exact_match(completions=[form], answer=["19"], prompts=["12+7="]) == [exact]
        assert grpo.exact_match(completions=[form], answer=[19]) == [exact]
        reward = grpo.format_reward(end)(completions=[form], completion_ids=[ids], answer=["19"], prompts=["12+7="])
        assert reward == pytest.approx([graded])


def test_sft_arguments_and_config_file(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text("sequence_length: 48\nlearning_rate: 1.0e-3\nuse_npu_kernels: true\n")
    options = ["--config", str(config), "--learning_rate", "5e-4", "--vocab_size", "500"]
    args, kernels, training = sft.make_parser().parse_args_and_config(options)
    assert (args.sequence_length, args.vocab_size, args.model_name_or_path) == (48, 500, None)
    assert kernels.use_npu_kernels
    assert len(kernels.callbacks()) == 1
    assert (training.learning_rate, training.output_dir) == (5e-4, "runs/sft")
    assert sft.make_parser().parse_args_and_config([])[1].callbacks() == []


def test_grpo_arguments(tiny_model: str) -> None:
    parse = grpo.make_parser().parse_args_and_config
    args, kernels, training = parse(["--temperature", "0.7"])
    assert (args.supervised_steps, kernels.use_npu_kernels) == (grpo.SUPERVISED_STEPS, False)
    assert (training.temperature, training.reward_weights) == (0.7, grpo.REWARD_WEIGHTS)
    assert parse(["--model_name_or_path", tiny_model])[0].supervised_steps == 0


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (sft, ["--vocab_size", "99"], "vocab_size must be at least 258; got 99"),
        (sft, ["--vocab_size", "999", "--model_name_or_path", "x"], "vocab_size=999 has no effect with --model"),
        (sft, ["--dataset_text_field", "body"], "dataset_text_field='body' has no effect without --dataset_name"),
        (sft, ["--text_characters", "9", "--dataset_name", "x"], "text_characters=9 has no effect with --dataset_name"),
        (sft, ["--eval_fraction", "1"], "eval_fraction must be between 0 and 1"),
        (sft, ["--sequence_length", "1"], "sequence_length must be at least 2; got 1"),
        (sft, ["--dtype", "int8"], "dtype must be one of float32, bfloat16, float16, auto; got 'int8'"),
        (grpo, ["--dataset_split", "test"], "dataset_split='test' has no effect without --dataset_name"),
        (grpo, ["--num_prompts", "9", "--dataset_name", "x"], "num_prompts=9 has no effect with --dataset_name"),
        (grpo, ["--supervised_steps", "-1"], "supervised_steps must be at least 0; got -1"),
        (grpo, ["--supervised_accuracy", "0"], "supervised_accuracy must be above 0 and at most 1; got 0.0"),
    ],
)
def test_bad_arguments_are_named(script: ModuleType, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script.make_parser().parse_args_and_config(options)


# By script: wrong flags, and what is said of each.
WRONG_FLAGS = {
    "sft": [
        (["--vocab_size", "99"], "vocab_size must be at least 258; got 99"),
        (["--use_npu_kernels", "--npu_kernels_ops", "rmsnorm"], "got ['rmsnorm']; did you mean 'rms_norm'?"),
        (["--npu_kernels_report", "full"], "npu_kernels_report does nothing without --use_npu_kernels"),
        (["--max_steps", "many"], "invalid int value: 'many'"),
    ],
    "grpo": [
        (["--supervised_steps", "-1"], "supervised_steps must be at least 0; got -1"),
        (["--nonsense", "3"], "['--nonsense', '3']"),
        (["--use_npu_kernels", "--npu_kernels_capture", "maybe"], "must be one of auto, on, off; got 'maybe'"),
    ],
    "trl_sft": [
        (["--use_npu_kernels", "--npu_kernels_backend", "tritn"], "got 'tritn'; did you mean 'triton'?"),
        (["--npu_kernels_strict"], "npu_kernels_strict does nothing without --use_npu_kernels"),
    ],
    "trl_dpo": [(["--use_npu_kernels", "--npu_kernels_audit", "0"], "a positive number of steps; got '0'")],
    "trl_kto": [(["--use_npu_kernels", "--npu_kernels_tiled_mlp", "-1"], "or 0 for all at once; got -1")],
    "trl_rloo": [(["--use_npu_kernels", "--npu_kernels_rollouts", "no"], "must be one of auto, on, off; got 'no'")],
    "trl_distill": [(["--nonsense"], "--nonsense")],
}


def test_every_script_has_a_wrong_flag_here() -> None:
    assert sorted(WRONG_FLAGS) == sorted(
        file.stem for file in EXAMPLES.glob("*.py") if not file.stem.startswith("_") and file.stem != "demo"
    )


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [(script, options, said) for script, cases in WRONG_FLAGS.items() for options, said in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_flag_ends_a_script_without_a_traceback(monkeypatch, capsys, tmp_path, script, options, said) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        example(script).main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_local_datasets(tmp_path: Path) -> None:
    texts = [f"document {i} " * 20 for i in range(12)]
    rows = Dataset.from_dict({"body": texts})
    rows.to_json(tmp_path / "rows.jsonl")
    rows.to_parquet(tmp_path / "folder" / "train.parquet")
    rows.save_to_disk(tmp_path / "saved")
    DatasetDict({"dev": rows}).save_to_disk(tmp_path / "splits")
    for name, split in (("rows.jsonl", None), ("folder", None), ("saved", None), ("splits", "dev")):
        args = sft.ScriptArguments(
            dataset_name=str(tmp_path / name), dataset_split=split, dataset_text_field="body", eval_fraction=0.1
        )
        assert sorted(sft.load_texts(args, seed=0)) == sorted(texts)
    with pytest.raises(ValueError, match="dataset_split must be one of dev; got 'train'"):
        common.load_rows(sft.ScriptArguments(dataset_name=str(tmp_path / "splits")))
    with pytest.raises(ValueError, match="has no column 'text'; it has body"):
        sft.load_texts(sft.ScriptArguments(dataset_name=str(tmp_path / "saved")), seed=0)
    (tmp_path / "rows.xml").touch()
    with pytest.raises(ValueError, match=r"a file must end with one of .*; got 'rows\.xml'"):
        common.load_rows(sft.ScriptArguments(dataset_name=str(tmp_path / "rows.xml")))


def test_small_models_have_the_size_that_is_told() -> None:
    tokenizer = common.byte_level_tokenizer()
    model = common.load_model(grpo.ScriptArguments(dtype="bfloat16"), grpo.small_qwen3(tokenizer))
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.bfloat16
    assert 0.75e6 < model.num_parameters() < 0.9e6


MEMORY = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from _common import PeakMemory
size = 64 << 20
torch.ones(2 * size, dtype=torch.uint8)  # an earlier peak that must not count
memory = PeakMemory(torch.device("cpu"))
assert memory.bytes() < size // 4
torch.ones(size, dtype=torch.uint8)
assert size * 0.9 < memory.bytes() < size * 1.5, memory.bytes()
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="elsewhere the peak cannot be reset")
def test_peak_memory_is_that_of_the_run() -> None:
    """In a process of its own: the system takes idle memory from one that has run many tests, also while it is read."""
    subprocess.run([sys.executable, "-c", MEMORY, str(EXAMPLES)], check=True, timeout=200)


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "kernels"])
def test_sft_runs_and_its_model_loads(flag: bool, tmp_path: Path) -> None:
    options = [*SFT, "--text_characters", "30000", "--vocab_size", "300", *(["--use_npu_kernels"] if flag else [])]
    metrics = metrics_of("sft.py", tmp_path, *options)
    assert metrics["steps"] == 3
    assert metrics["final_loss"] < metrics["first_loss"] + 0.1 < 6.5  # ln 300 = 5.7
    assert min(metrics["eval_loss"], metrics["seconds"], metrics["tokens_per_second"]) > 0
    assert (metrics["kernels"] is not None) is flag
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(common.load_tokenizer(str(tmp_path))) == 300


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "kernels"])
def test_grpo_runs_and_its_model_loads(flag: bool, tmp_path: Path) -> None:
    options = [*GRPO, "--supervised_steps", "2", "--num_prompts", "60", *(["--use_npu_kernels"] if flag else [])]
    metrics = metrics_of("grpo.py", tmp_path, *options)
    assert (metrics["steps"], len(metrics["rewards"])) == (3, 3)
    assert 0 <= min(metrics["rewards"]) <= max(metrics["rewards"]) <= 1
    parts = metrics["generation_seconds"], metrics["update_seconds"]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(metrics["seconds"])
    assert (metrics["kernels"] is not None) is flag
    assert Qwen3ForCausalLM.from_pretrained(tmp_path).config.vocab_size == len(common.load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "kernels"])
def test_sft_with_local_model_and_dataset(flag: bool, tmp_path: Path, tiny_model: str) -> None:
    data = tmp_path / "rows.jsonl"
    Dataset.from_dict({"body": [f"row {i}: " + "text " * 30 for i in range(40)]}).to_json(data)
    options = ["--model_name_or_path", tiny_model, "--dataset_name", str(data), "--dataset_text_field", "body"]
    metrics = metrics_of("sft.py", tmp_path / "out", *SFT, *options, *(["--use_npu_kernels"] if flag else []))
    assert metrics["steps"] == 3
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 32


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "kernels"])
def test_grpo_with_local_model_and_dataset(flag: bool, tmp_path: Path, tiny_model: str) -> None:
    data = tmp_path / "rows.jsonl"
    Dataset.from_dict({"prompt": [f"{i}*2=" for i in range(40)], "answer": [2 * i for i in range(40)]}).to_json(data)
    options = ["--model_name_or_path", tiny_model, "--dataset_name", str(data)]
    metrics = metrics_of("grpo.py", tmp_path / "out", *GRPO, *options, *(["--use_npu_kernels"] if flag else []))
    assert metrics["steps"] == 3
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 32


TRL = dict.fromkeys(("trl_sft", "trl_dpo", "trl_kto", "trl_rloo"), "linear_logprob")


@pytest.mark.parametrize(("script", "op"), {**TRL, "trl_distill": "linear_divergence"}.items())
def test_trl_trainers_run_with_the_flag(script: str, op: str, tmp_path: Path) -> None:
    options = ["--per_device_train_batch_size", "4", "--use_npu_kernels", "--use_cpu"]
    metrics = metrics_of(f"{script}.py", tmp_path, *options)
    assert (metrics["steps"], len(metrics["losses"])) == (3, 3)
    assert op in metrics["kernels"]
    assert Qwen3ForCausalLM.from_pretrained(tmp_path).config.vocab_size == common.SMALLEST_VOCAB


def test_a_failing_run_leaves_no_metrics(tmp_path: Path) -> None:
    result = run("sft.py", tmp_path, "--sequence_length", "999999", "--text_characters", "100000")
    assert result.returncode != 0
    assert "sequence_length=999999 is more than" in result.output
    assert not (tmp_path / "metrics.json").exists()


def test_demo_reports_a_failing_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
    (tmp_path / "sft.py").write_text("print('the reason')\nraise SystemExit(3)\n")
    monkeypatch.setattr(demo, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output_dir", str(tmp_path / "out")])
    assert demo.main() == 1
    printed = capsys.readouterr().out
    assert "ended with status 3" in printed
    assert "the reason" in printed
    assert (tmp_path / "out" / "sft-plain" / "log.txt").read_text() == "the reason\n"


def test_demo_shows_what_the_flag_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    stand_in = """
import json, os, sys
from pathlib import Path
flag = "--use_npu_kernels" in sys.argv or os.environ["NPU_KERNELS_RUN"] != "0"
quality = {"first_loss": 9.0, "final_loss": 5.25, "eval_loss": 5.5, "first_reward": 0.4, "final_reward": 0.75}
common = {"held_out_reward": 0.7, "peak_memory_bytes": (10 if flag else 80) << 20, "seconds": 2.0, "device": "cpu"}
common |= {"generation_seconds": 1.5, "update_seconds": 0.5} if "grpo" in sys.argv[0] else {}
output = Path(sys.argv[sys.argv.index("--output_dir") + 1]) / "metrics.json"
output.write_text(json.dumps({**quality, **common, "tokens_per_second": 5.0, "kernels": "norms: 9" if flag else None}))
"""
    for script in ("sft.py", "grpo.py"):
        (tmp_path / script).write_text(stand_in)
    monkeypatch.setattr(demo, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output_dir", str(tmp_path / "out")])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NPU_KERNELS_RUN", "1")  # as `npu-kernels run --print-env` sets it for a shell
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("loss 9.000 -> 5.250") == printed.count("reward 0.400 -> 0.750") == 2
    assert printed.count("80 MiB") == printed.count("10 MiB") == 2
    assert printed.count("norms: 9") == 2
    assert printed.count("1.5 + 0.5") == 2
    assert "Why the two GRPO runs end at different rewards, from the same seed" in printed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'loss': '5.9', 'grad_norm': '1.2'}", "loss 5.900"),
        ("{'loss': '-0.001', 'reward': '0.75', 'epoch': '1'}", "reward 0.750"),
        ("{'loss': 5.9}", "loss 5.900"),
        ("{'eval_loss': '5.1'}", "eval_loss 5.100"),
        ("warming up: 3 steps", "warming up"),
        ("a warning", None),
    ],
)
def test_demo_progress(line: str, expected: str | None) -> None:
    assert demo.shown(line) == expected


def test_generation_is_timed() -> None:
    class Model:
        def generate(self, ids: int, *, fails: bool = False) -> int:
            time.sleep(0.01)
            if fails:
                raise RuntimeError("no")
            return ids + 1

    model = Model()
    with grpo.timed_generation(model) as seconds:
        assert model.generate(4) == 5
        with pytest.raises(RuntimeError, match="no"):
            model.generate(4, fails=True)
    assert "generate" not in vars(model)
    assert len(seconds) == 2
    assert all(0.01 <= each < 1 for each in seconds)
