"""The figures of docs/rollouts.md are those of their files."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
ROUND = "2026-11-26-nvidia-h100-thirteenth-round"


def rows(name, of=ROUND):
    return json.loads((RESULTS / f"{of}-{name}.json").read_text())["rows"]


def gib(row):
    return f"{row['peak_bytes'] / (1 << 30):.2f}"


def test_the_table():
    found = {}
    for row in rows("rollouts", "2026-11-26-nvidia-h100-sixteenth-round"):
        size, batch = row["shape"].split()[0], row["shape"].split()[1].partition("x")[0]
        found.setdefault(f"{size}, {batch}", {})[row["provider"]] = row
    expected = [
        f"| {case} | {ways['steps']['tokens_per_second']:,.0f} | {ways['generate']['tokens_per_second']:,.0f} "
        f"| {ways['steps']['token_ms']:.2f} | {ways['steps']['token_ms'] / ways['steps']['bytes_ms']:.1f} "
        f"| {gib(ways['steps'])} ({gib(ways['generate'])}) |"
        for case, ways in found.items()
    ]
    table = PAGE.partition("<!-- rollouts -->")[2].partition("<!-- end of rollouts -->")[0]
    assert [line for line in table.splitlines() if line.startswith("| ")][1:] == expected


def test_figures_in_the_text():
    kept = {row["provider"]: row["tokens_per_second"] for row in rows("rollouts-kept")}
    sentence = " ".join(re.search(r"With `keep=True`.*?\n\n", PAGE, re.DOTALL)[0].split())
    for way in ("steps", "static", "generate", "continuous"):
        assert f"{kept[way]:,.0f}" in sentence
    steps = {row["provider"]: row for row in rows("grpo")}
    plain, flag = steps["plain"], steps["flag"]
    said = " ".join(PAGE.split())
    assert f"takes {flag['ms']['median'] / 1e3:.2f} s instead of {plain['ms']['median'] / 1e3:.2f}" in said
    assert f"{gib(flag)} GiB instead of {gib(plain)}" in said
