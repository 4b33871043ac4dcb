"""A hook of mkdocs: the site links to the repository by the address that pyproject.toml has.

As long as that address is a placeholder, the site has no link.
"""

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def address() -> str | None:
    """Returns the address of the repository, or None for a placeholder: a host under .invalid never exists."""
    found: str = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    return None if (urlsplit(found).hostname or "").endswith(".invalid") else found


def on_config(config: Any) -> Any:
    config.repo_url = address()
    return config
