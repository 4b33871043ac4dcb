"""Collects the commands that pages and `--help` name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HELP", "INLINE", "PAGES", "ROOT", "commands"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("docs/**/*.md"))]
# The pages on which commands in the text count, and not only those in blocks: there a user starts.
INLINE = ("README.md", "docs/index.md")
# The files whose docstring `--help` shows, or a reader of an example sees first.
HELP = [
    *sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("npu_trainer_kernels/cli/_*.py")),
    *sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("examples/**/*.py")),
    "benchmarks/options.py", "convergence/__main__.py",
]  # fmt: skip
_PROGRAMS = r"(?:npu-kernels|python|pip|make|eval|trl|torchrun|accelerate|deepspeed) "
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _without_comment(line: str) -> str:
    """Returns a line of a shell without what follows a `#`, and without blanks at its ends."""
    return re.sub(r"(?:^|\s+)#.*", "", line).strip()


def _of_block(block: str) -> Iterator[str]:
    yield from filter(None, map(_without_comment, re.sub(r"\s*\\\n\s*", " ", block).splitlines()))


def _of_page(page: str) -> Iterator[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in _BLOCK.findall(text):
        yield from _of_block(block)
    if page in INLINE:
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _BLOCK.sub("", text)):
            if re.match(rf"{_PROGRAMS}\S", code) and "..." not in code:
                yield code


def _of_docstring(file: str) -> Iterator[str]:
    """Yields the lines that are set apart by four blanks, up to the explanation behind three."""
    said = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    for line in re.sub(r"\s*\\\n\s*", " ", said).splitlines():
        if re.match(rf"    {_PROGRAMS}\S", line):
            yield re.sub(r" +", " ", re.split(r" {3,}(?![ -])", line.strip())[0])


def commands() -> dict[str, list[str]]:
    """Returns every command as it is written, with the pages and files that name it."""
    found: dict[str, list[str]] = {}
    for where, named in [*((page, _of_page(page)) for page in PAGES), *((file, _of_docstring(file)) for file in HELP)]:
        for command in named:
            found.setdefault(command, []).append(where)
    return found
