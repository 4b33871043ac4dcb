"""What an op does not know is done by the model's own code: at every call, whatever was found once."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as partial_rotation

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES, handle_of
from npu_trainer_kernels.patching.modules.rotation_forms import rope_form, rotate, rotation_call
from npu_trainer_kernels.support.rounding import SEEDS
from tests import warm
from tests.models import assert_outcome_close, batch, loss_and_gradients, small_model


def declined(kernels, op: str) -> dict[str, int]:
    """Calls that an op did not serve, by reason."""
    return {each.reason: each.calls for each in kernels.report().declined if each.op == op}


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Around(nn.Module):
    """A model of one module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_the_report_counts_what_ran():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=PATCHES) as kernels:
        assert set(kernels.report().ran.values()) == {0}
        loss_and_gradients(model, batch())
        loss_and_gradients(model, batch())
        ran = kernels.report().ran
        assert {op: ran[op] for op in ("rms_norm", "add_rms_norm", "swiglu", "rope", "embedding")} == {
            "rms_norm": 6, "add_rms_norm": 4, "swiglu": 4, "rope": 4, "embedding": 2,
        }  # fmt: skip
        assert not kernels.report().declined
        assert "6 calls" in str(kernels.report())


def test_tokens_are_counted_however_they_are_given():
    model, ids = small_model("llama"), batch()["input_ids"]
    mask = torch.ones_like(ids).index_fill(1, torch.arange(5), 0)
    with apply_npu_kernels(model) as kernels:
        model(input_ids=ids, attention_mask=mask)
        model(ids, mask)
        model(ids)
        model(inputs_embeds=model.model.embed_tokens(ids), attention_mask=mask)
        assert (kernels.tokens, kernels.live_tokens) == (4 * 34, 3 * 24 + 34)


def test_a_norm_that_is_given_more_than_one_tensor_runs_its_own_code():
    class Scaled(LlamaRMSNorm):
        def forward(self, hidden_states, scale=None):
            normed = super().forward(hidden_states)
            return normed if scale is None else normed * scale

    model = Around(Scaled(16))
    x, scale = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    expected, plain = model(x, scale), model(x)
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        assert torch.equal(model(x, scale), expected)
        assert declined(kernels, "rms_norm") == {"it is given something else than one tensor": 1}
        assert torch.equal(model(x), plain)
        assert kernels.report().ran["rms_norm"] == 1


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_models_in_fp64_run_their_own_code(family):
    model = small_model(family).double()
    expected = loss_and_gradients(small_model(family).double(), batch())
    with apply_npu_kernels(model, ops=PATCHES) as kernels:
        assert same(loss_and_gradients(model, batch()), expected)
    assert "float64 values" in declined(kernels, "rms_norm")
    assert kernels.report().ran["rms_norm"] == 0


def test_a_forward_on_the_instance_is_left_alone_and_is_what_runs():
    model, calls = small_model("llama"), []
    norm = model.model.norm
    norm.forward = lambda x: calls.append(1) or type(norm).forward(norm, x)
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        left = {x.module: x.reason for x in kernels.report().left_alone}
        model(**batch())
    assert "forward was set on the instance" in left["model.norm"]
    assert calls == [1]


def test_a_forward_set_later_is_what_runs_and_the_count_says_so():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        for module in model.modules():
            if "rms_norm" in str(type(module)).lower() or "RMSNorm" in type(module).__name__:
                module.forward = torch.nn.functional.relu
        model(**batch())
        assert kernels.report().ran["rms_norm"] == 0


class Special(torch.Tensor):
    """A tensor that is more than its storage, as quantised and sharded ones are."""


@pytest.mark.parametrize("op", ["rms_norm", "embedding"])
def test_a_weight_that_is_no_plain_tensor_is_not_read(op):
    model, plain = small_model("llama"), small_model("llama")
    expected = plain(**batch()).loss
    with apply_npu_kernels(model, ops=[op]) as kernels:
        module = model.model.norm if op == "rms_norm" else model.model.embed_tokens
        module._parameters["weight"] = module.weight.detach().as_subclass(Special)
        loss = model(**batch()).loss
    assert loss.item() == expected.item()
    assert "its weight is no plain float32, bfloat16 or float16 parameter" in declined(kernels, op)


def test_hidden_states_of_another_layout_are_added_as_the_model_adds_them():
    """A sum has the layout of its first term; models view it."""
    model = small_model("llama")
    layer = model.model.layers[0]
    with apply_npu_kernels(model, ops=["add_rms_norm"]) as kernels:
        fused = next(getattr(layer, name) for name in dir(layer) if name.startswith("_npu_kernels_add"))
        x, r = torch.randn(2, 48, 5).transpose(1, 2), torch.randn(2, 5, 48)
        normed, total = fused(layer.post_attention_layernorm, "post_attention_layernorm", x, r)
        assert total.stride() == (x + r).stride()
        assert torch.equal(normed, layer.post_attention_layernorm(x + r))
        assert declined(kernels, "add_rms_norm") == {"hidden states that are not contiguous, or of two shapes": 1}


