"""Models with the forwards of other packages of kernels, Liger-Kernel and Unsloth: they are left alone and named.

Neither package is installed. What they put into a model is known by the module that it is from, which stand-ins have.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaRMSNorm

from npu_trainer_kernels import NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.patching.classes import original_class
from npu_trainer_kernels.patching.patch import others_forward, others_kernel
from tests.models import batch, small_model
from tests.patching.padded import padded
from tests.test_callback import make_trainer

LIGER = "its forward is Liger-Kernel's: use_liger_kernel=False switches it off"
UNSLOTH = "its forward is Unsloth's: load the model by transformers to do without it"


def of(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function like another one, from a module of another package."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    stand_in.__module__ = module
    return stand_in


RMS_NORM = of("liger_kernel.transformers.rms_norm", LlamaRMSNorm.forward)
SWIGLU = of("liger_kernel.transformers.swiglu", LlamaMLP.forward)


def on_instances(model: nn.Module) -> None:
    """As Liger does it with a model that is there, for which the Trainer asks it."""
    for module in model.modules():
        for kind, forward in ((LlamaRMSNorm, RMS_NORM), (LlamaMLP, SWIGLU)):
            if original_class(module) is kind:
                module.__dict__["forward"] = forward.__get__(module, kind)


def wrapped(model: nn.Module) -> None:
    """With accelerate's hooks around Liger's forwards."""
    on_instances(model)
    for module in model.modules():
        if "forward" in vars(module):
            inner = module.forward
            around = functools.partial(lambda module, *args, **kwargs: module._inner(*args, **kwargs), module)
            module.__dict__.update(_inner=inner, forward=functools.update_wrapper(around, inner))


def in_classes(model: nn.Module) -> None:
    """As Liger does it with the classes of a model that is still to be made."""
    for module in model.modules():
        for kind, forward in ((LlamaRMSNorm, RMS_NORM), (LlamaMLP, SWIGLU)):
            if type(module) is kind:
                module.__class__ = type("Liger", (kind,), {"forward": forward, "__module__": forward.__module__})


def by_class_alone(model: nn.Module) -> None:
    """Classes of Liger's that inherit a forward."""
    for module in model.modules():
        if type(module) in (LlamaRMSNorm, LlamaMLP):
            module.__class__ = type("Liger", (type(module),), {"__module__": "liger_kernel.transformers.any"})


@pytest.mark.parametrize("put", [on_instances, wrapped, in_classes, by_class_alone], ids=lambda put: put.__name__)
def test_ligers_modules_are_named_with_the_switch(put):
    model, plain = small_model("llama"), small_model("llama")
    put(model)
    kernels = apply_npu_kernels(model, ops=["rms_norm", "add_rms_norm", "swiglu", "varlen_attention"])
    report = kernels.report()
    assert report.replaced == []
    reasons = {(left.op, left.reason) for left in report.left_alone}
    assert {("rms_norm", LIGER), ("swiglu", LIGER), ("add_rms_norm", f"input_layernorm: {LIGER}")} < reasons
    (body,) = (reason for op, reason in reasons if op == "varlen_attention")
    assert body.endswith(LIGER)
    given = padded()
    assert torch.equal(model(**given).loss, plain(**given).loss)
    assert report.declined == []
    assert "hooks" not in str(report)


def test_a_norm_with_a_forward_of_its_own_leaves_the_others_of_its_layer():
    model = small_model("llama")
    layer = model.model.layers[0]
    layer.input_layernorm.forward = functools.partial(LlamaRMSNorm.forward, layer.input_layernorm)
    with apply_npu_kernels(model, ops=["add_rms_norm"]) as kernels:
        model(**batch()).loss.backward()
        assert kernels.report().ran == {"add_rms_norm": 2}
        assert kernels.report().declined == []


def test_a_head_inside_ligers_forward_is_left_alone():
    model = small_model("llama")
    forward = of("liger_kernel.transformers.model.llama", LlamaForCausalLM.forward)
    model.__dict__["forward"] = forward.__get__(model, LlamaForCausalLM)
    with apply_npu_kernels(model) as kernels:
        report = kernels.report()
        reasons = {left.op: left.reason for left in report.left_alone}
        assert reasons["linear_cross_entropy"] == f"LlamaForCausalLM computes its loss: {LIGER}"
        assert "linear_cross_entropy" not in {each.op for each in report.replaced}
        assert f"what is replaced inside LlamaForCausalLM may have no calls: {LIGER}" in report.notes


def test_a_rotation_of_ligers_is_named(monkeypatch):
    rotation = of("liger_kernel.transformers.rope", modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotation)
    with apply_npu_kernels(small_model("llama"), ops=["rope"]) as kernels:
        assert kernels.report().replaced == []
        assert {left.reason for left in kernels.report().left_alone} == {
            "its apply_rotary_pos_emb is Liger-Kernel's: use_liger_kernel=False switches it off"
        }


@pytest.mark.parametrize("module", ["unsloth.models.llama", "unsloth_zoo.compiler", "unsloth_compiled_module_llama"])
def test_unsloths_forwards_are_named(monkeypatch, module):
    """Unsloth replaces the forwards of transformers' classes."""
    model = small_model("llama")
    monkeypatch.setattr(LlamaDecoderLayer, "forward", of(module, LlamaDecoderLayer.forward))
    monkeypatch.setattr(LlamaMLP, "forward", of(module, LlamaMLP.forward))
    with apply_npu_kernels(model, ops=["rms_norm", "add_rms_norm", "swiglu", "varlen_attention"]) as kernels:
        report = kernels.report()
        reasons = {left.op: left.reason for left in report.left_alone}
        assert (reasons["swiglu"], reasons["add_rms_norm"]) == (UNSLOTH, UNSLOTH)
        assert reasons["varlen_attention"].endswith(UNSLOTH)
        # Their norms are transformers' still, and whether they are called is Unsloth's affair.
        assert {each.op for each in report.replaced} == {"rms_norm"}
        assert f"what is replaced inside LlamaDecoderLayer may have no calls: {UNSLOTH}" in report.notes


@pytest.mark.parametrize("asked", [True, False])
def test_the_flag_of_the_trainer_is_answered(tmp_path, capsys, monkeypatch, asked):
    """The Trainer has Liger's forwards put in when training begins, where the kernels are in already."""
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda model, _: on_instances(model), raising=False)
    callback = NpuKernelsCallback()
    trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=1)
    assert "add_rms_norm" in {each.op for each in callback.report().replaced}
    trainer.args.use_liger_kernel = asked  # as an argument it would need the package
    if asked:
        on_instances(trainer.model)  # older Trainers do it when they are built
    trainer.train()
    out = capsys.readouterr().out
    said = "note: use_liger_kernel=True: this package leaves Liger-Kernel's forwards and losses as they are; "
    assert (said + "use_liger_kernel=False lets it serve them\n" in out) == asked
    assert (f"  rms_norm, 5 LlamaRMSNorm: {LIGER}\n" in out) == asked
    served = any(line.split()[:2] == ["add_rms_norm", "torch:"] for line in out.splitlines())
    assert served != asked
    assert callback.report().declined == []


def test_what_belongs_to_nobody():
    assert others_kernel(None) is None
    assert others_kernel(object()) is None
    assert others_forward(small_model("llama")) is None
    assert others_forward(nn.Linear(2, 2)) is None
