"""docs/coming-from.md: its changes of scripts run, its figures are those of results files, its messages are ours."""

import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from benchmarks import tables
from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.patching.patch import others_kernel
from tests.cli.training import make_model
from tests.models import batch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coming-from.md"
RESULTS = ROOT / "benchmarks" / "results"
TEXT = PAGE.read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
NAMES = ["liger trainer", "liger loop", "liger function", "unsloth", "torch.compile"]
SIXTH, SEVENTH, EIGHTH, FLASH, UNSLOTH, FOURTH = (
    f"2026-11-{name}.json"
    for name in (
        "22-nvidia-h200-sixth-round-steps",
        "22-nvidia-h200-seventh-round-steps",
        "23-nvidia-h200-eighth-round-steps",
        "25-nvidia-h100-twelfth-round-flash",
        "23-nvidia-h200-eighth-round-unsloth",
        "21-nvidia-h200-fourth-round",
    )
)
STEPS = [
    (SIXTH, "sft-trainer", "llama-1b 8x2048"),
    (SEVENTH, "sft-trl", "llama-1b 8x2048"),
    (SEVENTH, "sft-trainer", "gemma3-1b 4x2048"),
    (SIXTH, "sft-trainer", "qwen3-moe 8x2048"),
    (FLASH, "sft-trainer", "llama-1b 8x..2048 exponential"),
    (SIXTH, "dpo-trl", "llama-1b 8x2x(16+14..884)"),
    (FOURTH, "grpo-trl", "qwen3-0.6b 8x(128+4096)"),
    (SIXTH, "grpo-trl", "qwen3-0.6b 8x(128+..4096 even), 2 a prompt"),
    (FLASH, "grpo-trl", "qwen3-0.6b 8x(128+..4096 exponential), 2 a prompt"),
    (EIGHTH, "grpo-trl", "qwen3-0.6b 8x(2048+..1024 exponential), 8 a prompt"),
    (SIXTH, "grpo-trl", "qwen3-4b 8x(2048+..1024 exponential), 8 a prompt lora 16"),
]
# Where each message of the page's last section comes from.
MESSAGES = [f"npu_trainer_kernels/{name}.py" for name in ("patching/apply", "callback")]


def halves(diff: str) -> tuple[str, str]:
    """A script before the change, and after it."""
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    assert {sign for sign, _ in lines} <= {" ", "-", "+", ""}
    before, after = ("\n".join(text for sign, text in lines if sign != other) + "\n" for other in "+-")
    return before, after


def test_every_change_has_a_name():
    assert len(DIFFS) == len(NAMES)


@pytest.mark.parametrize("diff", DIFFS, ids=NAMES)
def test_the_script_runs_after_the_change(tmp_path, monkeypatch, capsys, diff):
    before, after = halves(diff)
    compile(before, "before", "exec")
    assert re.search("liger|unsloth|torch_compile", before)
    assert not re.search("liger|unsloth|torch_compile", after)
    monkeypatch.chdir(tmp_path)
    model = make_model(tmp_path / "model")
    # What the scripts take from around them. The trainers' defaults would load a real model in bf16 onto a card.
    few = 'output_dir="out", max_steps=2, use_cpu=True, bf16=False, report_to="none"'
    code = after.replace('"Qwen/Qwen3-0.6B"', repr(model)).replace('output_dir="out"', few)
    given = {
        "data": Dataset.from_dict({"text": [f"{a}+3={a + 3}" for a in range(16)]}),
        "batch": batch(),
        "head": torch.nn.Linear(8, 40, bias=False),
        "hidden": torch.randn(6, 8, requires_grad=True),
        "labels": torch.arange(6),
    }
    exec(compile(code, str(PAGE), "exec"), given)
    if "trainer" in given:
        (callback,) = (c for c in given["trainer"].callback_handler.callbacks if isinstance(c, NpuKernelsCallback))
        assert {"rms_norm", "linear_logprob"} <= set(callback.report().ran)
        assert given["trainer"].state.global_step == 2
    elif "kernels" in given:
        assert {"rms_norm", "linear_cross_entropy"} <= set(given["kernels"].report().ran)
        assert "NPU kernels on cpu" in capsys.readouterr().out
        given["kernels"].restore()
    else:
        expected = torch.nn.functional.cross_entropy(given["hidden"] @ given["head"].weight.T, given["labels"])
        assert given["loss"].item() == pytest.approx(expected.item(), rel=1e-5)
        assert given["head"].weight.grad is not None


def rows_of(file: str, op: str, shape: str, **where) -> dict[str, dict]:
    rows = json.loads((RESULTS / file).read_text())["rows"]
    given = {"op": op, "shape": shape, "status": "ok", **where}
    return {row["provider"]: row for row in rows if given.items() <= row.items()}