def halved(module, args, out):
    return out / 2


def hook_norms(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(halved)


def exchange_norms(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.LayerNorm(48)


@pytest.mark.parametrize("change", [hook_norms, exchange_norms], ids=lambda change: change.__name__)
def test_a_norm_inside_a_layer_is_called_where_it_is_another_one(change):
    model, plain = small_model("llama"), small_model("llama")
    with apply_npu_kernels(model, ops=["add_rms_norm"]) as kernels:
        for each in (model, plain):
            change(each)
        assert same(loss_and_gradients(model, batch()), loss_and_gradients(plain, batch()))
        assert declined(kernels, "add_rms_norm") == {"a norm has hooks, or has been exchanged": 2}


def test_a_layer_that_norms_what_it_adds_is_left_alone():
    with apply_npu_kernels(small_model("olmo2"), ops=["add_rms_norm"]) as kernels:
        reasons = {each.module: each.reason for each in kernels.report().left_alone}
        why = "its forward has no residual add right before a norm"
        assert reasons == dict.fromkeys(("model.layers.0", "model.layers.1"), why)


def test_the_order_of_a_sum_is_the_models():
    """NaN payloads and layouts follow the first term; so does the dtype of what a subclass does with `__add__`."""
    model = small_model("llama")
    layer = model.model.layers[0]
    with apply_npu_kernels(model, ops=["add_rms_norm"]):
        fused = next(getattr(layer, name) for name in dir(layer) if name.startswith("_npu_kernels_add"))
        first, second = torch.randn(3, 5, 48)[:2].transpose(0, 1), torch.randn(5, 2, 48)
        _, total = fused(layer.post_attention_layernorm, "post_attention_layernorm", first, second)
        assert total.stride() == (first + second).stride()


@pytest.mark.parametrize("op", ["swiglu", "add_rms_norm"])
def test_modules_are_called_where_somebody_has_hooked_all_of_them(op):
    """As what counts the operations of a model does."""
    model, called = small_model("qwen3"), []
    with apply_npu_kernels(model, ops=[op]):
        handle = register_module_forward_hook(lambda module, args, out: called.append(module))
        try:
            model(**batch())
        finally:
            handle.remove()
    assert set(called) == {module for module in model.modules() if not isinstance(module, nn.ModuleList)}


def test_an_activation_that_has_hooks_or_was_exchanged_is_called():
    model, seen = small_model("llama"), []
    with apply_npu_kernels(model, ops=["swiglu"]) as kernels:
        first, second = (layer.mlp for layer in model.model.layers[:2])
        first.act_fn = copy.deepcopy(first.act_fn)  # transformers may share one
        handle = first.act_fn.register_forward_hook(lambda module, args, out: seen.append(out))
        second.act_fn = nn.ReLU()
        model(**batch())
        handle.remove()
        assert len(seen) == 1
        (reason,) = declined(kernels, "swiglu")
        assert reason == "its act_fn has hooks, or has been exchanged"
        assert declined(kernels, "swiglu")[reason] == 2
    plain = small_model("llama")
    plain.model.layers[1].mlp.act_fn = nn.ReLU()
    assert model(**batch()).loss.item() == plain(**batch()).loss.item()


def test_norms_with_another_epsilon_each_have_their_own():
    model, plain = small_model("llama"), small_model("llama")
    for each in (model, plain):
        each.model.layers[0].input_layernorm.variance_epsilon = 0.05
        each.model.layers[1].post_attention_layernorm.variance_epsilon = 0.02
    with apply_npu_kernels(model, ops=["rms_norm", "add_rms_norm"]):
        assert model(**batch()).loss.item() == plain(**batch()).loss.item()


def test_an_epsilon_that_is_changed_later_counts():
    model, plain = small_model("llama"), small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm", "add_rms_norm"]) as kernels:
        for each in (model, plain):
            each.model.norm.variance_epsilon = 0.3
            each.model.layers[0].post_attention_layernorm.variance_epsilon = 0.3
        assert model(**batch()).loss.item() == plain(**batch()).loss.item()
        for op, calls in (("rms_norm", 2), ("add_rms_norm", 1)):  # the add's norm is called itself
            assert declined(kernels, op) == {"its variance_epsilon has been changed": calls}


def test_an_embedding_that_is_told_to_do_more_later_does_it():
    model, plain = small_model("llama"), small_model("llama")
    with apply_npu_kernels(model, ops=["embedding"]) as kernels:
        for each in (model, plain):
            each.model.embed_tokens.max_norm = 0.05
        assert same(loss_and_gradients(model, batch()), loss_and_gradients(plain, batch()))
        assert list(declined(kernels, "embedding").values()) == [1]


class Grows(nn.Module):
    """A parametrization that is another number at every use."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = 0

    def forward(self, weight):
        self.uses += 1
        return weight * (1 + 0.1 * self.uses)


CHANGES = {
    "parametrized": lambda module: parametrize.register_parametrization(module, "weight", Grows()),
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.post_attention_layernorm", "lm_head"])
def test_a_weight_that_is_computed_from_another_is_read_as_often_as_the_model_does(name, change):
    def changed(model):
        CHANGES[change](model.get_submodule(name))
        return model

    def outcome(model):
        return loss_and_gradients(changed(model), batch())

    expected, truth = outcome(small_model("llama")), outcome(small_model("llama").double())
    model = small_model("llama")
    with apply_npu_kernels(model, ops=PATCHES) as kernels:
        found = outcome(model)
    # Each is used once, since a second use would find another weight.
    fresh = [changed(small_model("llama")) for _ in range(SEEDS)]
    assert_outcome_close(model, found, expected, truth, lambda: loss_and_gradients(fresh.pop(), batch()))
    assert kernels.report().ran["linear_cross_entropy"] == ((name, change) != ("lm_head", "parametrized"))


def transformed(model, transform):
    """A derivative of the model's loss by its norms, by a transform of torch.func or in forward mode."""
    weights = {name: p.detach() for name, p in model.named_parameters() if "norm" in name}
    inputs = {**batch(), "use_cache": False}

    def loss_of(given):
        return functional_call(model, given, (), inputs).loss

    return transform(loss_of, weights)


def by_duals(loss_of, weights):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(w, w) for name, w in weights.items()}
        return {"loss": forward_ad.unpack_dual(loss_of(duals)).tangent}


TRANSFORMS = {
    "grad": lambda loss_of, weights: grad(loss_of)(weights),
    "jvp": lambda loss_of, weights: {"loss": jvp(loss_of, (weights,), (weights,))[1]},
    "forward mode": by_duals,
    "vmap": lambda loss_of, weights: {"loss": vmap(loss_of)({name: w.expand(2, -1) for name, w in weights.items()})},
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_run_the_models_own_code(name):
    model = small_model("qwen3", attn_implementation="eager")
    expected = transformed(model, TRANSFORMS[name])
    model.gradient_checkpointing = True  # as for an attention that keeps no product before its norms
    with apply_npu_kernels(model, ops=PATCHES) as kernels:
        found = transformed(model, TRANSFORMS[name])
        assert set(kernels.report().ran.values()) == {0}
        reason = "a transform of torch.func, a derivative in forward mode, or torch.jit.trace"
        assert reason in declined(kernels, "add_rms_norm")
    assert same(found.values(), expected.values())


def test_a_probe_of_a_foreign_embedding_leaves_it_alone():
    class Positions(nn.Embedding):
        def forward(self, mask, past):
            return super().forward((mask.cumsum(1) - 1)[:, past:])

    model = Around(Positions(9, 4))
    with apply_npu_kernels(model, ops=["embedding"]) as kernels:
        assert "cannot be probed" in kernels.report().left_alone[0].reason


def test_modules_are_probed_whatever_the_default_device_and_dtype():
    model = small_model("gemma")
    expected = {(r.module, r.op, r.detail) for r in apply_npu_kernels(model, ops=PATCHES).report().replaced}
    handle_of(model).restore()
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), apply_npu_kernels(model, ops=PATCHES) as kernels:
            assert {(r.module, r.op, r.detail) for r in kernels.report().replaced} == expected
    finally:
        torch.set_default_dtype(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Lifetimes
# ---------------------------------------------------------------------------------------------------------------------


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_a_copy_is_patched_and_can_be_restored():
    model = small_model("llama")
    before = classes(model)
    with apply_npu_kernels(model, ops=PATCHES):
        twin = copy.deepcopy(model)
        assert same(loss_and_gradients(model, batch()), loss_and_gradients(twin, batch()))
    assert classes(twin) != before
    apply_npu_kernels(twin, ops=PATCHES).restore()
    assert classes(twin) == before
    assert classes(model) == before


def test_a_pickle_loads_as_if_nothing_had_been_patched(tmp_path):
    model = small_model("llama")
    before = classes(model)
    with apply_npu_kernels(model, ops=PATCHES):
        assert classes(pickle.loads(pickle.dumps(model.model))) == before[1 : 1 + len(list(model.model.modules()))]
        torch.save(model.model, tmp_path / "whole.pt")
        loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(loaded.norm.weight, model.model.norm.weight)


WITHOUT_US = """
import sys
sys.modules["npu_trainer_kernels"] = None  # importing it raises
import torch
model, ids = torch.load(sys.argv[1], weights_only=False)
model.gradient_checkpointing_enable({"use_reentrant": False})
out = model(input_ids=ids, attention_mask=(ids > 2).long(), labels=ids, use_cache=False)
out.loss.backward()
assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if type(m).__name__ != "Embedding")
torch.save(out.loss.detach(), sys.argv[2])
"""


@pytest.mark.full("adapters-saved", "qwen3-moe-saved")
@pytest.mark.parametrize(("family", "how"), [("qwen3-moe", "saved"), ("adapters", "saved"), ("adapters", "a copy")])
def test_a_whole_model_that_is_saved_while_patched_needs_nothing_of_ours(family, how, tmp_path):
    model: Any = small_model("llama" if family == "adapters" else family)
    model.config.output_router_logits = False  # transformers' own hooks that collect these cannot be pickled
    if family == "adapters":
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    before = classes(model)
    ids = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=(ids > 2).long(), labels=ids, use_cache=False).loss
    with apply_npu_kernels(model, ops=PATCHES):
        model(**batch()).loss.backward()
        kept = copy.deepcopy(model) if how == "a copy" else model
        torch.save((kept, ids), tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)[0]
        assert classes(loaded) == before
    assert classes(model) == before
    subprocess.run([sys.executable, "-c", WITHOUT_US, tmp_path / "model.pt", tmp_path / "loss.pt"], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "loss.pt"), expected)


