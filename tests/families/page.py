"""`docs/models.md`: what is served in each family and what is left alone, as the full run has seen it; and the overview
of the families that people train most, which begins that page and stands in README.md."""

import collections
import json
import re
from collections.abc import Sequence
from pathlib import Path

import transformers

from npu_trainer_kernels.patching import PATCHES

from .compare import Result
from .tiny import LEFT_OUT, families, model_class

__all__ = [
    "PAGE",
    "README",
    "families_of",
    "overview",
    "page",
    "row",
    "rows_of",
    "unfit_row",
    "version_of",
    "with_overview",
    "write",
]

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "models.md", ROOT / "README.md"
_RESULTS = ROOT / "benchmarks" / "results"
# Steps of one card, plain and with the flag: all files since padding is left out.
MEASURED = (
    "2026-11-22-nvidia-h200-sixth-round-steps.json", "2026-11-22-nvidia-h200-seventh-round-steps.json",
    "2026-11-23-nvidia-h200-eighth-round-steps.json", "2026-11-25-nvidia-h100-twelfth-round-flash.json",
    "2026-11-26-nvidia-h100-fifteenth-round-hybrids.json", "2026-11-26-nvidia-h100-fifteenth-round-hybrids-plain.json",
)  # fmt: skip
_TASKS = {"sft-trainer": "SFT", "sft-trl": "SFT", "dpo-trl": "DPO", "grpo-trl": "GRPO"}
# By the name that people know: families of the page, which must be alike, and models of the benchmarks.
_KNOWN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Llama 2, 3": (("llama",), ("llama-1b",)),
    "Qwen3": (("qwen3",), ("qwen3-0.6b", "qwen3-4b")),
    "Gemma 3": (("gemma3_text",), ("gemma3-1b",)),
    "Mistral, Ministral, Qwen2, Gemma 2, Granite 3, SmolLM3": (
        ("mistral", "ministral", "ministral3", "qwen2", "gemma2", "granite", "smollm3"), ()),
    "Phi-3, Phi-4": (("phi3",), ()),
    "Qwen3-MoE": (("qwen3_moe",), ("qwen3-moe",)),
    "GPT-OSS, Mixtral, DeepSeek-V3, GLM-4.5": (("gpt_oss", "mixtral", "deepseek_v3", "glm4_moe"), ()),
    "Qwen3-Next, Qwen3.5": (("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("qwen3.5-0.8b",)),
    "Granite 4, Kimi-Linear": (("granitemoehybrid", "kimi_linear"), ()),
    "Llama 4": (("llama4_text",), ()),
    "Qwen3-VL, images and text": (("qwen3_vl (image-text)",), ()),
}  # fmt: skip
_COLUMNS = {
    "norms, residual adds": {"rms_norm", "gated_rms_norm", "layer_norm", "add_rms_norm"},
    "MLP, experts": {"swiglu", "moe_experts"},
    "rotation": {"rope"},
}
_LEGEND = """*Yes* means all such modules, *in part* that some keep their own code, *none* that the model has no such
module. *Trainer* is transformers' own; *TRL* stands for its SFT, DPO, KTO, RLOO and GRPO. *How much faster* is the time
of the plain step, with transformers' default attention, divided by the time with the flag: the least and the most of
all steps that were measured on one card, with padding and without. The table is made from the lines below and from
these files:"""
_BEGIN, _END = "<!-- models: python -m tests.families --overview -->", "<!-- end of models -->"
_HEAD = """# Models

{overview}

## Every family

What `apply_npu_kernels(model, ops=PATCHES)` serves in every causal and image-text family of transformers {version}, and
what it leaves as it is. `python -m tests.families --write` writes this page (`make test-families`). For each family it
makes a small model with random weights on the CPU, gives it text, and compares it with itself unpatched: loss and every
gradient, also with padding, under gradient checkpointing and through the head that TRL adds, logits, generated tokens,
and the model after `restore`. *Served* counts the modules in which an op ran; on a CPU `embedding`, `swiglu` and `rope`
are put in only when they are asked for by name. Towers for images and sound, which text does not reach, are not
counted. Of a body whose state runs along its rows the last column names the modules that carry it by segments of packed
rows, or else those that compute padding. *Not compared* is what the family's own code cannot do, with what it raises
unpatched.

The ops are {ops}.

| family | class | served | left alone, or not compared |
|---|---|---|---|
"""


def _name(task: str, kind: str) -> str:
    return f"{kind} ({task})" if task == "image-text" else kind


def _served(result: Result) -> str:
    count = collections.Counter(op for op, _ in result.ran)
    return ", ".join(f"{op} {count[op]}" for op in PATCHES if count[op]) or "nothing"


def _left(results: Sequence[Result]) -> str:
    """Reasons by op and class; what the whole model or op has comes without a class. Then stages that no op ran in."""
    report = results[-1].report
    if report is None:
        return "not patched: " + "; ".join(str(f) for f in results[-1].findings)
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in report.left_alone:
        kinds = reasons.setdefault((entry.op, entry.reason), [])
        if entry.kind and entry.kind not in kinds:
            kinds.append(entry.kind)
    lines = [f"{op}: {', '.join(kinds) or 'everywhere'}: {reason}" for (op, reason), kinds in reasons.items()]
    shown = (site for site in report.sites if site.op == "varlen_attention")
    bodies = (site for site in shown if site.form.proof.mixes or site.form.proof.carried)
    lines += [f"varlen_attention: {site.kind.__name__}: {site.form}" for site in bodies]
    # Without the place in the source.
    stages = {stage: raised.rpartition(" [")[0] for stage, raised in results[-1].left_out.items()}
    lines += [f"not compared: {stage}: {raised}" for stage, raised in stages.items()]
    return "<br>".join(lines).replace("|", "\\|").replace("\n", " ") or "nothing"


def row(results: Sequence[Result]) -> str:
    """A family's line of the page, from its comparison with every set of ops; the last one is all of them."""
    last = results[-1]
    cls = model_class(last.task, last.kind).__name__
    return f"| {_name(last.task, last.kind)} | {cls} | {_served(last)} | {_left(results)} |"


def unfit_row(task: str, kind: str, error: str) -> str:
    """The line of a family whose own code raises an error."""
    cls = model_class(task, kind).__name__
    return f"| {_name(task, kind)} | {cls} | nothing | not compared: its own code raises {error} |"


def rows_of(text: str) -> list[str]:
    """The lines of the families of a page."""
    return re.findall(r"^\| .+? \| \w+ \| .*\|$", text.partition("| family | class |")[2], re.MULTILINE)


def _cells(line: str) -> list[str]:
    """What is said of one family: a cell for each of `_COLUMNS`, padding, the head."""
    _, _, served, left = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
    ran = set(re.findall(r"(\w+) \d+", served))
    reasons = [reason.split(": ", 1) for reason in left.split("<br>")]
    alone = {reason[0] for reason in reasons}
    cells = []
    for ops in _COLUMNS.values():
        if ops & ran:
            cells.append("in part" if ops & alone else "yes")
        else:
            cells.append("no" if ops & alone else "none")
    in_state = any(
        op == "varlen_attention" and "padding is computed by" in why for op, *rest in reasons for why in rest
    )
    if "varlen_attention" in ran:
        cells.append("left out")
    else:
        cells.append("computed in attention and state layers alone" if in_state else "computed")
    heads = {"linear_cross_entropy": "Trainer", "linear_logprob": "TRL"}
    return [*cells, ", ".join(name for op, name in heads.items() if op in ran) or "no"]


def _gain(models: Sequence[str]) -> str:
    """How much faster the measured steps of these models are, from the slowest to the fastest of each task."""
    gains: dict[str, list[float]] = {}
    for name in MEASURED:
        steps: dict[tuple[str, str], dict[str, float]] = {}
        for row in json.loads((_RESULTS / name).read_text())["rows"]:
            if row["status"] == "ok" and row["shape"].partition(" ")[0] in models:
                steps.setdefault((row["op"], row["shape"]), {})[row["provider"]] = row["ms"]["median"]
        for (op, _), ms in steps.items():
            if {"plain", "flag"} <= set(ms):
                gains.setdefault(_TASKS[op], []).append(ms["plain"] / ms["flag"])
    return ", ".join(
        f"{task} {min(found):.2f}" + (f" to {max(found):.2f} x" if len(found) > 1 else " x")
        for task, found in gains.items()
    )


def overview(rows: Sequence[str]) -> str:
    """The table of one screen, from the lines of the families and from the results of the benchmarks."""
    lines = dict(zip(families_of("\n".join(rows)), rows, strict=True))
    table = [["models", *_COLUMNS, "padding", "head under", "how much faster"]]
    table.append(["---"] * len(table[0]))
    for name, (kinds, models) in _KNOWN.items():
        cells = {tuple(_cells(lines[kind])) for kind in kinds}
        if len(cells) > 1:
            raise ValueError(f"families that stand in one line must be alike; {name} has {sorted(cells)}")
        table.append([name, *cells.pop(), _gain(models) or "not measured"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def with_overview(text: str, table: str) -> str:
    """A page of which the part between the two comments is this table."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"the page has no place for the overview, between {_BEGIN!r} and {_END!r}")
    return f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}"


def page(rows: Sequence[str]) -> str:
    """The whole page."""
    left_out = "".join(f"- {kind}: {reason}.\n" for kind, reason in LEFT_OUT.items())
    files = "\n".join(f"- `benchmarks/results/{name}`" for name in MEASURED)
    first = with_overview(f"{_BEGIN}{_END}", overview(rows)) + f"\n\n{_LEGEND}\n\n{files}"
    head = _HEAD.format(overview=first, version=transformers.__version__, ops=", ".join(f"`{op}`" for op in PATCHES))
    return (
        head
        + "\n".join(rows)
        + "\n\nNot among them, since they are not trained on tokens by themselves:\n\n"
        + left_out
    )


def write(rows: Sequence[str]) -> None:
    """Writes the page, and the overview in the README."""
    PAGE.write_text(page(rows))
    README.write_text(with_overview(README.read_text(), overview(rows)))


def families_of(text: str) -> list[str]:
    """The families that a page or its lines have a line for, in this order."""
    return re.findall(r"^\| (.+?) \| \w+ \|", text.rpartition("| family | class |")[2], re.MULTILINE)


def version_of(text: str) -> str | None:
    """The version of transformers that a page was written with."""
    found = re.search(r"family of transformers ([\w.]+),", text)
    return found.group(1) if found else None


def names() -> list[str]:
    """The families that a page written now would have."""
    return [_name(*family) for family in families()]
