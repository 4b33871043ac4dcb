"""`hub_kernels` with the package `kernels` itself, in an environment of their own (`make test-hub-kernels`), since what
`kernels` makes of transformers' functions is there for every test of a process."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import kernels
import pytest
import torch
import transformers
from kernels import Mode
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels as of_transformers
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from npu_trainer_kernels import NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.hub_kernels import kernel_config, kernel_mapping, report
from npu_trainer_kernels.patching.hub_layers import NAMES, RMSNorm
from tests.models import SMALL, assert_outcome_close, batch, in_double, loss_and_gradients, small_model
from tests.patching.test_norms import MODELS
from tests.test_callback import losses, make_trainer

FOREIGN = (
    "a kernel of the package kernels, from tests.hub_kernels.test_hub_kernels: use_kernels=False, or kernel_config() "
    "of npu_trainer_kernels.hub_kernels, does without it"
)
# The ops that serve a family, with their calls in one forward of its model.
SERVED = {
    "llama": {"rms_norm": 5, "rope": 2},
    "qwen3": {"rms_norm": 9, "rope": 2},
    "gpt-oss": {"rms_norm": 5, "rope": 2},
    "qwen3-next": {"gated_rms_norm": 1, "causal_conv1d": 1},
}


def make(family: str) -> Any:
    if family != "qwen3-next":
        return small_model(family)
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**{**SMALL, **MODELS[family][1]})
    return transformers.Qwen3NextForCausalLM(config).train()


def parts(model: nn.Module) -> Iterator[nn.Module]:
    """A model's modules, and the functions in them, which are one object for all models of a family."""
    for module in model.modules():
        yield module
        yield from (vars(module).get("_kernel_funcs") or {}).values()


@contextlib.contextmanager
def until_the_end(model: nn.Module) -> Iterator[nn.Module]:
    """Takes out of a model, and of its family's functions, what `kernels` has put there."""
    try:
        yield model
    finally:
        for part in parts(model):
            vars(part).pop("forward", None)


def ran(model: nn.Module, before: dict[str, int]) -> dict[str, int]:
    """Calls since; functions are counted for all models of a process."""
    return {op: calls - before.get(op, 0) for op, calls in report(model).ran.items()}


class ForeignNorm(nn.Module):
    """Somebody else's kernel."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return LlamaRMSNorm.forward(self, hidden_states)


class Foreign:
    def load(self) -> type[nn.Module]:
        return ForeignNorm


def foreign(model: nn.Module) -> None:
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": Foreign()}}, inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.TRAINING, device="cpu")


def test_the_names_are_those_that_transformers_has():
    decorated = {"RMSNormZeroCentered"}  # transformers' own mapping has no kernel for it outside of GGUF
    assert set(NAMES) - decorated <= set(of_transformers.get_kernel_mapping_transformers())
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    assert Qwen3_5RMSNorm.kernel_layer_name in decorated


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("family", list(SERVED))
def test_a_loaded_model_trains_as_without(tmp_path, monkeypatch, family, backend):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", backend)
    plain, inputs = make(family), batch()
    plain.save_pretrained(tmp_path)
    expected = loss_and_gradients(plain, inputs)
    with in_double():
        truth = loss_and_gradients(copy.deepcopy(plain).double(), inputs)
    options = {"experts_implementation": "eager"} if hasattr(plain.config, "num_experts_per_tok") else {}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, use_kernels=True, kernel_config=kernel_config(), dtype=torch.float32, **options
    )
    with until_the_end(model):
        before = report(model).ran
        found = loss_and_gradients(model.train(), inputs)
        calls = ran(model, before)
        assert {op: calls[op] for op in SERVED[family]} == SERVED[family], report(model).text(full=True)
        assert {each.backend for each in report(model).replaced} == {backend}
        assert report(model).left_alone == []
        assert report(model).declined == []
    assert_outcome_close(plain, found, expected, truth, lambda: loss_and_gradients(plain, inputs))


def test_generation_is_the_models_own(tmp_path):
    plain = small_model("llama").eval()
    plain.save_pretrained(tmp_path)
    ids, options = batch()["input_ids"], {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = plain.generate(ids, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=kernel_config())
    with until_the_end(model):
        assert torch.equal(model.generate(ids, **options), expected)
        # Of the six forwards one has more than one token.
        assert report(model).sites[-1].ran <= 1


def test_kernelize_with_the_mapping_alone():
    model, inputs = small_model("llama"), batch()
    expected = model(**inputs).loss
    with until_the_end(model), kernels.use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.TRAINING)
        before = report(model)
        assert [note for note in before.notes if "had no call yet" in note] != [] or before.sites
        assert torch.allclose(model(**inputs).loss, expected)
        assert {each.kind for each in report(model).replaced if each.op == "rms_norm"} == {"LlamaRMSNorm"}
        assert report(model).ran["rms_norm"] == 5


def test_a_class_with_the_name_of_an_mlp_is_served(monkeypatch):
    """transformers gives the name to no class: `kernels.replace_kernel_forward_from_hub` does."""
    monkeypatch.setattr(LlamaMLP, "kernel_layer_name", "SwiGLUMLP", raising=False)
    monkeypatch.setattr(LlamaMLP, "kernel_condition", staticmethod(lambda module: True), raising=False)
    plain, model, inputs = small_model("llama"), small_model("llama"), batch()
    expected = loss_and_gradients(plain, inputs)
    with in_double():
        truth = loss_and_gradients(small_model("llama").double(), inputs)
    with until_the_end(model), kernels.use_kernel_mapping(kernel_mapping(["SwiGLUMLP"]), inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.TRAINING)
        found = loss_and_gradients(model, inputs)
        assert report(model).ran == {"swiglu": 2}
    assert_outcome_close(plain, found, expected, truth, lambda: loss_and_gradients(plain, inputs))


def test_with_torch_compile_a_module_keeps_its_own_code():
    model = small_model("llama")
    with until_the_end(model), kernels.use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
        assert "no module has a layer of this package" in str(report(model))


def test_a_model_without_any_of_the_layers_is_refused(tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has none of the layers RMSNormGated; its names for kernels"):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=kernel_config(["RMSNormGated"]))


# ---------------------------------------------------------------------------------------------------------------------
# With the callback on
# ---------------------------------------------------------------------------------------------------------------------

OPS = ("rms_norm", "add_rms_norm", "swiglu", "rope", "varlen_attention")


def settle(model: nn.Module, how: str) -> None:
    """Kernelizes a model: with this package's layers, or with no kernel for any of its modules."""
    mapping = kernel_mapping() if how == "ours" else {}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.TRAINING, device="cpu")


