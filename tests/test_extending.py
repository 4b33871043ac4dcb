"""docs/extending.md says how many files an op, a norm's casting, a gate and an Ascend chip are, without a card.

Each is added here to a copy of the repository, in the files that the page numbers and in no other. Then the tests that
must be green run in the copy: those that hold for every op, those of the changed files, and checks of what was added
(`extending/checks`). `extending/op` has the new files of the op, at their places in the repository.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTENDING = Path(__file__).with_name("extending")
COPIED = ("npu_trainer_kernels", "tests", "benchmarks", "docs/api.md", "README.md", "pyproject.toml")
NUMBERS = {"two": 2, "three": 3, "eight": 8}

# By file: pieces of its text, each of which it has once, and what comes in their places.
Edits = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Extension:
    """Something that is added.

    Attributes:
        section: the heading of the page that walks through it.
        edits: the files that exist and are changed.
        new: a folder of `extending` whose files are new; "" for none.
        pages: the pages that name every op, which `docs/extending.md` counts apart.
        tests: the files of tests that run in the copy, beside the checks.
        chosen: which of their tests (pytest's `-k`), at least one of each file.
    """

    section: str
    edits: Edits
    tests: tuple[str, ...]
    chosen: str
    new: str = ""
    pages: Edits = field(default_factory=dict)


OP = Extension(
    "Add an op",
    new="op",
    edits={
        "npu_trainer_kernels/ops/__init__.py": {
            "from .rope import rope, rope_reference\n": (
                "from .rope import rope, rope_reference\nfrom .scaled_tanh import scaled_tanh, scaled_tanh_reference\n"
            ),
            '    "rope_reference",\n': '    "rope_reference",\n    "scaled_tanh",\n    "scaled_tanh_reference",\n',
        },
        "npu_trainer_kernels/tiling/layer_tiles.py": {
            '"""Tiles of gated MLPs, rotary and token embedding, convolutions, linear attention and the attention of '
            'generation."""': (
                '"""Tiles of gated MLPs, embeddings, convolutions, attention of generation, scaled tanh."""'
            ),
            '    "rope_unserved",\n    "state_tile",': (
                '    "rope_unserved",\n    "scaled_tanh_block",\n    "state_tile",'
            ),
            "# The kernel by its number of tensors.\n": '''@tunable
def scaled_tanh_block(spec: DeviceSpec) -> Block:
    """Returns the block of the scaled tanh's kernels."""
    if spec.has_warps:
        # As `swiglu_block`: 8 elements per thread, which is one 16-byte access of bf16 per tensor (H200); not timed.
        return Block(2048, launch_options(spec, 8))
    if spec.has_buffer:
        # 64 bytes an element: three tensors of fp32 in two buffers each, and temporaries; not timed.
        return Block(spec.on_chip_bytes // 64)
    return Block(64)


# The kernel by its number of tensors.
''',
        },
        "npu_trainer_kernels/evidence/table.json": {
            '    "linear_cross_entropy": {\n': """    "scaled_tanh": {
      "forms": [
        "scaled_tanh"
      ],
      "before_torch": {},
      "not_measured": {
        "npu": [
          "triton"
        ],
        "cuda": [
          "triton"
        ],
        "cpu": [
          "triton"
        ]
      }
    },
    "linear_cross_entropy": {
"""
        },
        "npu_trainer_kernels/patching/modules/__init__.py": {
            "from .rotations import RopePatch\n": (
                "from .rotations import RopePatch\nfrom .scaled_tanhs import ScaledTanhPatch\n"
            ),
            "ExpertsPatch(), RopePatch(),\n": "ExpertsPatch(), RopePatch(), ScaledTanhPatch(),\n",
        },
    },
    pages={
        "README.md": {
            "| `embedding` | token embedding |": (
                "| `scaled_tanh` | soft caps | by name | by name | the model's own code, unless asked for |\n"
                "| `embedding` | token embedding |"
            )
        },
        "docs/api.md": {
            "`rope_reference`": "`rope_reference`, `scaled_tanh_reference`",
            "### ops/rope.py\n": """### ops/scaled_tanh.py

::: npu_trainer_kernels.ops.scaled_tanh
    options:
      show_root_heading: false
      show_root_toc_entry: false
      heading_level: 4
      members: [scaled_tanh]

### ops/rope.py
""",
        },
    },
    tests=(
        "tests/test_backends.py",
        "tests/test_imports.py",
        "tests/test_compiled.py",
        "tests/test_docs.py",
        "tests/test_tuned.py",
        "tests/benchmarks/test_evidence.py",
        "tests/ops/test_autograd.py",
        "tests/ops/test_scaled_tanh.py",
    ),
    chosen="scaled_tanh or test_backends or import_one_another or every_op_is_here or of_every_function "
    "or names_every_op or (every_public_name and ops) or committed_table or at_other_sizes",
)
CASTING = Extension(
    "Add a norm with another formula",
    edits={
        "npu_trainer_kernels/ops/norms/rms_kernels.py": {
            "each product rounded to S's dtype\n": (
                "each product rounded to S's dtype\n             cast(s cast(rstd) w')    \"rstd\"\n"
            ),
            'CASTINGS = ("llama", "gemma", "none")\n': 'CASTINGS = ("llama", "gemma", "none", "rstd")\n',
            "    n = wide * rstd\n    if weight is None:\n": """    if casting == "rstd":
        n = wide * rstd.to(s.dtype)
        return (n if weight is None else n * shifted(weight, offset).to(n.dtype)).to(s.dtype), rstd
    n = wide * rstd
    if weight is None:
""",
            'ROUND_SUM and CASTING == "none")\n    if HAS_WEIGHT:\n': (
                'ROUND_SUM and (CASTING == "none" or CASTING == "rstd"))\n    if HAS_WEIGHT:\n'
            ),
            'rounded(n, x, ROUND_SUM and CASTING != "gemma") * w': (
                'rounded(n, x, ROUND_SUM and CASTING != "gemma" and CASTING != "rstd") * w'
            ),
        },
        "tests/ops/test_rms_norm.py": {
            '    {"casting": "none", "offset": 1.0, "eps": 1e-2},\n': (
                '    {"casting": "none", "offset": 1.0, "eps": 1e-2},\n    {"casting": "rstd"},\n'
                '    {"casting": "rstd", "offset": 1.0},\n'
            ),
            "MODULES = [\n": '''class InverseInOneDtype(torch.nn.Module):
    """As a model may have it; none of transformers has."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x):
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)
        return (x.float() * rstd * self.weight.float()).to(x.dtype)


MODULES = [
    (InverseInOneDtype, {"casting": "rstd"}),
''',
        },
        "npu_trainer_kernels/descriptions/norm_cases.py": {
            '    GateEntry("rms_norm, no weight",': (
                '    GateEntry("rms_norm, rstd", HIDDEN, "hidden", _rms_norm(casting="rstd")),\n'
                '    GateEntry("rms_norm, no weight",'
            )
        },
    },
    tests=("tests/ops/test_rms_norm.py", "tests/ops/test_add_rms_norm.py", "tests/test_vendor.py"),
    chosen="(rstd or InverseInOneDtype or every_casting or castings_differ or casting_that or bad_input) "
    "and not torch_compile",
)
GATE = Extension(
    "Add a gate of a gated MLP",
    edits={
        "npu_trainer_kernels/ops/gates.py": {
            "    relu2        a = s^2      s = max(g, 0)                     a' = 2 s\n": (
                "    relu2        a = s^2      s = max(g, 0)                     a' = 2 s\n"
                "    sigmoid      a = s        s = 1 / (1 + exp(-g))             a' = s (1 - s)\n"
            ),
            'ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")\n': (
                'ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "sigmoid")\n'
            ),
            "            return torch.nn.functional.relu(gate).square()\n": (
                "            return torch.nn.functional.relu(gate).square()\n"
                '        if self.activation == "sigmoid":\n'
                "            return torch.sigmoid(gate)\n"
            ),
            "        else:\n            s = torch.relu(g)\n": (
                '        elif self.activation == "sigmoid":\n'
                "            a = torch.sigmoid(g)\n"
                "            da = a * (1 - a)\n"
                "        else:\n            s = torch.relu(g)\n"
            ),
            "        return s * s, s\n    else:\n": (
                '        return s * s, s\n    elif ACTIVATION == "sigmoid":\n'
                "        s = _sigmoid(-1.0 * g)\n        return s, s\n    else:\n"
            ),
            "        return 2.0 * s\n": (
                '        return 2.0 * s\n    elif ACTIVATION == "sigmoid":\n        return s * _sigmoid(g)\n'
            ),
        },
        "npu_trainer_kernels/patching/modules/gate_forms.py": {
            '    "relu2": ("relu2",),\n': '    "relu2": ("relu2",),\n    "sigmoid": ("sigmoid",),\n'
        },
        "tests/ops/test_swiglu.py": {
            '    {"activation": "relu2"},\n': '    {"activation": "relu2"},\n    {"activation": "sigmoid"},\n'
        },
    },
    tests=("tests/ops/test_swiglu.py", "tests/patching/test_gates.py"),
    chosen="sigmoid or bad_gate or every_activation",
)
CHIP = Extension(
    "Add a device",
    edits={
        "npu_trainer_kernels/device.py": {
            '        ("Ascend910B4-1", 40, 192),\n': (
                '        ("Ascend910B4-1", 40, 192),\n        ("Ascend910B5", 44, 192),\n'
            )
        },
        "npu_trainer_kernels/ascend/gate.py": {'"Ascend910B4", *A3_CHIPS)': '"Ascend910B4", "Ascend910B5", *A3_CHIPS)'},
    },
    tests=("tests/test_device.py", "tests/test_tiling_limits.py"),
    chosen="test_device or test_tiling_limits",
)
EXTENSIONS = {"op": OP, "casting": CASTING, "gate": GATE, "chip": CHIP}


