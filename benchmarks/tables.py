"""Writes the first tables of README.md and docs/performance.md from a results file of training steps.

    python -m benchmarks --tables benchmarks/results/NAME.json

Each table is between two comments in its page, the first of which names the file; `tests/benchmarks/test_tables.py`
compares the table with the file. Workloads that the file lacks have no row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from .results import Row, read

__all__ = ["PAGES", "source_of", "table_for", "write"]

ROOT = Path(__file__).parents[1]
_BEGIN, _END = "<!-- steps of ", "<!-- end of steps -->"

_TRAINERS = {"sft-trainer": "SFT, Trainer", "sft-trl": "SFT, TRL's trainer", "dpo-trl": "DPO, TRL, a reference model",
             "grpo-trl": "GRPO update, TRL", "distil-trl": "distillation update, TRL"}  # fmt: skip
_MODELS = {"llama-1b": "Llama of 1B", "qwen3-0.6b": "Qwen3 of 0.6B", "qwen3-4b": "Qwen3 of 4B",
           "gemma3-1b": "Gemma 3 of 1B", "qwen3-moe": "Qwen3-MoE of 2B, 64 experts"}  # fmt: skip
# The columns of the README, and those of the performance page.
_SHORT = {"plain": "plain", "plain-flash": "plain, flash attention", "flag": "with the flag"}
_LONG = {"plain": "plain", "plain-flash": "plain, flash attention", "flag": "with the flag",
         "flag-captured": "every layer captured", "flag-eager": "no layer captured",
         "flag-unshared": "prompt in every row", "flag-padded": "padding computed", "flag-tiled": "MLP in tiles",
         "liger": "Liger-Kernel", "liger-flash": "Liger-Kernel, flash attention", "unsloth": "Unsloth"}  # fmt: skip


def _what(row: Row) -> str:
    """Describes a row in words. Old rows have no field for lengths."""
    size, sizes = row["shape"].partition(" ")[0], row["sizes"]
    batch, length, prompt, up_to = sizes["batch"], sizes["length"], sizes["prompt"], sizes.get("lengths")
    model = f"{_TRAINERS.get(row['op'], row['op'])}, {_MODELS.get(size, size)}"
    model += f", LoRA of rank {sizes['lora']}" if sizes.get("lora") else ""
    model += ", layers checkpointed" if sizes.get("checkpointing") else ""
    if sizes["least"]:
        return f"{model}, {batch} pairs of {prompt + sizes['least']} to {prompt + length} tokens"
    if not up_to:
        tokens = f"({prompt} + {length})" if prompt else str(length)
        return f"{model}, {batch} x {tokens} tokens"
    if not prompt:
        return f"{model}, {batch} x up to {length} tokens"
    if sizes["group"] >= batch:
        return f"{model}, one prompt of {prompt} tokens and {batch} x up to {length}"
    return f"{model}, {batch} x (up to {prompt} + up to {length}) tokens"


def _live(row: Row) -> str:
    if not row["sizes"]["least"] and not row["sizes"].get("lengths"):
        return "all"
    return f"{row['live_share']:.0%}" if "live_share" in row else "not counted"


def _thousands(row: Row) -> str:
    return f"{row['tokens_per_second'] / 1e3:.1f}k"


def _gib(row: Row, digits: int = 1) -> str:
    return f"{row['peak_bytes'] / (1 << 30):.{digits}f}"


def _workloads(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Returns for each workload that plain and the flag have run the rows by variant."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["group"] == "end-to-end" and row["status"] == "ok":
            found.setdefault((row["op"], row["shape"]), {})[row["provider"]] = row
    return [of for of in found.values() if {"plain", "flag"} <= set(of)]


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _shown(columns: dict[str, str], workloads: Sequence[dict[str, Row]]) -> dict[str, str]:
    return {name: title for name, title in columns.items() if any(name in of for of in workloads)}


def _short(rows: Sequence[Row]) -> list[str]:
    """Returns a table with one line for each workload, without columns that have no measurement."""
    workloads = _workloads(rows)
    shown = _shown(_SHORT, workloads)
    lines = []
    for of in workloads:
        cells = [f"{_thousands(of[name])} tokens/s, {_gib(of[name])} GiB" if name in of else "" for name in shown]
        speed = of["plain"]["ms"]["median"] / of["flag"]["ms"]["median"]
        lines.append([_what(of["plain"]), _live(of["plain"]), *cells, f"{speed:.2f} x"])
    return _lines(["run, bf16", "positions with a token", *shown.values(), ""], lines)


def _long(rows: Sequence[Row]) -> list[str]:
    """Returns a table with two lines for each workload, speed and memory, without columns that have no measurement."""
    workloads = _workloads(rows)
    shown = _shown(_LONG, workloads)
    lines = []
    for of in workloads:
        plain = of["plain"]["ms"]["median"]
        times = {
            name: _thousands(row) + (f" ({plain / row['ms']['median']:.2f} x)" if name != "plain" else "")
            for name, row in of.items()
        }
        lines.append([_what(of["plain"]), _live(of["plain"]), "tokens/s", *(times.get(name, "") for name in shown)])
        peaks = [_gib(of[name], 2) if name in of else "" for name in shown]
        lines.append(["", "", "peak GiB", *peaks])
    return _lines(["run", "positions with a token", "", *shown.values()], lines)


PAGES: dict[Path, Callable[[Sequence[Row]], list[str]]] = {
    ROOT / "README.md": _short, ROOT / "docs" / "performance.md": _long
}  # fmt: skip


def table_for(page: Path, file: Path) -> str:
    """Returns a page's text for a results file: the table, the device and the versions."""
    meta, rows = read(file)
    packages = meta["packages"]
    with_what = f"{meta['device']['name']}, torch {packages['torch']}, Triton {packages['triton']}"
    return "\n".join([*PAGES[page](rows), "", f"{with_what}: `{_name(file)}`."])


def _name(file: Path) -> str:
    """Returns a results file's path in the repository. Raises `ValueError` for a file in another folder."""
    file = file.resolve()
    if file.parent != ROOT / "benchmarks" / "results":
        raise ValueError(f"tables are of files in benchmarks/results/, where readers find them; got {file}")
    return file.relative_to(ROOT).as_posix()


def _parts(page: Path) -> tuple[str, str, str, str]:
    """Splits a page into the text before its table, the name of the results file, the table, and the text after it."""
    if not page.is_file():
        raise ValueError(f"tables are written in a checkout of the repository; {page} is not there")
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    source, closed, rest = rest.partition(" -->\n")
    table, end, after = rest.partition(_END)
    if not (begin and closed and end):
        raise ValueError(f"{page.name} has no table between {_BEGIN!r} and {_END!r}")
    return before, source, table.strip(), after


def source_of(page: Path) -> tuple[Path, str]:
    """Returns the results file that a page names, and the page's table."""
    _, source, table, _ = _parts(page)
    return ROOT / source, table


def write(file: Path) -> list[str]:
    """Rewrites the tables, and returns a line for each page.

    Raises:
        ValueError: the file is not in `benchmarks/results/` or has no training steps, or a page has no place for them.
    """
    name, count = _name(file), len(_workloads(read(file)[1]))
    if not count:
        raise ValueError(f"{file.name} has no training step that both plain and the flag have run")
    done = []
    for page in PAGES:
        before, _, _, after = _parts(page)
        text = f"{before}{_BEGIN}{name} -->\n\n{table_for(page, file)}\n\n{_END}{after}"
        page.write_text(text, encoding="utf-8")
        done.append(f"{page.name}: {count} runs of {name}")
    return done
