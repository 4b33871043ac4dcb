"""Looks at the site with Chromium, as on a phone and as on a desktop.

A page of this file's loads every page of the site into a frame of that width, one after another, measures it there and
writes what it found into itself, so that Chromium's `--dump-dom` is all that is needed: no driver, no package.
"""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["SIZES", "BrowserError", "browser", "look"]

SIZES = ((390, 844), (1280, 800))
"""Widths and heights in CSS pixels: a phone's and a desktop's window."""
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PROBE = "__probe__.html"

# `beyond`: elements of the content that reach beyond the window, and that no box around them lets the reader scroll to.
# `first`: the text of what is in the window before anybody scrolls, and the commands among it.
_SCRIPT = """
const frame = document.querySelector("iframe");
const sleep = ms => new Promise(done => setTimeout(done, ms));

function scrolls(element) {
  for (let e = element.parentElement; e; e = e.parentElement)
    if (["auto", "scroll"].includes(frame.contentWindow.getComputedStyle(e).overflowX)
        && e !== e.ownerDocument.body && e !== e.ownerDocument.documentElement) return true;
  return false;
}

async function measured(page, width, height) {
  frame.width = width; frame.height = height;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  await loaded;
  await sleep(300);  // the theme puts tables into boxes after loading
  const window = frame.contentWindow, document = frame.contentDocument;
  const content = [...document.querySelectorAll(".md-content *")];
  const beyond = content.filter(e => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && box.right > window.innerWidth + 1 && !scrolls(e);
  });
  const seen = content.filter(e => {
    const box = e.getBoundingClientRect();
    return e.matches("p, td, pre") && box.width > 0 && box.top >= 0 && box.bottom <= height;
  });
  return {
    page, width, height, inner: window.innerWidth, scroll: document.documentElement.scrollWidth,
    content: content.length,
    beyond: beyond.slice(0, 5).map(e => e.tagName + " " + e.textContent.trim().slice(0, 60)),
    first: seen.map(e => e.textContent).join("\\n"),
    commands: content.filter(e => e.tagName === "CODE" && e.getBoundingClientRect().bottom <= height)
      .map(e => e.textContent),
  };
}

(async () => {
  const found = [];
  for (const [width, height] of SIZES)
    for (const page of PAGES) found.push(await measured(page, width, height));
  const text = document.createElement("pre");
  text.id = "found";
  text.textContent = JSON.stringify(found);
  document.body.append(text);
})();
"""


class BrowserError(RuntimeError):
    """There is no browser, or it has not said what it was asked."""


def browser() -> str:
    """Returns the path of Chromium.

    Raises:
        BrowserError: it is not installed.
    """
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    raise BrowserError(f"none of {', '.join(NAMES)} is installed; as root: make site-tools")


@contextmanager
def _served(site: Path, probe: bytes) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != f"/{_PROBE}":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(probe)))
            self.end_headers()
            self.wfile.write(probe)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def look(site: Path, pages: Sequence[str], sizes: Sequence[tuple[int, int]] = SIZES) -> list[dict[str, Any]]:
    """Returns what was measured of each page of a built site in a window of each size.

    Raises:
        BrowserError: Chromium is not installed, or has measured nothing.
    """
    script = f"const SIZES = {json.dumps(sizes)}, PAGES = {json.dumps([f'/{page}' for page in pages])};{_SCRIPT}"
    probe = f"<!doctype html><body><iframe></iframe><script>{script}</script></body>".encode()
    # Time is virtual: a page that is loading stops it.
    budget = 2000 * (len(pages) * len(sizes) + 5)
    with _served(site, probe) as address:
        done = subprocess.run(
            [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-dev-shm-usage", f"--virtual-time-budget={budget}", "--dump-dom", f"{address}/{_PROBE}"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    if found is None:
        raise BrowserError(f"Chromium has measured nothing (exit code {done.returncode}): {done.stderr[-2000:]}")
    measured: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return measured
