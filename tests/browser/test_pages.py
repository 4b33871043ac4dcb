"""Every page of the site in Chromium, on a phone and on a desktop: nothing is cut off, and the first screen says what
the package is good for and how to begin. In a session of its own (`make test-site`), since it needs a browser."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser.browser import SIZES, look

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    return folder


@pytest.fixture(scope="module")
def found(site: Path) -> list[dict[str, Any]]:
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("index.html"))
    assert len(pages) == len(list((ROOT / "docs").rglob("*.md")))
    return look(site, pages)


def test_every_page_was_seen_in_every_window(found):
    assert {(each["width"], each["inner"]) for each in found} == {(width, width) for width, _ in SIZES}
    for each in found:
        assert each["content"] > 20, f"{each['page']} has no content"


@pytest.mark.parametrize("width", [width for width, _ in SIZES])
def test_no_page_is_wider_than_the_window(found, width):
    pages = [each for each in found if each["width"] == width]
    wide = {each["page"]: each["scroll"] for each in pages if each["scroll"] > each["inner"]}
    assert not wide, f"pages wider than {width}: {wide}"
    cut = {each["page"]: each["beyond"] for each in pages if each["beyond"]}
    assert not cut, f"cut off at {width}: {cut}"


@pytest.mark.parametrize("width", [width for width, _ in SIZES])
def test_the_first_screen_has_a_figure_and_a_command(found, width):
    (first,) = [each for each in found if (each["page"], each["width"]) == ("/index.html", width)]
    assert re.search(r"\d+\.\d+ times as fast", first["first"]), first["first"]
    assert [command for command in first["commands"] if command.startswith("pip install")]


FAULTS = {
    "a wide block": '<div style="width: 2000px">wide</div>',
    "a wide block that is cut off": '<div style="overflow: hidden"><p style="width: 2000px">cut</p></div>',
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_cut_off_is_seen(site, fault):
    page = (site / "index.html").read_text().replace("<h1 id=", f"{FAULTS[fault]}<h1 id=", 1)
    assert FAULTS[fault] in page
    (site / "fault.html").write_text(page)
    (seen,) = look(site, ["fault.html"], SIZES[:1])
    assert seen["beyond"]
    assert (seen["scroll"] > seen["inner"]) == (fault == "a wide block")


def test_what_scrolls_in_a_box_of_its_own_is_not(site):
    box = '<div style="overflow-x: auto"><p style="width: 2000px">scrolls</p></div>'
    (site / "box.html").write_text((site / "index.html").read_text().replace("<h1 id=", f"{box}<h1 id=", 1))
    (seen,) = look(site, ["box.html"], SIZES[:1])
    assert (seen["beyond"], seen["scroll"]) == ([], seen["inner"])
