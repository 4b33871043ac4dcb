"""The layers for the package `kernels` without that package: stand-ins have what it sets on modules.

`tests/hub_kernels` has the same with `kernels` itself.
"""

import copy
import gc
import inspect
import types
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from npu_trainer_kernels import MissingDependencyError, apply_npu_kernels
from npu_trainer_kernels.hub_kernels import DEVICES, kernel_config, kernel_mapping, report
from npu_trainer_kernels.ops import causal_conv1d_reference
from npu_trainer_kernels.patching.bound_forwards import has_other_forward, is_kernelizable, own_function
from npu_trainer_kernels.patching.hub_layers import NAMES, CausalConv1d, GatedMlp, RMSNorm, RotaryEmbedding, layer_of
from tests.closeness import assert_op_close
from tests.models import batch, loss_and_gradients, small_model

ROOT = Path(__file__).parents[2]


def kernelized(module: Any, layer: type[nn.Module]) -> Any:
    """A module with the forward of a layer, as `kernels.kernelize` sets it."""
    module.forward = types.MethodType(layer.forward, module)
    return module


class Norm(LlamaRMSNorm):
    kernel_layer_name = "RMSNorm"


def norm(width: int = 16) -> Any:
    return kernelized(Norm(width), RMSNorm)


def function(own: Any) -> Any:
    """A function as `kernels` makes a module of it."""

    class Func(nn.Module):
        kernel_layer_name = own.__name__

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

    parameters = ["self", *own.__code__.co_varnames[: own.__code__.co_argcount]]
    defaults = dict(zip(reversed(parameters), reversed(own.__defaults__ or ()), strict=False))
    Func.forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults.get(n, inspect._empty))
            for n in parameters
        ]
    )
    Func.__module__ = "kernels.layer.func"
    return Func()


def causal_conv1d_fn(hidden_states: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> Any:
    """As in transformers' models."""
    width, taps = weight.shape
    padded = F.conv1d(hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, padding=taps - 1, groups=width)
    y = padded[:, :, : hidden_states.shape[2]]
    y = F.silu(y) if activation in ("silu", "swish") else torch.tanh(y) if activation == "tanh" else y
    return y.to(hidden_states.dtype)


def model_of(**parts: Any) -> nn.Module:
    """A model with these modules; functions are attached as `kernels.use_kernelized_func` does it."""
    model = nn.Module()
    for name, part in parts.items():
        if any(True for _ in part.parameters()):
            model.add_module(name, part)
        else:
            vars(model).setdefault("_kernel_funcs", {})[name] = part
    return model


def test_a_norm_is_recognised_at_its_first_call():
    model = model_of(norm=norm())
    assert report(model).notes == [
        "1 modules with a layer of this package had no call yet: run a batch, then ask again"
    ]
    model.norm(torch.randn(2, 3, 16))
    found = report(model)
    assert [(each.module, each.kind, each.op, each.backend) for each in found.replaced] == [
        ("norm", "Norm", "rms_norm", "torch")
    ]
    assert found.ran == {"rms_norm": 1}
    assert found.notes == []


def test_without_a_layer_the_report_says_how_to_get_one():
    assert report(nn.Linear(2, 2)).notes == [
        "no module has a layer of this package: load the model by "
        "from_pretrained(..., use_kernels=True, kernel_config=kernel_config())"
    ]


@pytest.mark.parametrize("where", ["autocast", "inference", "no gradients"])
def test_the_first_call_of_an_mlp_may_be_anywhere(monkeypatch, where):
    monkeypatch.setattr(LlamaMLP, "kernel_layer_name", "SwiGLUMLP", raising=False)
    contexts = {"autocast": torch.autocast("cpu", torch.bfloat16), "inference": torch.inference_mode(),
                "no gradients": torch.no_grad()}  # fmt: skip
    model = small_model("llama")
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 3, 48)
    expected = mlp(x)
    kernelized(mlp, GatedMlp)
    with contexts[where]:
        mlp(x)
    assert torch.allclose(mlp(x), expected, atol=0, rtol=1e-5)
    assert report(model).ran == {"swiglu": 2}


@pytest.mark.parametrize("where", ["autocast", "inference", "no gradients"])
def test_the_first_call_may_be_anywhere(where):
    contexts = {"autocast": torch.autocast("cpu", torch.bfloat16), "inference": torch.inference_mode(),
                "no gradients": torch.no_grad()}  # fmt: skip
    module, x = norm(), torch.randn(2, 3, 16)
    with contexts[where]:
        module(x)
    module(x)
    assert report(model_of(norm=module)).ran == {"rms_norm": 1 + (where == "autocast")}


