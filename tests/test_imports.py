"""The package imports whatever optional dependency is missing or broken, and says what to install when it is needed."""

import ast
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_trainer_kernels import device, ops

PACKAGE = Path(__file__).parents[1] / "npu_trainer_kernels"
# From below to above: what imports what, also inside functions and for types alone. A module imports from its own line
# where both are of one package, and from the lines below.
LAYERS = (
    ("support", "evidence.table"),
    ("evidence.families",),
    ("device", "options"),
    ("closeness", "evidence", "vendor"),
    ("backends", "tiling"),
    ("ops",),
    ("capture",),
    ("patching", "descriptions"),
    ("ascend", "timing", "training"),
    ("rollouts",),
    ("gains",),
    ("callback", "fit"),
    ("arguments",),
    ("grpo_trainer", "hub_kernels", "run", "verify"),
    ("cli",),
    ("", "__main__", "on_path"),
)
# Folders of which other folders import what the folder's own `__init__` hands out, and nothing else.
FACES = (
    "ascend", "capture", "cli", "descriptions", "fit", "gains", "ops.attention", "ops.convolution", "ops.experts",
    "ops.head", "ops.linear_attention", "ops.norms", "patching.bodies", "patching.body", "patching.head",
    "patching.modules", "patching.probe", "rollouts", "tiling", "training",
)  # fmt: skip
# Folders without a face, and why. Others import their files one by one, so each has at most `FILES` of them.
NO_FACES = {
    "": "the public names, each loaded on first use, and what the whole package is built on",
    "evidence": "three files; two of them are read where torch must not be imported",
    "on_path": "one file, which Python itself finds and runs",
    "ops": "the public ops, and the frame that all ops share (`launch`, `checks`, `fallback`)",
    "patching": "the public names, and the frame that the folders below share (`patch`, `call`, `undo`)",
    "support": "independent helpers; most need nothing, one needs Triton",
}
FILES = 15

# A finder that makes one top-level module fail in a given way.
BREAK = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise {error}("planted: " + name)
sys.meta_path.insert(0, Broken())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.full("AttributeError", "OSError", "ImportError")
@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError", "RuntimeError"])
def test_import_survives_broken_optional_dependencies(error):
    code = BREAK.format(names=["triton", "torch_npu", "trl"], error=error) + (
        "import torch, npu_trainer_kernels as n\n"
        "from npu_trainer_kernels import ops\n"
        "x = torch.randn(3, 4, requires_grad=True); w = torch.randn(5, 4)\n"
        "ops.fused_linear_cross_entropy(x, w, torch.tensor([0, 1, 4])).backward()\n"
        "assert x.grad is not None\n"
        "print('fine')"
    )
    done = run(code)
    assert done.stdout.strip() == "fine", done.stderr


def test_kernels_without_triton_name_the_extra():
    code = BREAK.format(names=["triton"], error="ImportError") + (
        "from npu_trainer_kernels.ops.head.gradient import _row_gradient_kernel as k\nk[(1,)]()"
    )
    done = run(code)
    assert "MissingDependencyError" in done.stderr
    assert "pip install '.[cuda]'" in done.stderr


def test_grpo_trainer_without_trl_says_what_to_install():
    code = BREAK.format(names=["trl"], error="ImportError") + "from npu_trainer_kernels import GRPOTrainer"
    done = run(code)
    assert "MissingDependencyError" in done.stderr
    assert "pip install 'trl>=1.15,<2'" in done.stderr


def test_asking_for_triton_on_a_cpu_says_why_not():
    code = (
        "import torch\nfrom npu_trainer_kernels import ops\n"
        "ops.linear_logprob(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=int), backend='triton')"
    )
    assert "on a CPU Triton runs only in its interpreter" in run(code).stderr


def test_unknown_attribute():
    import npu_trainer_kernels

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        npu_trainer_kernels.nothing  # noqa: B018


