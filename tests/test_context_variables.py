"""Every context variable of the package stands in the documentation, with the reason for it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_is_explained() -> None:
    made = {
        name
        for path in (ROOT / "npu_trainer_kernels").rglob("*.py")
        for name in re.findall(r'ContextVar\(\s*"(\w+)"', path.read_text())
    }
    page = (ROOT / "docs" / "why-not-simpler.md").read_text()
    section = page.partition("## State of a call is in context variables")[2].partition("**The shorter way.**")[0]
    assert made == set(re.findall(r"`(npu_kernels_\w+)`", section))
