"""Recognition of what models' own rotations compute."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from npu_trainer_kernels import device
from npu_trainer_kernels.patching.modules.rotation_forms import rope_form, rotate, rotation_call, rotations_of
from npu_trainer_kernels.patching.modules.rotations import RopePatch
from npu_trainer_kernels.patching.patch import LateRefusal
from npu_trainer_kernels.support.foreign import at_least
from tests.closeness import assert_op_close

MODELS = Path(transformers.__file__).parent / "models"
# What no form covers, and why.
LEFT = {
    "clvp.apply_rotary_pos_emb": "three tensors",
    "dinov3_vit.apply_rotary_pos_emb": "tables of fewer tokens",
    "eomt_dinov3.apply_rotary_pos_emb": "tables of fewer tokens",
    "sapiens2.apply_rotary_pos_emb": "tables of fewer tokens",
    "nanochat.apply_rotary_pos_emb": "the other direction",
    "musicflamingo.apply_rotary_time_emb": "fp64",
}
if not at_least("transformers", "5.23"):
    LEFT["minimax_m3_vl.apply_rotary_pos_emb_vision"] = "tables without a dimension of rows"
FORMS = {
    "llama.apply_rotary_pos_emb": "halves, tables each, casting promote",
    "phi3.apply_rotary_pos_emb": "halves, tables each, casting promote, partial",
    "qwen3_next.apply_rotary_pos_emb": "halves, tables each, casting promote, partial",
    "olmo2.apply_rotary_pos_emb": "halves, tables each, casting back",
    "modernbert.apply_rotary_pos_emb": "halves, tables each, casting fp32",
    "qwen2_vl.apply_rotary_pos_emb_vision": "halves, tables each, casting fp32",
    "gpt_oss.apply_rotary_pos_emb": "halves, tables pair, casting promote",
    "cohere2.apply_rotary_pos_emb": "interleaved, tables each, casting fp32",
    "ernie4_5.apply_rotary_pos_emb": "interleaved, tables first_half, casting fp32",
    "glm4.apply_rotary_pos_emb": "interleaved, tables first_half, casting promote, partial",
    "gptj.apply_rotary_pos_emb": "interleaved, tables pair, casting promote",
    "deepseek_v3.apply_rotary_pos_emb_interleave": "regrouped, tables first_half, casting promote",
    "gemma4.apply_rotary_pos_emb": "halves, tables each, casting promote",
    "llama4.apply_rotary_emb": "interleaved, tables pair, casting back",
    "deepseek_v2.apply_rotary_emb": "interleaved, tables pair, casting back",
}


def without_docstring(node):
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def sources(body):
    """What a module defines at its top, by name, and the imports that it does so by."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)


def whole_source(name, defined, model):
    """The text of a function and of all that it reaches in its module: functions that have the same are the same."""
    found, left = {}, [name]
    while left:
        name = left.pop()
        if name in found or name not in defined:
            continue
        node = defined[name]
        found[name] = without_docstring(node)
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found[name] += f" of {model}"
        left += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return tuple(sorted(found.items()))


def every_rotation():
    """Every function of transformers that is named as one, as `model.function`: lists of those that are the same, by
    their sources. Importing a model and probing its function takes a tenth of a second."""
    found = defaultdict(list)
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if "\ndef apply_rotary" not in text:
            continue
        defined, model = dict(sources(ast.parse(text).body)), path.parent.name
        for name in defined:
            # Of two dimensions are those of pictures in SAM, which know memories of their own.
            if isinstance(defined[name], ast.FunctionDef) and name.startswith("apply_rotary") and "_2d" not in name:
                found[whole_source(name, defined, model)].append(f"{model}.{name}")
    return list(found.values())


def function_of(name):
    model, _, function = name.partition(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), function)


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_forms_of_models(name, form):
    assert str(rope_form(function_of(name))) == form


def test_every_rotation_of_transformers_is_recognised_but_those_that_are_named_here():
    same = every_rotation()
    assert sum(map(len, same)) > 200
    left = [names for names in same if rope_form(function_of(names[0])) is None]
    assert {name for names in left for name in names} == set(LEFT)


def test_rotations_with_another_helper_are_not_taken_for_the_same():
    text = "def half(x):\n    return {}\ndef apply_rotary(q):\n    return half(q)"
    made = [dict(sources(ast.parse(text.format(value)).body)) for value in ("x", "-x", "x")]
    first, other, again = (whole_source("apply_rotary", defined, "model") for defined in made)
    assert first == again != other


def arguments(form, dtype=torch.bfloat16, size=64, rotated=None, heads=1):
    rotated = rotated or size
    rank, heads = form.layouts[-1] if heads == 1 else (4, heads)
    shape = lambda count: (2, count, 5, size) if heads == 1 else (2, 5, count, size)  # noqa: E731
    width = rotated // 2 if form.tables == "pair" else rotated
    made = {"q": torch.randn(shape(3)).to(dtype), "k": torch.randn(shape(1)).to(dtype)}
    made |= {"cos": torch.randn(2, 5, width), "sin": torch.randn(2, 5, width)}
    made["freqs"] = torch.complex(made["cos"], made["sin"])
    made = {name: t if rank == 4 else t[0] for name, t in made.items()}
    return [made[role].requires_grad_(role in ("q", "k")) for role in form.roles]


def upstream(outputs):
    return sum((t * torch.linspace(-1, 2, t.numel()).sin().view(t.shape)).sum(dtype=torch.float64) for t in outputs)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", FORMS)
