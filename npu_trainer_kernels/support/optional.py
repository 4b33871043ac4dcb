"""Packages that only some of this one needs: TRL, for its trainers, datasets, for data of its kind, PEFT, for adapters,
and matplotlib, for figures."""

import importlib.util

from .triton import MissingDependencyError

__all__ = ["INSTALL", "require"]

# What pip is told; the extras have the same.
INSTALL = {
    "trl": "'trl>=1.15,<2'", "datasets": "'datasets>=4.0'", "peft": "'peft>=0.17'", "matplotlib": "'matplotlib>=3.8'",
}  # fmt: skip


def require(what: str, *names: str) -> None:
    """Raises `MissingDependencyError`, with what to install, unless all the packages are there.

    Args:
        what: needs them; the beginning of the message.
        names: of `INSTALL`.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"{what} needs {' and '.join(missing)}, not installed here: "
            f"pip install {' '.join(INSTALL[name] for name in missing)}"
        )