def test_a_norm_that_computes_something_else_keeps_its_code():
    class Other(Norm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states).abs()

    module, x = kernelized(Other(16), RMSNorm), torch.randn(2, 3, 16)
    assert torch.equal(module(x), LlamaRMSNorm.forward(module, x).abs())
    assert [(left.op, left.reason) for left in report(model_of(norm=module)).left_alone] == [
        ("use_kernels", "it does not compute an RMSNorm that rms_norm knows")
    ]


def test_a_module_of_another_kind_keeps_its_code():
    class Linear(nn.Linear):
        kernel_layer_name = "RMSNorm"

    module, x = kernelized(Linear(4, 4), RMSNorm), torch.randn(2, 3, 4)
    assert torch.equal(module(x), nn.Linear.forward(module, x))
    (left,) = report(model_of(it=module)).left_alone
    assert left.reason == "it does not compute what rms_norm does"


def test_a_call_that_the_op_does_not_take_runs_the_modules_code():
    module = norm()
    module(torch.randn(2, 3, 16))
    module(torch.randn(2, 3, 16, dtype=torch.float64))
    found = report(model_of(norm=module))
    assert found.ran == {"rms_norm": 1}
    assert [each.reason for each in found.declined] == ["float64 values"]


def test_generation_of_one_token_runs_the_modules_code(monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "triton")
    module = norm()
    module(torch.randn(2, 3, 16))
    with torch.no_grad():
        module(torch.randn(2, 1, 16))
    module(torch.randn(2, 1, 16))
    assert report(model_of(norm=module)).ran == {"rms_norm": 2}


def test_a_copy_has_a_layer_of_its_own():
    module, x = norm(), torch.randn(2, 3, 16)
    module(x)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.mul_(2)
    assert torch.equal(twin(x), 2 * module(x))


def test_a_layer_keeps_no_module_alive():
    module = norm()
    module(torch.randn(2, 3, 16))
    there = weakref.ref(module)
    del module
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("heads", [1, 2])
def test_a_rotation_is_served(heads):
    rotation = kernelized(function(apply_rotary_pos_emb), RotaryEmbedding)
    shape = (2, 3, 5, 16) if heads == 1 else (2, 5, 3, 16)
    q, k, cos, sin = torch.randn(shape), torch.randn(shape), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    found, expected = (f(q, k, cos, sin, unsqueeze_dim=heads) for f in (rotation, apply_rotary_pos_emb))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert report(model_of(rotation=rotation)).ran == {"rope": 1}


def test_another_rotation_keeps_its_code():
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return q + cos.unsqueeze(unsqueeze_dim), k

    rotation = kernelized(function(apply_rotary_pos_emb), RotaryEmbedding)
    q = torch.randn(2, 3, 5, 16)
    cos = torch.randn(2, 5, 16)
    assert torch.equal(rotation(q, q, cos, cos)[0], q + cos.unsqueeze(1))
    (left,) = report(model_of(rotation=rotation)).left_alone
    assert left.reason == "it is not a rotation that rope knows"


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_is_served(monkeypatch, backend, activation, biased):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", backend)
    layer = kernelized(function(causal_conv1d_fn), CausalConv1d)
    shapes = ((2, 7, 9), (7, 4), (7,)) if biased else ((2, 7, 9), (7, 4))
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def reference(x: Any, weight: Any, bias: Any = None) -> Any:
        return causal_conv1d_reference(x, weight, bias, activation=None if activation is None else "silu")

    def served(x: Any, weight: Any, bias: Any = None) -> Any:
        return layer(x, weight, bias, activation=activation, position_ids=None)

    assert_op_close(served, reference, tensors, lambda outputs: outputs[0].square().sum())
    found = report(model_of(convolution=layer))
    assert found.declined == []
    assert {each.backend for each in found.replaced} == {backend}


@pytest.mark.parametrize(("reason", "differs"), list({
    "packed sequences, or states before or after them": {"seq_idx": torch.zeros(2, 9)},
    "activation='tanh'": {"activation": "tanh"},
    "no plain tensors of floats": {"weight": torch.randn(7, 4, dtype=torch.float64)},
    "other shapes than [B, C, L] and [C, K], K up to 8": {"weight": torch.randn(7, 9)},
    "a bias of another dtype than the weight": {"bias": torch.randn(7).half(), "weight": torch.randn(7, 4).half()},
}.items()), ids=lambda value: value.split()[0] if isinstance(value, str) else "")  # fmt: skip
def test_a_convolution_that_the_op_does_not_take(monkeypatch, reason, differs):
    given: dict[str, Any] = {"weight": torch.randn(7, 4), "bias": None, "activation": "silu", **differs}
    if reason.startswith("a bias"):
        given["bias"] = given["bias"].float()
        monkeypatch.setattr(F, "conv1d", lambda x, *args, **kwargs: x)  # PyTorch refuses it, too
    layer = kernelized(function(causal_conv1d_fn), CausalConv1d)
    x = torch.randn(2, 7, 9)
    found = layer(x, given.pop("weight"), given.pop("bias"), given.pop("activation"), **given)
    assert found.shape == x.shape
    outcome = report(model_of(convolution=layer))
    assert [each.reason for each in outcome.declined] == [reason]
    assert outcome.ran == {"causal_conv1d": 0}


