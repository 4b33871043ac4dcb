"""The locks are what pyproject.toml asks for, with hashes, and name no machine and no index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
# What each lock is made of, as in the Makefile.
EXTRAS = {
    "dev": ["dev"],
    "ascend": ["ascend", "trl", "test"],
    "oldest": ["cuda", "test"],
    "trl-layers": ["test"],
    "trl-1.9": ["test"],
}


def locked(path: Path) -> list[tuple[Requirement, int]]:
    """Each package with the number of its hashes."""
    found = []
    for entry in re.split(r"^(?=\w)", path.read_text(), flags=re.MULTILINE)[1:]:
        found.append((Requirement(entry.partition("\\")[0]), entry.count("--hash=sha256:")))
    return found


def asked_for(extra: str | None) -> list[Requirement]:
    texts = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    found = []
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT["name"]:
            found += [each for inner in requirement.extras for each in asked_for(inner)]
        else:
            found.append(requirement)
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_package_has_one_version_and_hashes(path):
    packages = locked(path)
    assert packages
    for requirement, hashes in packages:
        (pin,) = requirement.specifier
        assert pin.operator == "==", requirement
        assert hashes > 0, requirement
    assert not re.search(r"https?:|file:|index-url|find-links|(^|\s)/\w", path.read_text())


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_torch_and_what_a_cuda_build_needs_are_in_none(path):
    names = [requirement.name for requirement, _ in locked(path)]
    assert not [name for name in names if re.match(r"torch|nvidia-|cuda-", name)]


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_all_that_is_asked_for(name):
    """A bound that was moved, or a package that was added, without `make lock`."""
    packages = [requirement for requirement, _ in locked(ROOT / "locks" / f"{name}.txt")]
    wanted = [each for extra in (None, *EXTRAS[name]) for each in asked_for(extra)]
    for requirement in wanted:
        if requirement.name == "torch":
            continue
        pins = [p for p in packages if canonicalize_name(p.name) == canonicalize_name(requirement.name)]
        assert pins, f"{requirement} is not in locks/{name}.txt: make lock"
        for pin in pins:
            (version,) = pin.specifier
            assert requirement.specifier.contains(version.version), f"{pin}, but {requirement}: make lock"
