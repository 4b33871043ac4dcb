"""README, CONTRIBUTING and docs/ speak of what is there: links, files, names, commands, messages.

Code is checked as code in `...` and in fenced blocks; docs/ascend-report.md and docs/models.md are written by tools,
and left out.
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import npu_trainer_kernels
from npu_trainer_kernels import backends, cli, ops
from npu_trainer_kernels.cli._run import split
from npu_trainer_kernels.evidence.table import TABLE
from npu_trainer_kernels.patching import PATCHES

ROOT = Path(__file__).resolve().parents[1]
HOMES = (ROOT, ROOT / "npu_trainer_kernels")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in ("ascend-report.md", "models.md")),
]
MODULES = ("backends", "cli", "closeness", "device", "ops", "tiling", "verify", "descriptions")
# What commands make, and a checkout does not have.
MADE = {"dist/", "site/", "convergence/results/", "runs/"}
# Models and data sets of the hub look like files.
HUB = re.compile(r"(Qwen|meta-llama|trl-lib|THUDM)/")
# Names of other libraries, and of the reader's own.
FOREIGN = re.compile(
    r"set_env|bishengir|npu_rms_norm|lm_head|torch\.|trl\.|resize_token_embeddings|mkdocs|my_\w+|fully_shard|dist_checkpoint|use_liger|enable_liger_kernel|train_tokens|TRITON_|AutoLiger|Liger[A-Z]|apply_liger|liger_|FastLanguageModel"
)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@functools.cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)


def code(page: Path) -> list[str]:
    """What stands between backticks in the prose, on one line each."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose(page))]


def commands(page: Path) -> list[str]:
    """Lines of fenced blocks, and code in the prose."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```$", text(page), flags=re.DOTALL | re.MULTILINE)
    return [*(line for block in fenced for line in block.splitlines()), *code(page)]


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@functools.cache
def sources() -> str:
    """All Python of the repository, with string literals that follow one another joined."""
    folders = ("npu_trainer_kernels", "tests", "convergence", "benchmarks", "examples", "docs")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")) if file != Path(__file__)]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


@functools.cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", sources()))


@pages
def test_links_lead_somewhere(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in slugs(file)):
            wrong.append(target)
    assert not wrong


@pages
def test_files_exist(page):
    wrong = []
    for name in code(page):
        is_file = re.fullmatch(r"[\w.-]+(/[\w.-]+)*\.\w+", name) and ("/" in name or name.endswith(".py"))
        is_folder = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", name)
        made = name in MADE or HUB.match(name)
        if (is_file or is_folder) and not made and not any((folder / name).exists() for folder in HOMES):
            wrong.append(name)
    assert not wrong


@pages
def test_names_exist(page):
    """Dotted names of the package's modules are looked up; other identifiers occur in the code."""
    wrong = []
    for name in code(page):
        name = re.sub(r"\(.*\)$", "", name)
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name) or FOREIGN.match(name):
            continue
        first, *rest = name.removeprefix("npu_trainer_kernels.").split(".")
        if first in MODULES and rest and rest[-1] not in ("py", "md"):
            found = importlib.import_module(f"npu_trainer_kernels.{first}")
            for part in rest:
                found = getattr(found, part, None)
            if found is None:
                wrong.append(name)
        elif ("_" in name or re.search(r"[a-z][A-Z]", name)) and name.rpartition(".")[2] not in words():
            wrong.append(name)
    assert not wrong