def test_a_handle_keeps_no_weights_alive():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, ops=PATCHES)
    parameter = weakref.ref(model.model.norm.weight)
    loss_and_gradients(model, batch())
    del model
    gc.collect()
    assert parameter() is None
    assert kernels.model is None
    kernels.restore()


def leave_a_model_unrestored() -> None:
    from trl.trainer import utils

    own = utils._ChunkedLogProbFunction
    model = small_model("llama")
    apply_npu_kernels(model)
    assert utils._ChunkedLogProbFunction is not own
    del model
    gc.collect()
    assert utils._ChunkedLogProbFunction is own


def test_trls_names_come_back_with_a_model_that_nobody_restored():
    """In a process without the models of other tests, which have the names as long as they live."""
    process = warm.context().Process(target=leave_a_model_unrestored)
    process.start()
    process.join(timeout=300)
    assert process.exitcode == 0


def test_an_inner_with_leaves_the_outer_one_on():
    model = small_model("llama")
    before = classes(model)
    with apply_npu_kernels(model) as outer:
        with apply_npu_kernels(model) as inner:
            assert inner is outer
        assert outer.active
        assert classes(model) != before
    assert classes(model) == before


def test_restore_goes_on_whatever_fails(monkeypatch):
    from npu_trainer_kernels.patching.head import trl_seam

    model = small_model("llama")
    before = classes(model)
    kernels = apply_npu_kernels(model, ops=PATCHES)
    release = trl_seam.seam.release

    def broken() -> None:
        release()
        raise OSError("planted")

    kernels._undo._steps = [broken if step == release else step for step in kernels._undo._steps]
    with pytest.raises(ExceptionGroup, match="could be put back") as caught:
        kernels.restore()
    assert [str(each) for each in caught.value.exceptions] == ["planted"]
    assert classes(model) == before
    kernels.restore()


