"""The description of the package, which a package index shows apart from the repository: the README, whose links are
absolute there. Everything else is in pyproject.toml.
"""

import importlib.util
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
spec = importlib.util.spec_from_file_location("repository", ROOT / "docs" / "repository.py")
assert spec is not None
assert spec.loader is not None
repository = importlib.util.module_from_spec(spec)
spec.loader.exec_module(repository)

setup(
    long_description=repository.absolute((ROOT / "README.md").read_text(encoding="utf-8"), repository.address()),
    long_description_content_type="text/markdown",
)