# ---------------------------------------------------------------------------------------------------------------------
# What the package is given
# ---------------------------------------------------------------------------------------------------------------------


def test_the_mapping_has_every_layer_for_every_device():
    mapping = kernel_mapping()
    assert list(mapping) == list(NAMES)
    for name, devices in mapping.items():
        assert tuple(devices) == DEVICES
        assert {each.load() for each in devices.values()} == {NAMES[name]}
        assert str(devices["npu"]) == f"npu_trainer_kernels (layer {name})"
    assert kernel_mapping(["RMSNorm"])["RMSNorm"] == mapping["RMSNorm"]


@pytest.mark.parametrize("layer", dict.fromkeys(NAMES.values()), ids=lambda layer: layer.__name__)
def test_a_layer_is_what_kernels_allows(layer):
    """No constructor, and no members beyond these two."""
    members = {name for name in vars(layer) if not name.startswith("__")}
    assert members == {"can_torch_compile", "has_backward", "forward"}
    assert (layer.can_torch_compile, layer.has_backward) == (False, True)
    assert layer.__init__ is nn.Module.__init__


@pytest.mark.parametrize("ask", [kernel_mapping, kernel_config])
def test_wrong_layers_are_named(ask):
    names = ", ".join(NAMES)
    with pytest.raises(ValueError, match=f"layers must be names among {names}, at least one; got \\['LayerNorm'\\]"):
        ask(["LayerNorm"])
    with pytest.raises(ValueError, match="at least one; got \\[\\]"):
        ask([])
    with pytest.raises(TypeError, match="layers must be a sequence of names, as \\['RMSNorm'\\]; got the string"):
        ask("RMSNorm")


@pytest.fixture
def described(monkeypatch):
    """Installs a transformers by its description alone."""

    def install(version: str, *requires: str) -> None:
        monkeypatch.setattr("transformers.utils.is_kernels_available", lambda: False)
        monkeypatch.setattr(metadata, "version", {"transformers": version}.__getitem__)
        monkeypatch.setattr(metadata, "requires", {"transformers": list(requires) or None}.__getitem__)

    return install


@pytest.mark.parametrize(
    ("version", "others"), [("5.23.0", True), ("5.22.2", False)], ids=["newer than the tested pair", "of the pair"]
)
def test_without_the_package_the_command_leaves_transformers_alone(described, version, others):
    """`transformers[kernels]` replaces 5.23 and 5.24 by 5.22.2, since the index has no kernels 0.18."""
    described(version, "torch>=2.4", 'kernels<0.19,>=0.18.2; extra == "kernels"', 'kernels==9; extra == "dev"')
    with pytest.raises(MissingDependencyError) as told:
        kernel_config()
    first, *more = str(told.value).split(". ", 1)
    wanted = "kernels<0.19,>=0.18.2"
    assert first == f"kernel_config needs {wanted}, as transformers {version} takes it: pip install '{wanted}'"
    pair = f"two were tested together, and replace transformers {version}: pip install {' '.join(tested_pair())}"
    assert [each.endswith(pair) for each in more] == [True] * others


def test_a_transformers_that_names_no_kernels_takes_any(described):
    described("5.0.0")
    with pytest.raises(MissingDependencyError, match=r"needs kernels, as .* takes it: pip install 'kernels'\."):
        kernel_config()


def tested_pair() -> list[str]:
    """The versions of the environment in which the layers are tested with `kernels` itself."""
    lines = (ROOT / "locks" / "hub-kernels.in").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_the_page_names_the_tested_pair():
    page = (ROOT / "docs" / "ways-in" / "hub-kernels.md").read_text()
    assert f"pip install {' '.join(tested_pair())}\n" in page
    transformers, kernels = (each.split("==") for each in sorted(tested_pair(), reverse=True))
    assert f"with {' '.join(kernels)} and {' '.join(transformers)}" in page