def served(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, int]]:
    outcome = loss_and_gradients(model, batch())
    found = apply_npu_kernels(model, ops=OPS).report()
    assert found.declined == [], str(found)
    assert found.gone == []
    return outcome, found.ran


@pytest.mark.parametrize("how", ["ours", "own"])
@pytest.mark.parametrize("order", ["kernels first", "kernels last", "kernels twice"])
def test_kernels_takes_nothing_away_from_the_callback(how, order):
    model, other = small_model("llama"), small_model("llama")
    with apply_npu_kernels(other, ops=OPS):
        expected, calls = served(other)
    with until_the_end(model):
        if order != "kernels last":
            settle(model, how)
        with apply_npu_kernels(model, ops=OPS):
            if order != "kernels first":
                settle(model, how)
            found, now = served(model)
            assert now == calls
            assert calls["rope"] == 2
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            if order == "kernels twice":
                settle(model, how)
        # What `kernels` had set is there again, for the class that the module has again.
        norm = model.model.norm
        assert type(norm) is LlamaRMSNorm
        assert norm.forward.__func__ is (RMSNorm.forward if how == "ours" else LlamaRMSNorm.forward)
        assert torch.allclose(loss_and_gradients(model, batch())[0], expected[0])


def test_a_change_of_mode_kernelizes_again_and_the_callback_goes_on(tmp_path):
    """transformers kernelizes a model that was asked for `use_kernels` at every change of its mode."""
    small_model("llama").save_pretrained(tmp_path / "model")
    plain = make_trainer(tmp_path, small_model("llama"), [NpuKernelsCallback(audit="off")])
    plain.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_kernels=True, kernel_config=kernel_config())
    with until_the_end(model):
        callback = NpuKernelsCallback(audit="off")
        trainer = make_trainer(tmp_path, model, [callback])
        trainer.train()
        assert losses(trainer) == losses(plain)
        found = callback.report()
        assert found.ran["add_rms_norm"] == 2 * 3
        assert found.ran["linear_cross_entropy"] == 3
        assert found.declined == []


def test_a_kernel_of_somebody_else_stays_and_is_named_first():
    model, plain = small_model("llama"), small_model("llama")
    with until_the_end(model):
        foreign(model)
        with apply_npu_kernels(model, ops=["rms_norm", "add_rms_norm", "swiglu"]) as handle:
            reasons = {left.op: left.reason for left in handle.report().left_alone}
            assert reasons == {
                "rms_norm": f"its forward is {FOREIGN}",
                "add_rms_norm": f"input_layernorm: its forward is {FOREIGN}",
            }
            assert {each.op for each in handle.report().replaced} == {"swiglu"}
            assert torch.equal(model(**batch()).loss, plain(**batch()).loss)


def test_a_kernel_of_somebody_else_that_comes_later_is_named():
    model, plain = small_model("llama"), small_model("llama")
    with until_the_end(model), apply_npu_kernels(model, ops=["rms_norm"]) as handle:
        foreign(model)
        assert torch.equal(model(**batch()).loss, plain(**batch()).loss)
        assert handle.report().ran == {"rms_norm": 0}
        assert handle.report().gone == [f"5 LlamaRMSNorm that rms_norm served now have another forward, {FOREIGN}"]
        assert "note: 5 LlamaRMSNorm that rms_norm served now have another forward" in str(handle.report())


class ForeignRotation(nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return type(self).forward(self, q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


class ForeignFunction:
    def load(self) -> type[nn.Module]:
        return ForeignRotation


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_rotation_of_somebody_else_is_named_or_runs(order):
    model = small_model("llama")

    def settle() -> None:
        with kernels.use_kernel_mapping({"rotary_pos_emb": {"cpu": ForeignFunction()}}, inherit_mapping=False):
            kernels.kernelize(model, mode=Mode.TRAINING, device="cpu")

    with until_the_end(model):
        if order == "first":
            settle()
        with apply_npu_kernels(model, ops=["rope"]) as handle:
            if order == "first":
                (left,) = {left.reason for left in handle.report().left_alone}
                assert left == f"its apply_rotary_pos_emb is {FOREIGN}"
            else:
                settle()
                model(**batch())
                assert handle.report().ran == {"rope": 0}
