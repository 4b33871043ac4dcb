"""Optional packages: TRL for its trainers, datasets for their data, PEFT for adapters, and matplotlib for figures."""

import importlib.util

from .triton import MissingDependencyError

__all__ = ["INSTALL", "require"]

# The requirements for pip, equal to those of the extras.
INSTALL = {
    "trl": "'trl>=1.15,<2'", "datasets": "'datasets>=4.0'", "peft": "'peft>=0.17'", "matplotlib": "'matplotlib>=3.8'",
}  # fmt: skip


def require(what: str, *names: str) -> None:
    """Raises `MissingDependencyError` with a pip command unless all packages are installed.

    Args:
        what: the feature that needs them, which begins the message.
        names: keys of `INSTALL`.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"{what} needs {' and '.join(missing)}, not installed here: "
            f"pip install {' '.join(INSTALL[name] for name in missing)}"
        )
