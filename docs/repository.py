"""Links to the repository, by the address that pyproject.toml has.

As a hook of mkdocs this file gives the site its link, and `setup.py` makes the links of the README absolute by it, for
a package index.

As long as that address is a placeholder, the site has no link, and the README keeps its own.
"""

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def address() -> str | None:
    """Returns the address of the repository, or None for a placeholder: a host under .invalid never exists."""
    found: str = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    return None if (urlsplit(found).hostname or "").endswith(".invalid") else found


def absolute(text: str, repository: str | None) -> str:
    """Returns a page of the repository's root with absolute links in the place of relative ones.

    Links to files lead to the branch `main`, and links to pictures to the files themselves. Without an address the text
    stays as it is.

    Args:
        text: the page, in Markdown.
        repository: the address of the repository.
    """
    if repository is None:
        return text

    def link(found: re.Match[str]) -> str:
        return f"{found[1]}{repository}/{'raw' if found[1].startswith('!') else 'blob'}/main/{found[2]})"

    return re.sub(r"(!?\[[^\]]*\]\()(?!https?:|mailto:|#)([^)\s]+)\)", link, text)


def on_config(config: Any) -> Any:
    config.repo_url = address()
    return config
