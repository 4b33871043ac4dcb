"""Names of other projects: each that the package relies on is a row of `support.foreign`, and the installed versions
have what the rows say. `make test-names VERSIONS=...` runs this with other versions laid over the environment.
"""

from __future__ import annotations

import ast
from importlib import metadata

import pytest
from packaging.version import Version

from npu_trainer_kernels.support.foreign import CACHES, ROWS, SEEN, Row
from tests.foreign_names import compares_versions, exists, modules, private_names, trees


def installed(project: str) -> Version | None:
    """Returns the version of an installed project; torch_npu needs an environment of its own."""
    found = next(iter(metadata.distributions(name=project)), None)
    return None if found is None else Version(found.version)


def using(row: Row) -> list[str]:
    """Returns the files of the package that have the name."""
    return [path for path, tree in trees().items() if row.name in {name for _, name in private_names(tree)}]


def expected(row: Row, version: Version) -> bool:
    return (row.since is None or version >= Version(row.since)) and (row.until is None or version < Version(row.until))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if installed(row.project) is not None], ids=lambda row: f"{row.where}.{row.name}"
)
def test_the_installed_version_has_the_name(row: Row) -> None:
    version = installed(row.project)
    assert version is not None
    there = "has no longer" if expected(row, version) else "has"
    assert exists(row.where, row.name) == expected(row, version), (
        f"{row.project} {version} {there} {row.where} {row.name}, which is for: {row.use} ({', '.join(using(row))})"
    )


def test_the_first_name_of_a_cache_is_that_of_the_installed_version() -> None:
    assert exists("transformers.models.llama.modeling_llama:LlamaForCausalLM.forward", CACHES[0])


def test_a_row_stands_once_and_for_versions_that_were_seen() -> None:
    assert len({row[:2] for row in ROWS}) == len(ROWS)
    assert {row.project for row in ROWS} == set(SEEN)


def test_private_names_have_rows() -> None:
    known = {row.name for row in ROWS} | {part for row in ROWS for part in row.where.replace(":", ".").split(".")}
    missing = [f"{path}:{line}: {name}" for path, tree in trees().items() for line, name in private_names(tree)
               if name not in known]  # fmt: skip
    assert not missing, "names of other projects without a row in support/foreign.py"


def test_modules_have_rows() -> None:
    """What is taken out of a module inside of a project, and the modules that strings name."""
    rows = [(row.where.partition(":")[0], row.name) for row in ROWS]
    missing = [
        f"{path}:{line}: {module} {name}"
        for path, tree in trees().items() for line, module, name in modules(tree)
        if not any((module, name) == row or (not name and f"{row[0]}.".startswith(f"{module}.")) for row in rows)
    ]  # fmt: skip
    assert not missing, "modules of other projects without a row in support/foreign.py"


def test_versions_are_compared_in_one_place() -> None:
    found = [f"{path}:{line}" for path, tree in trees().items() for line in compares_versions(path, tree)]
    assert not found, "ask support/foreign.py"


# ---------------------------------------------------------------------------------------------------------------------
# The tests above can fail
# ---------------------------------------------------------------------------------------------------------------------

SOURCE = """
import torch
from trl.trainer.utils import _secret
from transformers.other_utils import helper
from packaging.version import Version

def use(model):
    model._of_another.append(getattr(model, "_that_is_asked_for", None))
    model._npu_kernels_mark = f"{model}_suffix"
    if Version(torch.__version__) < Version("3"):
        return "trl.trainer.other_trainer"
"""


def test_names_in_code_are_found() -> None:
    tree = ast.parse(SOURCE)
    assert {name for _, name in private_names(tree)} == {"_secret", "_of_another", "_that_is_asked_for"}
    assert {(module, name) for _, module, name in modules(tree)} == {
        ("trl.trainer.utils", "_secret"), ("transformers.other_utils", "helper"), ("trl.trainer.other_trainer", ""),
    }  # fmt: skip
    assert compares_versions("some.py", tree) == [10]


@pytest.mark.parametrize(("where", "name", "there"), [
    ("transformers.trainer", "Trainer", True),
    ("transformers.trainer", "Trainer2", False),
    ("transformers.trainer:Trainer", "_tr_loss", True),
    ("transformers.trainer:Trainer", "_another", False),
    ("transformers.trainer:Trainer.train", "resume_from_checkpoint", True),
    ("transformers.trainer:Trainer.train", "another", False),
    ("transformers.no_module", "", False),
    ("torch.nn:Module", "_parameters", True),
    ("torch.nn:Module", "_another", False),
    ("torch._C", "_another", False),
    ("torch._no_module", "", False),
])  # fmt: skip
def test_names_of_an_installed_version(where: str, name: str, there: bool) -> None:
    assert exists(where, name) == there