def test_training_knows_neither_the_ascend_compiler_nor_the_benchmarks():
    """What a Trainer imports; in a process of its own, since other tests import everything."""
    code = (
        "import sys; import npu_trainer_kernels.callback, npu_trainer_kernels.arguments, npu_trainer_kernels.ops; "
        "print([n for n in sys.modules if n.startswith(('npu_trainer_kernels.ascend', 'npu_trainer_kernels.cli', "
        "'benchmarks', 'npu_trainer_kernels.benchmarks'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@functools.cache
def modules() -> dict[str, Path]:
    """The package's modules by their names below it; the package itself is ""."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported_from(module: str) -> Iterator[tuple[str, list[ast.alias]]]:
    """(module of this package, names) of each import statement of a module."""
    file = modules()[module]
    parts = ["npu_trainer_kernels", *filter(None, module.split("."))]
    package = parts if file.name == "__init__.py" else parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        start = package[: len(package) + 1 - node.level] if node.level else []
        whole = [*start, *filter(None, (node.module or "").split("."))]
        if whole[0] != "npu_trainer_kernels":
            continue
        yield ".".join(whole[1:]), node.names


def imports(module: str) -> Iterator[tuple[str, str, str]]:
    """(module of this package, name that is taken from it or "", name given to it) of each import in a module."""
    for source, names in imported_from(module):
        for alias in names:
            below = f"{source}.{alias.name}".removeprefix(".")
            given = alias.asname or alias.name
            yield (below, "", given) if below in modules() else (source, alias.name, given)


def layer(module: str) -> int:
    """The line of `LAYERS` that a module is in, by its longest name there."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        for number, names in enumerate(LAYERS):
            if ".".join(parts[:count]) in names:
                return number
    raise AssertionError(f"{module} is in no layer: give it its place in LAYERS")


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_import_runs_back_up(module):
    place = layer(module)
    for source, *_ in imports(module):
        of_one_package = source.partition(".")[0] == module.partition(".")[0]
        allowed = layer(source) <= place if of_one_package else layer(source) < place
        assert allowed, f"{module} imports {source}"


def test_modules_do_not_import_one_another():
    graph = {module: {source for source, *_ in imports(module)} for module in modules()}

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        waiting = [module]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    assert not {module for module in graph if module in reached(module)}


@pytest.mark.parametrize("face", FACES)
def test_other_folders_import_the_face(face):
    for module in modules():
        if not f"{module}.".startswith(f"{face}."):
            deep = {source for source, _ in imported_from(module) if source.startswith(f"{face}.")}
            assert not deep, f"{module} imports {deep}"


def folders() -> set[str]:
    return {".".join(file.parent.relative_to(PACKAGE).parts) for file in modules().values()}


def test_every_folder_has_a_face_or_a_reason():
    assert folders() == {*FACES, *NO_FACES}
    assert not {*FACES} & {*NO_FACES}


@pytest.mark.parametrize("folder", NO_FACES)
def test_a_folder_without_a_face_is_small(folder):
    files = sorted(file.name for file in (PACKAGE / folder).glob("*.py"))
    assert len(files) <= FILES, files


# Calls of an op, forward and backward, that go from a line of `LAYERS` to one above: `opaque` calls what it was given.
CLIMBS = {"rms_norm": 0, "fused_linear_cross_entropy": 2}


def climbs(call: Callable[[], Any]) -> list[str]:
    """Those of a call whose arguments are known already."""
    found, name = [], PACKAGE.name

    def of(frame: Any) -> str | None:
        module = frame.f_globals.get("__name__", "")
        return module.removeprefix(f"{name}.") if module.startswith(f"{name}.") else None

    def look(frame: Any, event: str, arg: Any) -> None:
        if event != "call" or (to := of(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and of(caller) is None:
            caller = caller.f_back
        if caller is not None and layer(to) > layer(str(of(caller))):
            found.append(f"{of(caller)} calls {to}.{frame.f_code.co_name}")

    call()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("op", CLIMBS)
def test_a_call_goes_down(op):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    given = (x, weight[0]) if op == "rms_norm" else (x, weight, torch.arange(4))
    called = climbs(lambda: getattr(ops, op)(*given).sum().backward())
    assert len(called) == CLIMBS[op], called


def test_a_climb_is_seen():
    below = {"__name__": device.__name__, "op": ops.rms_norm, "x": torch.ones(2, 8), "weight": torch.ones(8)}
    assert climbs(lambda: exec("op(x, weight)", below)) == ["device calls ops.norms.rms_norm.rms_norm"]


def test_no_module_that_others_import_has_an_underscore():
    for module in modules():
        for source, *_ in imports(module):
            private = source.rpartition(".")[2].startswith("_")
            assert not private or source.rpartition(".")[0] in module, f"{module} imports {source}"


def test_a_class_has_a_name_of_its_own():
    """A reader who looks for a class finds one. A class with an underscore belongs to its file."""
    made = [
        node.name
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in made if made.count(name) > 1}


@pytest.mark.parametrize("module", sorted(modules()))
def test_private_names_stay_in_their_modules(module):
    taken = {name for _, name, _ in imports(module) if name.startswith("_")}
    assert not taken
    tree = ast.parse(modules()[module].read_text())
    others = {given for _, name, given in imports(module) if not name}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in others
    }
    assert not {name for name in used if name.startswith("_") and not name.endswith("__")}


def test_names_of_files_stand_once():
    """A traceback or a sentence names a file by its last part."""
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []
