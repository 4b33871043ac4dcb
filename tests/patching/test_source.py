"""A module's source counts where it is that of the code that runs."""

import ast
import importlib.util
import linecache
import sys
import types

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.probe.source import beyond_one_run, plain_forward, rewritten, source_of
from tests.models import assert_trains_alike, batch, loss_and_gradients, small_model

LAYER = """
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Layer(LlamaDecoderLayer):
    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return torch.add(residual, hidden_states, alpha=1.0)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module of a source, as an import does; what it is made from can be written to."""
    path = tmp_path / "of_a_user.py"

    def made(source: str) -> types.ModuleType:
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("of_a_user", path)
        found = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "of_a_user", found)
        spec.loader.exec_module(found)
        return found

    made.path = path
    return made


def model_of(layer: type) -> torch.nn.Module:
    model = small_model("llama")
    for each in model.model.layers:
        each.__class__ = layer
    return model


def reasons(kernels, op: str) -> set[str]:
    return {left.reason for left in kernels.report().left_alone if left.op == op}


def test_a_layer_whose_file_was_edited_since_runs_the_code_that_was_imported(module):
    layer = module(LAYER).Layer
    expected = loss_and_gradients(model_of(layer), batch())
    with apply_npu_kernels(model := model_of(layer), ops=["add_rms_norm"]) as kernels:
        assert_trains_alike(loss_and_gradients(model, batch()), lambda: model_of(layer))
        assert kernels.report().sites
    layer = module(LAYER).Layer
    module.path.write_text(LAYER.replace("alpha=1.0", "alpha=3.0"))
    with apply_npu_kernels(model := model_of(layer), ops=["add_rms_norm"]) as kernels:
        assert all(map(torch.equal, loss_and_gradients(model, batch()), expected))
        assert any("was its file edited" in reason for reason in reasons(kernels, "add_rms_norm"))


CLOSING = """
def made(alpha):
""" + LAYER.replace("alpha=1.0", "alpha=alpha").replace("\n", "\n    ") + """
    return Layer


Layer = made(1.0)
"""  # fmt: skip


@pytest.mark.parametrize(("source", "why"), [
    (LAYER, None), (CLOSING, "its forward closes over variables"),
])  # fmt: skip
def test_a_forward_that_is_more_than_its_code_is_left_alone(module, source, why):
    expected = loss_and_gradients(model_of(module(source).Layer), batch())
    with apply_npu_kernels(model := model_of(module(source).Layer), ops=["add_rms_norm"]) as kernels:
        assert reasons(kernels, "add_rms_norm") == ({why} if why else set())
        if why:
            assert all(map(torch.equal, loss_and_gradients(model, batch()), expected))


def test_a_forward_without_a_file_is_left_alone():
    space = {"__name__": "of_nowhere"}
    exec(compile(LAYER, "<nowhere>", "exec"), space)
    with apply_npu_kernels(model_of(space["Layer"]), ops=["add_rms_norm"]) as kernels:
        assert reasons(kernels, "add_rms_norm") == {"its source is not at hand"}


EDITS = {
    "a constant": ("alpha=1.0", "alpha=3.0"),
    "zero of the other sign": ("alpha=1.0", "alpha=-1.0"),
    "a number of another type": ("alpha=1.0", "alpha=1"),
    "another name": ("self.mlp(", "self.self_attn("),
    "another order": ("residual + hidden_states", "hidden_states + residual"),
    "lines above": ("import torch", "import torch\n\nX = 3"),
    "no statement": ("        return", "        return ]"),
    "less than a definition": (LAYER, "X = 3\n"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_is_seen(module, edit):
    layer = module(LAYER).Layer
    module.path.write_text(LAYER.replace(*EDITS[edit]))
    assert "was its file edited" in str(plain_forward(layer))


def test_a_function_whose_file_was_edited_may_do_anything(module):
    found = module("def f(x):\n    return x\n").f
    assert beyond_one_run(found) is None
    for text in ("def f(x):\n    return 2 * x\n", "# nothing\n"):
        module.path.write_text(text)
        for cached in (source_of, beyond_one_run):
            cached.cache_clear()
        assert "was its file edited" in beyond_one_run(found)


def test_comments_and_annotations_may_change_where_no_code_does(module):
    layer = module(LAYER).Layer
    module.path.write_text(LAYER.replace("alpha=1.0)", "alpha=1.0)  # as it was"))
    assert isinstance(plain_forward(layer), types.FunctionType)


def test_cells_of_a_notebook_are_compiled_statement_by_statement():
    """There it is no import of the same file that a name comes from, which calls of its functions go by."""
    name, space = "<a cell>", {"__name__": "of_a_notebook"}
    linecache.cache[name] = (len(LAYER), None, LAYER.splitlines(keepends=True), name)
    for node in ast.parse(LAYER).body:
        exec(compile(ast.Module([node], []), name, "exec"), space)
    assert isinstance(plain_forward(space["Layer"]), types.FunctionType)


MANGLED = """
class _Layer:
    def __init__(self):
        self.__scale = 2.0

    def forward(self, x):
        return self.__scale * x
"""


def test_private_names_are_those_of_the_class(module):
    layer = module(MANGLED)._Layer
    forward = rewritten(plain_forward(layer))
    assert forward(layer(), 3.0) == 6.0
    assert forward.__code__.co_firstlineno == layer.forward.__code__.co_firstlineno


def test_a_private_number_of_a_rewritten_layer(module):
    private = LAYER.replace("alpha=1.0", "alpha=self.__scale").replace(
        "    def forward", "    @property\n    def _Layer__scale(self):\n        return 0.5\n\n    def forward"
    )
    layer = module(private).Layer
    with apply_npu_kernels(model := model_of(layer), ops=["add_rms_norm"]) as kernels:
        found = loss_and_gradients(model, batch())
        assert kernels.report().sites
    assert_trains_alike(found, lambda: model_of(layer))


def test_sources_of_the_models_are_their_codes():
    """A source that was taken for another one would cost what is rewritten."""
    model = small_model("qwen3")
    for part in model.modules():
        function = type(part).forward
        if type(part).__module__.startswith("transformers.models") and not hasattr(function, "__wrapped__"):
            assert source_of(function) is not None, type(part)