@pages
def test_names_are_in_the_files_that_are_said_to_have_them(page):
    said = re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w/.-]+\.py)`", prose(page))
    said += [(name, file) for file, name in re.findall(r"`([\w/.-]+\.py)`\s+\(`(\w+)`", prose(page))]
    for name, file in said:
        path = next(f / file for f in HOMES if (f / file).exists())
        assert re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")), f"{name} is not in {file}"


@pages
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for command in commands(page):
        for names in re.findall(r"^(?:\$ )?make((?: [a-z][\w-]*)+)(?:\s+#.*)?$", command.strip()):
            assert set(names.split()) <= targets, command


def _options(command: str) -> set[str]:
    """The options of a subcommand of npu-kernels, from its parser; `bench` has those of the benchmark runner."""
    if command == "bench":
        return set(re.findall(r'"(--[\w-]+)"', (ROOT / "benchmarks" / "options.py").read_text()))
    (subparsers,) = (a for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return set(subparsers.choices[command]._option_string_actions)


@pages
def test_commands_exist(page):
    known = {"convergence": "convergence/__main__.py", "benchmarks": "benchmarks/options.py"}
    for command in commands(page):
        for name, rest in re.findall(r"\bnpu-kernels ([a-z]+)((?: [^#|]*)?)", command):
            if name == "run":  # the rest is the user's command
                rest = " ".join(split(rest.replace(")", " ").replace('"', " ").split())[0])
            assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= _options(name), command
        for name, rest in re.findall(r"python -m (convergence|benchmarks)((?: [^#|]*)?)", command):
            written = set(re.findall(r'"(--[\w-]+)"', (ROOT / known[name]).read_text()))
            assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= written, command
        for script in re.findall(r"python ((?:examples|docs|tests)/\S+\.py)", command):
            assert (ROOT / script).exists(), command


@pages
def test_extras_and_variables_exist(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"npu_trainer_kernels\[([\w,]+)\]", text(page)):
        assert set(names.split(",")) <= set(extras)
    for variable in re.findall(r"NPU_KERNELS_[A-Z_]+", text(page)):
        assert variable in words()


def test_messages_are_those_of_the_code():
    """In bold: our own messages, with `...` for what differs."""
    messages = [
        " ".join(found.split()) for found in re.findall(r"\*\*`([^`]+)`\*\*", text(ROOT / "docs/troubleshooting.md"))
    ]
    assert len(messages) > 20
    for message in messages:
        for piece in filter(None, (piece.strip() for piece in message.split("..."))):
            assert piece in sources(), f"{piece!r} of {message!r}"


def _public(module) -> Iterator[tuple[str, object]]:
    # `__all__` of the package leaves out what needs TRL.
    for name in dir(module) if module is npu_trainer_kernels else module.__all__:
        thing = getattr(module, name)
        yield name, thing
        if inspect.isclass(thing) and thing.__module__.startswith("npu_trainer_kernels"):
            for member, value in vars(thing).items():
                overrides = any(hasattr(base, member) for base in thing.__mro__[1:])
                if not member.startswith("_") and not overrides and (callable(value) or isinstance(value, property)):
                    yield f"{name}.{member}", value


@pytest.mark.parametrize("module", [npu_trainer_kernels, ops], ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module):
    page = text(ROOT / "docs" / "api.md")
    for name, thing in _public(module):
        assert thing.__doc__, f"{name} has no docstring"
        assert re.search(rf"\b{name.partition('.')[0]}\b", page), f"{name} is not in docs/api.md"


FIRST_TABLE = {
    "SFT, Llama of 1B, no padding": ("sft-trainer", "llama-1b 8x2048"),
    "SFT, Llama of 1B, 45%": ("sft-trainer", "llama-1b 8x..2048 exponential"),
    "SFT, Qwen3-MoE": ("sft-trainer", "qwen3-moe 8x2048"),
    "DPO, Llama": ("dpo-trl", "llama-1b 8x2x(16+14..884)"),
    "GRPO update, Qwen3 of 0.6B, 38%": ("grpo-trl", "qwen3-0.6b 8x(128+..4096 exponential), 2 a prompt"),
    "GRPO update, Qwen3 of 4B": ("grpo-trl", "qwen3-4b 8x(2048+..1024 exponential), 8 a prompt lora 16"),
}


def test_the_first_table_of_the_readme_is_what_was_measured():
    """Each gain is the ratio of two medians of one file, the better Liger-Kernel where there are two."""
    first = text(ROOT / "README.md").split("## Install")[0]
    files = {
        "": "2026-11-22-nvidia-h200-sixth-round-steps.json",
        "*": "2026-11-25-nvidia-h100-twelfth-round-flash.json",
    }
    rows = re.findall(r"^\| (\w.*?)( \*)? \| (\S+) x \| (.*?) \| (\S+) x \| (\S+), (\S+) \|$", first, re.MULTILINE)
    assert len(rows) == len(FIRST_TABLE)
    for what, star, plain, flash, liger, *peaks in rows:
        (workload,) = (value for name, value in FIRST_TABLE.items() if what.startswith(name))
        measured = json.loads((ROOT / "benchmarks" / "results" / files[star.strip()]).read_text())["rows"]
        of = {r["provider"]: r for r in measured if (r["op"], r["shape"]) == workload and r["status"] == "ok"}
        ms = {name: r["ms"]["median"] / of["flag"]["ms"]["median"] for name, r in of.items()}
        assert plain == f"{ms['plain']:.2f}", what
        assert flash == f"{ms['plain-flash']:.2f} x" if star else flash in ("the same", "not measured"), what
        assert liger == f"{min(ms[name] for name in ms if name.startswith('liger')):.2f}", what
        assert peaks == [f"{of[name]['peak_bytes'] / 2**30:.1f}" for name in ("plain", "flag")], what


def test_the_run_of_the_readme_is_what_was_measured():
    file = ROOT / "benchmarks" / "results" / "2026-11-28-nvidia-h200-seventeenth-round-update.json"
    rows = {row["provider"]: row for row in json.loads(file.read_text())["rows"]}
    said = re.search(
        r"takes\s(\d+) ms plain, (\d+) with flash attention and (\d+) with the flag \(medians\); "
        r"(\d+) on average of its steps 11 to (\d+),",
        text(ROOT / "README.md"),
    )
    medians = [f"{rows[name]['ms']['median']:.0f}" for name in ("plain", "plain-flash", "flag")]
    assert list(said.groups()) == [*medians, f"{rows['flag']['mean_ms']:.0f}", str(len(rows["flag"]["each_ms"]) + 1)]


def test_the_first_figures_of_the_site_are_those_of_the_readme():
    begins = text(ROOT / "docs" / "index.md").split("\n\n")[1]
    figures = re.findall(r"\d+\.\d+", begins)
    assert figures == ["1.34", "23.6", "57.2"]
    row = next(
        line for line in text(ROOT / "README.md").splitlines() if line.startswith("| SFT, Llama of 1B, no padding")
    )
    assert "the same" in row
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", row), f"{figure} is not in {row}"


def backends_in(cell: str) -> str:
    """The backend that a cell of README's table says is used, unless somebody names another one."""
    words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).split(";")[0].split(":")[0]
    if words.endswith("by name") or words.startswith("the model's own code"):
        return "the model's"
    first = words.removeprefix("chunked ").split()[0].lower()
    return "torch" if first == "pytorch's" else first