def test_a_call_returns_what_the_function_returns(name, backend):
    function = function_of(name)
    form = rope_form(function)

    def ours(*given):
        return rotate(form, rotation_call(form, given, {}), backend)

    for size, rotated in ((64, 64), (128, 128), *([(64, 32)] if form.partial else [])):
        given = arguments(form, torch.bfloat16, size, rotated)
        assert isinstance(ours(*given), tuple) == isinstance(function(*given), tuple)
        # Some functions cast fp64 to fp32, which is truth enough for bf16.
        assert_op_close(ours, function, given, upstream)


def test_heads_in_the_other_dimension_and_by_name():
    function = function_of("gemma4.apply_rotary_pos_emb")
    form = rope_form(function)
    q, cos, sin = arguments(form, torch.float32, heads=2)
    call = rotation_call(form, (q,), {"sin": sin, "cos": cos, "unsqueeze_dim": 2})
    assert torch.equal(rotate(form, call, "torch"), function(q, cos=cos, sin=sin, unsqueeze_dim=2))


LLAMA = rope_form(function_of("llama.apply_rotary_pos_emb"))
PHI = rope_form(function_of("phi3.apply_rotary_pos_emb"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda a: [a[0].double(), *a[1:]], {}),
        (lambda a: [a[0][:, :, 1:], *a[1:]], {}),
        (lambda a: [a[0], a[1][:, :, 1:], *a[2:]], {}),
        (lambda a: [a[0], a[1].float(), *a[2:]], {}),
        (lambda a: [a[0][0], a[1][0], a[2][0], a[3][0]], {}),
        (lambda a: [*a[:2], a[2].requires_grad_(), a[3]], {}),
        (lambda a: [*a[:2], a[2].unsqueeze(1), a[3].unsqueeze(1)], {}),
        (lambda a: [*a[:2], a[2][..., :32], a[3][..., :32]], {}),
        (lambda a: [a[0], None, *a[2:]], {}),
        (lambda a: [*a, 1], {}),
        (lambda a: a, {"unsqueeze_dim": 0}),
        (lambda a: a, {"unsqueeze_dim": 2}),
        (lambda a: a, {"position_ids": torch.zeros(1)}),
        (lambda a: a, {"scale": 2}),
        (lambda a: a[:3], {}),
    ],
)
def test_calls_that_the_form_does_not_cover(change, named):
    given = arguments(LLAMA)
    assert rotation_call(LLAMA, tuple(given), {"position_ids": None}) is not None
    assert rotation_call(LLAMA, tuple(change(given)), named) is None


def test_tables_narrower_than_heads_are_for_those_that_know_them():
    given = arguments(PHI, size=64, rotated=32)
    assert rotation_call(PHI, tuple(given), {}) is not None
    assert rotation_call(LLAMA, tuple(given), {}) is None


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def planted(fault):
    """Llama's function with a fault."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        outputs = [x * cos + rotate_half(x) * sin for x in (q, k)]
        return tuple(fault(outputs, q, cos, sin))

    return apply_rotary_pos_emb


FAULTS = {
    "none": lambda out, q, c, s: out,
    "at head size 128": lambda out, q, c, s: [-t if q.shape[-1] == 128 else t for t in out],
    "in bf16": lambda out, q, c, s: [(t.float() * 1.01).to(t.dtype) if t.dtype == torch.bfloat16 else t for t in out],
    "rounded elsewhere": lambda out, q, c, s: [
        q.float().mul(c).add(rotate_half(q.float()) * s).to(t.dtype) if i == 0 else t for i, t in enumerate(out)
    ],
    "keys": lambda out, q, c, s: [out[0], out[0][:, :1]],
    "first token": lambda out, q, c, s: [torch.cat((q[:, :, :1], out[0][:, :, 1:]), 2), out[1]],
    "one sequence": lambda out, q, c, s: [t * (1 if c.shape[0] > 1 else 2) for t in out],
    "second half of the tables": lambda out, q, c, s: [
        q * torch.cat((c.chunk(2, -1)[0],) * 2, -1) + rotate_half(q) * s, out[1]
    ],
    "another dtype": lambda out, q, c, s: [t.float() for t in out],
    "one output": lambda out, q, c, s: out[:1],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault):
    form = rope_form(planted(FAULTS[fault]))
    assert (form is None) == (fault != "none")


def test_what_is_no_rotation():
    for function in (len, dict, lambda q, k: (q, k), lambda *a: a, lambda q, k, cos, sin, scale: (q, k), object()):
        assert rope_form(function) is None


def test_what_the_kernel_is_not_given_on_an_npu_is_left_to_the_model_by_name():
    function = function_of("glm4.apply_rotary_pos_emb")
    form, patch, site = rope_form(function), RopePatch(), SimpleNamespace(backend=None)

    def run(size, rotated, site=site):
        with device.use_chip("Ascend910B4"):
            return patch.run(site, form, *arguments(form, torch.bfloat16, size, rotated))

    left = run(88, 88)
    assert isinstance(left, LateRefusal)
    assert left.reason == "44 pairs by turns, not a multiple of 8: the kernel waits for each on Ascend910B4"
    assert "a rest of 8 elements" in run(72, 64).reason
    for served in (run(128, 64), run(88, 88, SimpleNamespace(backend="torch"))):
        assert isinstance(served, tuple)


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [("llama", "halves"), ("glm", "interleaved"), ("glm4_moe", "halves"), ("gpt_oss", "halves"), ("gpt2", None)],
)
def test_rotations_of_a_config_are_those_of_its_code(kind, pairs):
    found = rotations_of(transformers.AutoConfig.for_model(kind))
    assert [form.pairs for form in found] == ([] if pairs is None else [pairs])