def walked_through(section: str) -> list[str]:
    """The files of a section of the page: as many of those that it numbers as it says."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (number,) = re.findall(r"\*\*(\w+) files\*\*", text)
    return re.findall(r"^\d\. \*\*`([\w./]+)`\*\*", text, flags=re.MULTILINE)[: NUMBERS[number.lower()]]


def copy_of_the_repository(folder: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.png", EXTENDING.name))
        else:
            shutil.copy(source, target)


def extend(folder: Path, extension: Extension) -> set[str]:
    """Adds an extension to a copy; the files that were touched, without those that the page counts apart."""
    new: set[str] = set()
    if extension.new:
        source = EXTENDING / extension.new
        new = {file.relative_to(source).as_posix() for file in source.rglob("*.py")}
        assert not [name for name in new if (folder / name).exists()]
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in {**extension.edits, **extension.pages}.items():
        text = (folder / name).read_text(encoding="utf-8")
        for anchor, replacement in changes.items():
            assert text.count(anchor) == 1, f"{name} has {anchor!r} {text.count(anchor)} times"
            text = text.replace(anchor, replacement)
        (folder / name).write_text(text, encoding="utf-8")
    return new | set(extension.edits)


def run_tests(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    # Neither what the process around this one was given, nor its place among several.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full(*(name for name in EXTENSIONS if name != "op"))
@pytest.mark.parametrize("name", EXTENSIONS)
def test_it_takes_the_files_that_the_page_numbers(name, tmp_path):
    extension = EXTENSIONS[name]
    copy_of_the_repository(tmp_path)
    touched = extend(tmp_path, extension)
    expected = {file.replace("embedding", "scaled_tanh") for file in walked_through(extension.section)}
    assert touched == expected
    for check in ("copy", name):
        shutil.copy(EXTENDING / "checks" / f"{check}.py", tmp_path / "tests" / f"test_extended_{check}.py")
    files = [f"tests/test_extended_{check}.py" for check in ("copy", name)] + list(extension.tests)
    done = run_tests(tmp_path, "-k", f"test_extended or {extension.chosen}", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"^PASSED ([\w./]+)::", done.stdout, flags=re.MULTILINE))
    assert passed == set(files)
