"""Writes the first table of docs/performance.md from a results file of training steps.

    python -m benchmarks --tables benchmarks/results/NAME.json

The table is between two comments in the page, the first of which names the file; `tests/benchmarks/test_tables.py`
compares the table with the file. Workloads that the file lacks have no row.
"""

from collections.abc import Sequence
from pathlib import Path

from .results import Row, read

__all__ = ["PAGE", "live", "source_of", "table", "what", "write"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
_BEGIN, _END = "<!-- steps of ", "<!-- end of steps -->"

_TRAINERS = {"sft-trainer": "SFT, Trainer", "sft-trl": "SFT, TRL's trainer", "dpo-trl": "DPO, TRL, a reference model",
             "grpo-trl": "GRPO update, TRL", "distil-trl": "distillation update, TRL"}  # fmt: skip
_MODELS = {"llama-1b": "Llama of 1B", "qwen3-0.6b": "Qwen3 of 0.6B", "qwen3-4b": "Qwen3 of 4B",
           "qwen2.5-1.5b": "Qwen2.5 of 1.5B", "qwen3.5-0.8b": "Qwen3.5 of 0.8B",
           "gemma3-1b": "Gemma 3 of 1B", "qwen3-moe": "Qwen3-MoE of 2B, 64 experts"}  # fmt: skip
_COLUMNS = {"plain": "plain", "plain-flash": "plain, flash attention", "flag": "with the flag",
         "flag-captured": "every layer captured", "flag-eager": "nothing captured",
         "flag-body": "the body captured in any case",
         "flag-unshared": "prompt in every row", "flag-padded": "padding computed", "flag-tiled": "MLP in tiles",
         "liger": "Liger-Kernel", "liger-flash": "Liger-Kernel, flash attention", "unsloth": "Unsloth"}  # fmt: skip


def what(row: Row) -> str:
    """Describes a row in words. Old rows have no fields for lengths."""
    size, sizes = row["shape"].partition(" ")[0], row["sizes"]
    batch, length, prompt, up_to = sizes["batch"], sizes["length"], sizes["prompt"], sizes.get("lengths")
    model = f"{_TRAINERS.get(row['op'], row['op'])}, {_MODELS.get(size, size)}"
    model += f", LoRA of rank {sizes['lora']}" if sizes.get("lora") else ""
    model += ", layers checkpointed" if sizes.get("checkpointing") else ""
    model += ", weights in fp32" if sizes.get("float32_weights") else ""
    if sizes.get("least"):
        return f"{model}, {batch} pairs of {prompt + sizes['least']} to {prompt + length} tokens"
    if not up_to:
        tokens = f"({prompt} + {length})" if prompt else str(length)
        return f"{model}, {batch} x {tokens} tokens"
    if not prompt:
        return f"{model}, {batch} x up to {length} tokens"
    if sizes["group"] >= batch:
        up_to = "" if sizes.get("whole_prompts", True) else "up to "
        return f"{model}, one prompt of {up_to}{prompt} tokens and {batch} x up to {length}"
    return f"{model}, {batch} x (up to {prompt} + up to {length}) tokens"


def live(row: Row) -> str:
    """Returns the share of a row's positions that hold a token."""
    if not row["sizes"].get("least") and not row["sizes"].get("lengths"):
        return "all"
    return f"{row['live_share']:.0%}" if "live_share" in row else "not counted"


def _thousands(row: Row) -> str:
    return f"{row['tokens_per_second'] / 1e3:.1f}k"


def _gib(row: Row) -> str:
    return f"{row['peak_bytes'] / (1 << 30):.2f}"


def _workloads(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Returns for each workload that plain and the flag have run the rows by variant."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["group"] == "end-to-end" and row["status"] == "ok":
            found.setdefault((row["op"], row["shape"]), {})[row["provider"]] = row
    return [of for of in found.values() if {"plain", "flag"} <= set(of)]


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _of_runs(of: dict[str, Row], shown: Sequence[str]) -> list[list[str]]:
    """Returns the lines of a workload whose steps had lengths of their own: the mean of its steps, and by how much that
    is longer than the device is busy; and the mean of all steps, with the first ones and what was captured in them."""
    runs = {name: row for name, row in of.items() if "mean_ms" in row}
    if not runs:
        return []
    means = {
        name: f"{row['mean_ms']:.1f}" + ("" if row["busy_ms"] is None else f" ({row['busy_ratio']:.2f} x busy)")
        for name, row in runs.items()
    }
    every = {name: f"{row['mean_all_ms']:.1f}" for name, row in runs.items()}
    titles = ("ms a step", means), ("from the fourth step on", every)
    return [["", "", title, *(cells.get(name, "") for name in shown)] for title, cells in titles]


def _table(rows: Sequence[Row]) -> list[str]:
    """Returns a table with lines for each workload, of speed, time and memory, without columns that have no
    measurement."""
    workloads = _workloads(rows)
    shown = {name: title for name, title in _COLUMNS.items() if any(name in of for of in workloads)}
    lines = []
    for of in workloads:
        plain = of["plain"]["tokens_per_second"]
        times = {
            name: _thousands(row) + (f" ({row['tokens_per_second'] / plain:.2f} x)" if name != "plain" else "")
            for name, row in of.items()
        }
        lines.append([what(of["plain"]), live(of["plain"]), "tokens/s", *(times.get(name, "") for name in shown)])
        peaks = [_gib(of[name]) if name in of else "" for name in shown]
        lines += _of_runs(of, list(shown))
        lines.append(["", "", "peak GiB", *peaks])
    return _lines(["run", "positions with a token", "", *shown.values()], lines)


def table(file: Path) -> str:
    """Returns the page's text for a results file: the table, the device and the versions."""
    meta, rows = read(file)
    packages = meta["packages"]
    with_what = f"{meta['device']['name']}, torch {packages['torch']}, Triton {packages['triton']}"
    return "\n".join([*_table(rows), "", f"{with_what}: `{_name(file)}`."])


def _name(file: Path) -> str:
    """Returns a results file's path in the repository. Raises `ValueError` for a file in another folder."""
    file = file.resolve()
    if file.parent != ROOT / "benchmarks" / "results":
        raise ValueError(f"tables are of files in benchmarks/results/, where readers find them; got {file}")
    return file.relative_to(ROOT).as_posix()


def _parts() -> tuple[str, str, str, str]:
    """Splits the page into the text before its table, the name of the results file, the table, and the text after."""
    if not PAGE.is_file():
        raise ValueError(f"tables are written in a checkout of the repository; {PAGE} is not there")
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    source, closed, rest = rest.partition(" -->\n")
    written, end, after = rest.partition(_END)
    if not (begin and closed and end):
        raise ValueError(f"{PAGE.name} has no table between {_BEGIN!r} and {_END!r}")
    return before, source, written.strip(), after


def source_of() -> tuple[Path, str]:
    """Returns the results file that the page names, and the page's table."""
    _, source, written, _ = _parts()
    return ROOT / source, written


def write(file: Path) -> list[str]:
    """Rewrites the table, and returns a line that says what was written.

    Raises:
        ValueError: the file is not in `benchmarks/results/` or has no training steps, or the page has no place for it.
    """
    name, count = _name(file), len(_workloads(read(file)[1]))
    if not count:
        raise ValueError(f"{file.name} has no training step that both plain and the flag have run")
    before, _, _, after = _parts()
    PAGE.write_text(f"{before}{_BEGIN}{name} -->\n\n{table(file)}\n\n{_END}{after}", encoding="utf-8")
    return [f"{PAGE.name}: {count} runs of {name}"]
