"""The newest versions that this package was tested with. Newer ones are said once, and never refused."""

import re

__all__ = ["NEWEST_TORCH", "newer_torch"]

# The version that the Makefile installs.
NEWEST_TORCH = "2.13"


def newer_torch(version: str) -> str | None:
    """Returns a sentence if a version of torch is newer than the tested ones, else None. Patch releases are no news."""
    found = re.match(r"(\d+)\.(\d+)", version)
    newest = tuple(map(int, NEWEST_TORCH.split(".")))
    if found is None or tuple(map(int, found.groups())) <= newest:
        return None
    return f"torch {version} is newer than {NEWEST_TORCH}, the newest that this package was tested with"