def test_without_its_config_transformers_is_too_old(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_kernels_available", None)
    monkeypatch.delattr("transformers.utils.is_kernels_available")
    with pytest.raises(
        MissingDependencyError, match=f"KernelConfig; .* together: pip install {' '.join(tested_pair())}"
    ):
        kernel_config()


# ---------------------------------------------------------------------------------------------------------------------
# Beside apply_npu_kernels
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def marked(monkeypatch):
    """Marks the norms of Llama, as transformers does where `kernels` is installed."""
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)


def kernelize(model: nn.Module, layer: type[nn.Module] | None) -> None:
    """Sets a layer's forward, or without one that of each module's class."""
    for module in model.modules():
        if is_kernelizable(module):
            kernelized(module, type(module) if layer is None else layer)


@pytest.mark.parametrize("layer", [None, RMSNorm], ids=["own", "ours"])
@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_forwards_of_kernels_hide_nothing(marked, layer, order):
    model, plain = small_model("llama"), small_model("llama")
    with apply_npu_kernels(plain, ops=["rms_norm", "add_rms_norm"]) as handle:
        expected, calls = loss_and_gradients(plain, batch()), handle.report().ran
    if order != "after":
        kernelize(model, layer)
    with apply_npu_kernels(model, ops=["rms_norm", "add_rms_norm"]) as handle:
        if order != "before":
            kernelize(model, layer)
            assert handle.report().gone == []
        found = loss_and_gradients(model, batch())
        assert handle.report().ran == calls
        assert handle.report().declined == []
        assert not any("forward" in vars(module) for module in model.modules())
        if order == "both":
            kernelize(model, layer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for module in (m for m in model.modules() if isinstance(m, LlamaRMSNorm)):
        assert type(module) is LlamaRMSNorm
        assert layer_of(module) is layer
        assert not has_other_forward(module)
        assert module.forward.__func__ is (LlamaRMSNorm.forward if layer is None else RMSNorm.forward)


def test_a_module_that_is_called_alone_is_left_to_its_patch(marked):
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]) as handle:
        kernelize(model, RMSNorm)
        model.model.norm(torch.randn(2, 3, 48))
        assert handle.report().ran == {"rms_norm": 1}


def test_a_copy_takes_them_out_for_itself(marked):
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]) as handle:
        twin = copy.deepcopy(model)
        kernelize(twin, RMSNorm)
        twin(**batch())
        assert not any("forward" in vars(module) for module in twin.modules())
        assert handle.report().ran == {"rms_norm": 5}


def test_where_nothing_is_marked_no_hook_looks():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]):
        assert not [hook for hook in model._forward_pre_hooks.values() if type(hook).__name__ == "_Again"]


def test_a_forward_of_somebody_else_stays(marked):
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return LlamaRMSNorm.forward(self, hidden_states)

    forward.__module__ = "their_kernels"
    reason = (
        "a kernel of the package kernels, from their_kernels: use_kernels=False, or kernel_config() of "
        "npu_trainer_kernels.hub_kernels, does without it"
    )
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]) as handle:
        model.model.norm.forward = types.MethodType(forward, model.model.norm)
        model(**batch())
        assert handle.report().ran == {"rms_norm": 4}
        assert handle.report().gone == [f"1 LlamaRMSNorm that rms_norm served now have another forward, {reason}"]
    assert model.model.norm.forward.__func__ is forward
    with apply_npu_kernels(model, ops=["rms_norm"]) as handle:
        assert [left.reason for left in handle.report().left_alone] == [f"its forward is {reason}"]


def test_functions_of_a_models_code():
    assert own_function(apply_rotary_pos_emb) is apply_rotary_pos_emb
    made = function(apply_rotary_pos_emb)
    assert own_function(made).__self__ is made
    assert own_function(nn.Identity()) is None
    assert own_function(norm()) is None
    assert own_function(3) is None


def test_a_rotation_that_kernels_has_made_a_module_of_is_served(monkeypatch):
    """transformers' rotations are modules wherever `kernels` is installed."""
    made = function(apply_rotary_pos_emb)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", made)
    plain, model = small_model("llama"), small_model("llama")
    expected = loss_and_gradients(plain, batch())
    with apply_npu_kernels(model, ops=["rope"], backend="torch") as handle:
        found = loss_and_gradients(model, batch())
        assert handle.report().ran == {"rope": 2}
        assert torch.allclose(found[0], expected[0])

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            return apply_rotary_pos_emb(*args, **kwargs)

        theirs.__module__ = "their_kernels"
        made.forward = types.MethodType(theirs, made)
        model(**batch())
        assert handle.report().ran == {"rope": 2}
    with apply_npu_kernels(model, ops=["rope"]) as handle:
        (reason,) = {left.reason for left in handle.report().left_alone}
        assert reason.startswith("its apply_rotary_pos_emb is a kernel of the package kernels, from their_kernels")
