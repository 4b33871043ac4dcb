"""apply_npu_kernels on whole models: same loss and gradients, exact undo, checkpoints, reports, bad input."""

import collections
import copy
import functools
import importlib
import io
import pickle

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.ops import linear_rms_norm
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.head.promise import PromisedLogits
from tests.closeness import assert_as_close, rounded
from tests.models import (
    FAMILIES,
    HAS_TRL_HEAD,
    TRL,
    assert_outcome_close,
    batch,
    loss_and_gradients,
    small_model,
)


def state_of(model: nn.Module) -> dict[str, tuple[type, set[str], int, int]]:
    """What undo must bring back: classes, instance attributes and the number of hooks of every module."""
    return {
        path: (type(m), set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
        for path, m in model.named_modules()
    }


# What is found only where TRL has a head.
OF_TRL = {"linear_logprob"} if HAS_TRL_HEAD else set()
HEAD = {"linear_cross_entropy"}
BODY = {"varlen_attention"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_items", "ops"), [(None, None), (50, PATCHES)])
def test_loss_and_gradients_are_the_models_own(family, num_items, ops):
    inputs = batch() if num_items is None else {**batch(), "num_items_in_batch": num_items}
    model = small_model(family)
    names = ["loss", *(n for n, _ in model.named_parameters())]

    def values(of: nn.Module) -> dict[str, torch.Tensor]:
        return dict(zip(names, loss_and_gradients(of, inputs), strict=True))

    truth = values(small_model(family).double())
    expected, moved = values(model), rounded(lambda: values(model))
    with apply_npu_kernels(model, ops=ops) as kernels:
        patched = values(model)
        assert {r.op for r in kernels.report().replaced} >= (
            FOUND.get(family, {"linear_cross_entropy"}) & HEAD
        ) | OF_TRL
    for name in names:
        assert_as_close(patched[name], expected[name], truth[name], f"{family} {name}", [m[name] for m in moved])


ROTATION = "halves, tables each, casting promote"

# What must be found in each family beside its body: a patch that silently finds nothing would pass every comparison of
# losses.
FOUND = {
    "llama": {"rms_norm", "add_rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
    "mistral": {"rms_norm", "add_rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
    "qwen2": {"rms_norm", "add_rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
    "qwen3": {"rms_norm", "add_rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
    "qwen3-moe": {"rms_norm", "add_rms_norm", "embedding", "rope", "linear_cross_entropy"},
    "gpt-oss": {"rms_norm", "add_rms_norm", "embedding", "rope", "linear_cross_entropy"},
    "gemma2": {"rms_norm", "add_rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
    "gemma3": {"rms_norm", "add_rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
    "cohere": {"layer_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
    "olmo2": {"rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy"},
}


if Version(transformers.__version__) < Version("5"):
    # There each expert is a gated MLP of its own.
    FOUND["qwen3-moe"] |= {"swiglu"}
else:
    FOUND["qwen3-moe"] |= {"moe_experts"}
    FOUND["gpt-oss"] |= {"moe_experts"}


@pytest.mark.parametrize("family", FOUND)
def test_what_is_found(family):
    with apply_npu_kernels(small_model(family), ops=PATCHES) as kernels:
        assert {r.op for r in kernels.report().replaced} == FOUND[family] | OF_TRL | BODY


def test_every_norm_of_a_llama_is_replaced_and_every_layer_rewritten():
    with apply_npu_kernels(small_model("llama"), ops=PATCHES) as kernels:
        count = collections.Counter(r.op for r in kernels.report().replaced)
    assert count == {"rms_norm": 5, "add_rms_norm": 2, "embedding": 1, "swiglu": 2, "rope": 2,
                     "linear_cross_entropy": 1, **dict.fromkeys(BODY | OF_TRL, 1)}  # fmt: skip


def test_each_patch_is_what_runs(monkeypatch):
    """Every op is called by the patched model as often as the model has places for it."""
    from npu_trainer_kernels.patching.modules import embeddings, mlps, norm_forms, residuals, rotation_forms

    calls = collections.Counter()

    def spy(module, name):
        original = getattr(module, name)

        def wrapped(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    spied = [(embeddings, "embedding"), (mlps, "swiglu_linear"), (norm_forms, "rms_norm")]
    for module, name in [*spied, (rotation_forms, "rope_of_checked"), (residuals, "add_rms_norm")]:
        spy(module, name)
    model = small_model("llama")
    with apply_npu_kernels(model, ops=PATCHES):
        model(**batch())
    # Two layers: the norm after attention is part of the fused add, the one before it and the last are their own.
    assert calls == {"embedding": 1, "swiglu_linear": 2, "rope_of_checked": 2, "add_rms_norm": 2, "rms_norm": 3}


def normed_products(monkeypatch, model: nn.Module, ops=PATCHES) -> tuple[int, list[torch.Tensor], list[str]]:
    """Patched: how often a step left out the product before a norm; its loss and gradients; what the report says."""
    from npu_trainer_kernels.patching.modules import rotations

    calls = []

    def spy(*args, **kwargs):
        calls.append(args)
        return linear_rms_norm(*args, **kwargs)

    monkeypatch.setattr(rotations, "linear_rms_norm", spy)
    with apply_npu_kernels(model, ops=ops) as kernels:
        found = loss_and_gradients(model, batch())
        details = [r.detail for r in kernels.report().replaced if r.op == "rope"]
    return len(calls), found, details


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_keep_no_product_before_a_norm(monkeypatch, reentrant):
    count, _, details = normed_products(monkeypatch, small_model("qwen3"))
    assert (count, details) == (0, [ROTATION] * 2)
    model = small_model("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    count, found, details = normed_products(monkeypatch, model)
    # Two layers, queries and keys; a reentrant checkpoint's first forward is without gradients.
    assert count == (4 if reentrant else 8)
    assert details == [f"{ROTATION}; no product kept before q_norm, k_norm"] * 2
    # The op's products have other layouts than those of the projections.
    plain, truth = small_model("qwen3"), loss_and_gradients(small_model("qwen3").double(), batch())
    expected = loss_and_gradients(plain, batch())
    assert_outcome_close(model, found, expected, truth, lambda: loss_and_gradients(plain, batch()))


def test_checkpointing_that_is_switched_on_later_is_seen():
    """The Trainer does so when training begins, and the callback has patched the model before."""

    def details(kernels) -> list[str]:
        return [r.detail for r in kernels.report().replaced if r.op == "rope"]

    model = small_model("qwen3")
    before = state_of(model)
    with apply_npu_kernels(model, ops=PATCHES) as kernels:
        assert details(kernels) == [ROTATION] * 2
        first = state_of(model)
        model.gradient_checkpointing_enable()
        assert apply_npu_kernels(model, ops=PATCHES) is kernels
        assert details(kernels) == [f"{ROTATION}; no product kept before q_norm, k_norm"] * 2
        later = state_of(model)
        kernels.refresh()
        assert state_of(model) == later
        assert later["model.layers.0.self_attn"][0] is not first["model.layers.0.self_attn"][0]
        model.gradient_checkpointing_disable()
    after = state_of(model)
    assert {path: state[0] for path, state in after.items()} == {path: state[0] for path, state in before.items()}


def test_a_product_that_somebody_sees_is_formed_as_the_model_does(monkeypatch):
    def checkpointed() -> nn.Module:
        model = small_model("qwen3")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    _, expected, _ = normed_products(monkeypatch, checkpointed())
    model, seen = checkpointed(), []
    first, second = (layer.self_attn for layer in model.model.layers)
    first.q_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    second.k_norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    count, found, _ = normed_products(monkeypatch, model)
    assert (count, len(seen)) == (4, 4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Where the norms are to stay the model's, so are their projections.
    count, _, details = normed_products(monkeypatch, checkpointed(), ("rope",))
    assert (count, details) == (0, [ROTATION] * 2)


def test_backward_hooks_of_norms_are_called():
    """They come after the patch here; a norm that is done as part of something else would not call them."""
    model, seen = small_model("qwen3"), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.model.layers[0]
    with apply_npu_kernels(model, ops=PATCHES):
        for norm in (layer.post_attention_layernorm, layer.self_attn.q_norm):
            norm.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(module))
        loss_and_gradients(model, batch())
    assert seen == [layer.post_attention_layernorm, layer.self_attn.q_norm]


def test_an_attention_with_other_rotation_is_left_alone(monkeypatch):
    from transformers.models.llama import modeling_llama

    def other(q, k, cos, sin):
        return q * cos.unsqueeze(1) + sin.unsqueeze(1), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    with apply_npu_kernels(small_model("llama"), ops=PATCHES) as kernels:
        left = {x.op: x.reason for x in kernels.report().left_alone}
    assert "not a rotation that rope knows" in left["rope"]


def test_ops_that_do_not_pay_on_this_device_are_left_alone_unless_named():
    with apply_npu_kernels(small_model("llama")) as kernels:
        assert any(x.op == "swiglu" and "as fast on a CPU" in x.reason for x in kernels.report().left_alone)
    with apply_npu_kernels(small_model("llama"), backend="swiglu=torch") as kernels:
        assert "swiglu" in {r.op for r in kernels.report().replaced}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_restore_is_exact(family):
    trl_utils = None if TRL is None else importlib.import_module("trl.trainer.utils")
    model = small_model(family)
    before = state_of(model), None if TRL is None else dict(vars(trl_utils))
    expected = loss_and_gradients(model, batch())
    kernels = apply_npu_kernels(model, ops=PATCHES)
    assert state_of(model) != before[0]
    kernels.restore()
    kernels.restore()
    assert (state_of(model), None if TRL is None else vars(trl_utils)) == before
    assert all(torch.equal(a, b) for a, b in zip(loss_and_gradients(model, batch()), expected, strict=True))
    assert not kernels.active


def test_restore_below_a_class_that_was_put_on_top():
    """As FSDP2 does to decoder layers; transformers wraps the forward that such a class inherits."""

    class Sharded:
        pass

    model = small_model("llama").eval()
    ids = batch()["input_ids"]
    expected = model(ids).logits
    kernels = apply_npu_kernels(model, ops=PATCHES)
    for layer in model.model.layers:
        layer.__class__ = type(f"Sharded{type(layer).__name__}", (Sharded, type(layer)), {})
    kernels.refresh()
    assert all(isinstance(layer, Sharded) for layer in model.model.layers)
    kernels.restore()
    assert all(isinstance(layer, Sharded) for layer in model.model.layers)
    assert torch.equal(model(ids).logits, expected)


def test_applying_twice_is_one_patch():
    model = small_model("llama")
    kernels = apply_npu_kernels(model)
    once = state_of(model)
    assert apply_npu_kernels(model) is kernels
    assert state_of(model) == once
    kernels.restore()
    assert type(model.model.norm).__mro__[1] is nn.Module


def test_what_is_added_later_is_patched_by_applying_again():
    model = small_model("llama")
    norm = model.model.norm
    with apply_npu_kernels(model) as kernels:
        model.model.norm = copy.deepcopy(small_model("llama").model.norm)
        apply_npu_kernels(model)
        assert any(r.module == "model.norm" for r in kernels.report().replaced)
        assert type(model.model.norm) is type(norm)


def test_modules_keep_class_identity_names_and_parameters():
    model, plain = small_model("llama"), small_model("llama")
    cls = type(plain.model.norm)
    parameters = [id(p) for p in model.parameters()]
    with apply_npu_kernels(model):
        assert isinstance(model.model.norm, cls)
        assert type(model.model.norm).__name__ == cls.__name__
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [id(p) for p in model.parameters()] == parameters


def test_checkpoints_are_the_same_bits_patched_or_not(tmp_path):
    model = small_model("qwen3")
    model.save_pretrained(tmp_path / "plain")
    with apply_npu_kernels(model):
        model.save_pretrained(tmp_path / "patched")
        whole = io.BytesIO()
        torch.save(model.model.norm, whole)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    assert type(loaded) is type(model.model.norm)


def test_pickled_modules_name_their_original_class():
    model = small_model("llama")
    with apply_npu_kernels(model):
        text = pickle.dumps(model.model.norm)
    assert b"npu_trainer_kernels" not in text


def test_deepcopy_of_a_patched_model_computes_the_same_and_shares_nothing():
    model = small_model("llama")
    with apply_npu_kernels(model):
        twin = copy.deepcopy(model)
        assert type(twin.model.norm) is type(model.model.norm)
        a, b = loss_and_gradients(model, batch()), loss_and_gradients(twin, batch())
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        with torch.no_grad():
            twin.model.norm.weight.zero_()
        assert model.model.norm.weight.any()


def test_two_models_one_patched_do_not_disturb_each_other():
    patched, plain = small_model("llama"), small_model("llama")
    expected = loss_and_gradients(plain, batch())
    with apply_npu_kernels(patched):
        assert type(patched(**batch()).logits) is PromisedLogits
        assert type(plain(**batch()).logits) is torch.Tensor
        assert all(torch.equal(a, b) for a, b in zip(loss_and_gradients(plain, batch()), expected, strict=True))


def test_logits_stay_in_evaluation_and_without_labels():
    model = small_model("llama")
    with apply_npu_kernels(model):
        assert model(input_ids=batch()["input_ids"]).logits.shape[-1] == 331
        model.eval()
        out = model(**batch())
        assert type(out.logits) is torch.Tensor
        assert torch.isfinite(out.loss)
        model.train()
        with torch.no_grad():
            assert type(model(**batch()).logits) is torch.Tensor


def test_shift_labels_are_not_shifted_again():
    inputs = batch()
    shifted = nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
    inputs |= {"labels": shifted, "shift_labels": shifted}
    model, plain = small_model("llama"), small_model("llama")

    def loss_of(each: nn.Module) -> torch.Tensor:
        return each(**inputs).loss.detach()

    expected, truth = loss_of(plain), loss_of(small_model("llama").double())
    with apply_npu_kernels(model):
        found = loss_of(model)
    assert_as_close(found, expected, truth, "loss", lambda: rounded(lambda: loss_of(plain)))


def test_all_labels_ignored_is_a_finite_zero():
    model = small_model("llama")
    inputs = batch()
    with apply_npu_kernels(model):
        loss = model(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], -100)).loss
        loss.backward()
    assert loss.item() == 0.0


def test_exception_in_forward_leaves_no_call_behind():
    from npu_trainer_kernels.patching.call import current_call

    model = small_model("llama")
    with apply_npu_kernels(model):
        with pytest.raises(ValueError, match="target must lie in"):
            model(input_ids=batch()["input_ids"], labels=batch()["labels"] + 1000)
        assert current_call() is None


def test_gradient_checkpointing_and_generation():
    model, plain = small_model("llama"), small_model("llama")
    expected, truth = (loss_and_gradients(each, batch()) for each in (plain, small_model("llama").double()))
    prompt = batch()["input_ids"][:1, :5]
    generated = plain.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    with apply_npu_kernels(model, ops=PATCHES):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        actual = loss_and_gradients(model, batch())
        model.gradient_checkpointing_disable()
        assert torch.equal(model.eval().generate(prompt, max_new_tokens=4, do_sample=False), generated)
    assert_outcome_close(plain, actual, expected, truth, lambda: loss_and_gradients(plain.train(), batch()))


def test_torch_compile_of_a_patched_model():
    model, plain = small_model("llama"), small_model("llama")
    expected, truth = (loss_and_gradients(each, batch()) for each in (plain, small_model("llama").double()))
    with apply_npu_kernels(model):
        compiled = loss_and_gradients(torch.compile(model, backend="aot_eager"), batch())
    assert_outcome_close(plain, compiled, expected, truth, lambda: loss_and_gradients(plain, batch()))


def test_peft_model_with_lora():
    from peft import LoraConfig, get_peft_model

    def build():
        torch.manual_seed(3)
        return get_peft_model(small_model("llama"), LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))

    plain, model = build(), build()
    expected, truth = (each(**batch()).loss.detach() for each in (plain, build().double()))
    with apply_npu_kernels(model) as kernels:
        out = model(**batch())
        assert type(out.logits) is PromisedLogits
        assert {"rms_norm", "linear_cross_entropy"} <= {r.op for r in kernels.report().replaced}
    moved = functools.partial(rounded, lambda: plain(**batch()).loss.detach())
    assert_as_close(out.loss.detach(), expected, truth, "loss", moved)


def test_adapter_on_the_head_is_left_alone():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_model("llama"), LoraConfig(target_modules=["lm_head"], r=4))
    with apply_npu_kernels(model) as kernels:
        left = [x for x in kernels.report().left_alone if x.op == "linear_cross_entropy"]
        assert "not a plain nn.Linear" in left[0].reason
        assert type(model(**batch()).logits) is torch.Tensor


class OtherNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).abs()


def test_report_names_what_was_left_alone_and_why():
    model = small_model("llama")
    model.model.norm = OtherNorm(48)
    with apply_npu_kernels(model) as kernels:
        report = kernels.report()
    assert {x.kind for x in report.left_alone if x.op == "rms_norm"} == {"OtherNorm"}
    assert "does not compute an RMSNorm" in str(report)
    assert report.as_dict()["replaced"][0]["backend"] == "torch"


def test_chosen_ops_alone():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        assert {r.op for r in kernels.report().replaced} == {"rms_norm"}
        assert type(model(**batch()).logits) is torch.Tensor


def test_a_handle_that_was_restored_leaves_another_ones_model_alone():
    model = small_model("llama")
    first = apply_npu_kernels(model, ops=["rms_norm"])
    first.restore()
    first.refresh()
    assert apply_npu_kernels(model, ops=["rms_norm"]) is first
    first.restore()
    with apply_npu_kernels(model), pytest.raises(RuntimeError, match="the model has another one since"):
        first.refresh()


def test_bad_input():
    model = small_model("llama")
    before = state_of(model)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got str"):
        apply_npu_kernels("llama")
    with pytest.raises(ValueError, match=r"ops must be a sequence of .*; got \['rms'\]"):
        apply_npu_kernels(model, ops=["rms"])
    with pytest.raises(ValueError, match=r"ops must be a sequence of .*; got 3"):
        apply_npu_kernels(model, ops=3)
    for none in ([], ()):
        with pytest.raises(ValueError, match=r"ops must be a sequence of .*, one at least; got [(\[][)\]]$"):
            apply_npu_kernels(model, ops=none)
    with pytest.raises(ValueError, match="backend must be one of triton, torch"):
        apply_npu_kernels(model, backend="cuda")
    with pytest.raises(ValueError, match=r"backend must be 'torch' or 'op=backend,...'; got \['torch'\]"):
        apply_npu_kernels(model, backend=["torch"])
    with pytest.raises(ValueError, match="strict must be true or false; got 'no'"):
        apply_npu_kernels(model, strict="no")
    assert state_of(model) == before
    with apply_npu_kernels(model), pytest.raises(ValueError, match="patched already with"):
        apply_npu_kernels(model, ops=["rms_norm"])
    assert state_of(model) == before


def test_a_failure_half_way_leaves_the_model_unpatched(monkeypatch):
    model = small_model("llama")
    before = state_of(model)

    def broken(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(type(PATCHES["linear_cross_entropy"]), "recognise", broken)
    with pytest.raises(RuntimeError, match="planted"):
        apply_npu_kernels(model)
    assert state_of(model) == before


def test_every_patch_has_a_backend_table():
    from npu_trainer_kernels.backends import OPS

    assert set(PATCHES) <= set(OPS)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_norms_that_are_partitioned_are_what_they_are_when_whole(family):
    """DeepSpeed's ZeRO-3 partitions parameters before there is anything to patch: [0] is no width to probe with."""
    model = small_model(family)
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        whole = kernels.report().text(full=True)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        assert kernels.report().text(full=True) == whole


def test_hooks_that_are_added_later_are_called():
    model, seen = small_model("llama"), []
    expected = loss_and_gradients(model, batch())
    with apply_npu_kernels(model, ops=["add_rms_norm"]):
        for layer in model.model.layers:
            layer.post_attention_layernorm.register_forward_hook(lambda module, args, out: seen.append(out))
        hooked = loss_and_gradients(model, batch())
    assert len(seen) == len(model.model.layers)
    for actual, own in zip(hooked, expected, strict=True):
        assert torch.equal(actual, own)