def beside_liger() -> list[str]:
    columns = ["run", "positions with a token", "plain", "Liger-Kernel", "this package", "gain", "GiB", "file"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    files = list(dict.fromkeys(file for file, _, _ in STEPS))
    for file, op, shape in STEPS:
        of = rows_of(file, op, shape)
        flash = "liger-flash" in of
        three = [of["plain-flash" if flash else "plain"], of["liger-flash" if flash else "liger"], of["flag"]]
        ms = [row["ms"]["median"] for row in three]
        what = tables.what(three[0]) + (" *" if flash else "")
        times = " | ".join(f"{each:.1f} ms" for each in ms)
        peaks = ", ".join(f"{row['peak_bytes'] / 2**30:.1f}" for row in three)
        gain, live = ms[1] / ms[2], tables.live(three[0])
        lines.append(f"| {what} | {live} | {times} | {gain:.2f} x | {peaks} | {files.index(file) + 1} |")
    devices = [json.loads((RESULTS / file).read_text())["meta"]["device"]["name"] for file in files]
    names = [
        f"{i}. {card}: `benchmarks/results/{file}`"
        for i, (card, file) in enumerate(zip(devices, files, strict=True), 1)
    ]
    return [*lines, "", *names]


def beside_unsloth() -> list[str]:
    lines = ["| run | positions with a token | plain | this package | Unsloth |", "|---|---|---|---|---|"]
    for shape in (STEPS[8][2], STEPS[9][2]):
        of = rows_of(EIGHTH, "grpo-trl", shape) | {"unsloth": rows_of(UNSLOTH, "grpo-trl", shape)["unsloth"]}
        ms = " | ".join(f"{of[name]['ms']['median']:.1f}" for name in ("plain", "flag", "unsloth"))
        lines.append(f"| {tables.what(of['plain'])} | {tables.live(of['plain'])} | {ms} |")
    return [*lines, "", f"Files: `benchmarks/results/{EIGHTH}`,", f"`benchmarks/results/{UNSLOTH}`."]


def beside_compile() -> list[str]:
    names = {"ours-triton": "this package", "torch.compile": "torch.compile", "liger": "Liger-Kernel"}
    lines = [f"| tokens | {' | '.join(names.values())} |", f"|{'---|' * (len(names) + 1)}"]
    for tokens in (4096, 8192, 16384):
        of = rows_of(FOURTH, "linear_cross_entropy", f"BT={tokens} H=4096 V=128256", mode="both")
        cells = [f"{of[n]['ms']['median']:.1f} ms, {of[n]['extra_bytes'] / 2**30:.2f}" for n in names]
        lines.append(f"| {tokens} | {' | '.join(cells)} |")
    return [*lines, "", f"`benchmarks/results/{FOURTH}`, inputs of a standard deviation of 1."]


@pytest.mark.parametrize(
    ("name", "made"),
    [("Liger-Kernel", beside_liger), ("Unsloth", beside_unsloth), ("torch.compile", beside_compile)],
)
def test_the_tables_are_what_was_measured(name, made):
    """A table that is wrong stands in the message as it should be."""
    table = TEXT.partition(f"<!-- beside {name} -->\n")[2].partition("<!-- end -->")[0].strip()
    assert table == "\n".join(made())


def test_what_the_page_says_of_the_gains():
    """Under the table, of batches without padding and models without experts; and of memory."""
    gain, more = {}, []
    for file, op, shape in STEPS:
        of = rows_of(file, op, shape)
        liger = of.get("liger-flash", of.get("liger"))
        gain[op, shape] = liger["ms"]["median"] / of["flag"]["ms"]["median"]
        more += [shape] if of["flag"]["peak_bytes"] > liger["peak_bytes"] else []
    whole = [value for (_, shape), value in gain.items() if ".." not in shape and "moe" not in shape]
    assert f"from {min(whole):.2f} to {max(whole):.2f} x" in TEXT
    assert f"from {min(set(gain.values()) - set(whole)):.2f} to {max(gain.values()):.2f} x" in TEXT
    assert [shape.partition(" ")[0] for shape in more] == ["qwen3-moe"]


def test_messages_are_those_of_the_code():
    sources = re.sub(r'"\s*\n\s*f?"', "", "\n".join((ROOT / name).read_text() for name in MESSAGES))
    section = TEXT.partition("## How the report names them")[2]
    blocks = re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    reasons, flag, inside, compiled = (block.splitlines() for block in blocks)
    foreign = [type("Foreign", (), {"__module__": f"{package}.any"}) for package in ("liger_kernel", "unsloth")]
    assert reasons == [f"its forward is {others_kernel(each)}" for each in foreign]
    (start, end) = inside[0].split("LlamaForCausalLM")
    assert start in sources
    assert end == f" may have no calls: {reasons[0]}"
    assert " may have no calls: " in sources
    assert flag[0] in sources
    assert compiled[0] in sources