def test_the_backends_in_the_readme_are_those_of_the_table():
    table = text(ROOT / "README.md").split("## Replaced operations")[1].split("*Vendor* is")[0]
    rows = re.findall(r"^\| (`.*?`) \| .*? \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    named = {
        op: dict(zip(("npu", "cuda", "cpu"), cells, strict=True))
        for several, *cells in rows for op in re.findall(r"`(\w+)`", several)
    }  # fmt: skip
    assert named.keys() >= set(PATCHES)
    for op, cells in named.items():
        for kind, cell in cells.items():
            first = TABLE[op].order[kind][0].backend
            expected = "the model's" if kind in TABLE[op].keeps_plain else first
            assert backends_in(cell) == expected, f"{op} on {kind}: README says {cell!r}, the table {expected}"


def test_readme_names_every_op():
    assert {op for op in PATCHES if f"`{op}`" not in text(ROOT / "README.md")} == set()


def test_the_memory_picture_is_what_was_measured():
    spec = importlib.util.spec_from_file_location("memory", ROOT / "docs" / "figures" / "memory.py")
    memory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(memory)
    memory.check()


def test_the_picture_of_the_logs_has_the_columns_of_the_page():
    """All but those of several ranks and of captured bodies, which its runs have not."""
    named = set(re.findall(r"^\| `(\w+)` \|", text(ROOT / "docs" / "ways-in" / "logging.md"), flags=re.MULTILINE))
    runs = json.loads((ROOT / "docs" / "figures" / "logged.json").read_text())
    assert {name for entries in runs.values() for entry in entries for name in entry} == (
        named - {"bodies_replayed", "graphs_saved_seconds"} | {"step", "loss"}
    )
    plain, ours = ([entry["loss"] for entry in runs[name]] for name in ("sft_plain", "sft"))
    apart = max(abs(new / old - 1) for new, old in zip(ours, plain, strict=True))
    assert f"at most {apart:.1e} of it" in text(ROOT / "docs" / "ways-in" / "logging.md")


@pages
def test_pages_are_in_the_site(page):
    if page.is_relative_to(ROOT / "docs"):
        assert f" {page.relative_to(ROOT / 'docs')}\n" in (ROOT / "mkdocs.yml").read_text()


@pages
def test_python_is_python(page):
    for block in re.findall(r"^```python\n(.*?)^```$", text(page), flags=re.DOTALL | re.MULTILINE):
        compile(block, str(page), "exec")


@pages
def test_ops_and_backends_of_options_exist(page):
    """Of `ops=[...]`, `--npu_kernels_ops`, `backend=` and NPU_KERNELS_BACKEND."""
    for found in re.findall(r"\bops=\[([^\].]*)\]|--npu_kernels_ops ([\w ]+)", text(page)):
        assert set(re.findall(r"\w+", " ".join(found))) <= set(PATCHES)
    for found in re.findall(r"(?:backend=[\"']|npu_kernels_backend[ :=]+|NPU_KERNELS_BACKEND=)([\w=,]+)", text(page)):
        backends.parse_override(found)