def test_what_the_user_has_set_meanwhile_stays():
    class Mine(nn.Module):
        forward = staticmethod(lambda x: x)

    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]):
        model.model.norm.__class__ = Mine
    assert type(model.model.norm) is Mine


@pytest.mark.parametrize("width", [4, 16])
def test_partial_rotation_is_not_taken_for_a_full_one(width):
    form = rope_form(partial_rotation)
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16)
    cos, sin = torch.randn(2, 1, 5, width)
    call = rotation_call(form, (q, k, cos, sin), {})
    assert same(rotate(form, call, "torch"), partial_rotation(q, k, cos, sin))


def test_a_rotation_with_other_arguments_is_the_models_own():
    form = rope_form(partial_rotation)
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16)
    cos, sin = torch.randn(2, 1, 5, 16)
    assert rotation_call(form, (q, k, cos, sin), {"scale": 2.0}) is None
    assert rotation_call(form, (q, k, cos.requires_grad_(), sin), {}) is None


def test_probes_call_no_module_that_holds_others():
    """What shards a model takes the first call of one of its units for that of the model."""
    model, called = small_model("qwen3"), []
    for module in (model, model.model, *model.model.layers):
        module.register_forward_pre_hook(lambda module, args: called.append(type(module).__name__))
    with apply_npu_kernels(model, ops=PATCHES):
        assert called == []
