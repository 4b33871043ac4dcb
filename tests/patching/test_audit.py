"""The first batch decides: what differs from the model's own code there is taken out before the optimizer moves."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES, audit
from npu_trainer_kernels.patching.body import packed
from npu_trainer_kernels.patching.head import head_call, trl_seam
from npu_trainer_kernels.patching.modules.norms import RmsNormPatch
from tests.models import FAMILIES, HAS_TRL_HEAD, SMALL, batch, small_model
from tests.patching.padded import padded

OPS = [op for op in PATCHES if op != "linear_logprob"]


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def trained(model, inputs, *, audits=True, ops=OPS):
    """Gradients of a patched model's first step, its handle, and what it said."""
    said = []
    kernels = apply_npu_kernels(model, ops=ops)
    if audits:
        kernels.audit(said.append)
    found = gradients(model, inputs)
    return found, kernels, said


def apart(found, expected):
    return max(((found[n] - e).norm() / e.norm().clamp(min=1e-9)).item() for n, e in expected.items())


def off(kernels):
    return {site.op for site in kernels.report().sites if site.off is not None}


# ---------------------------------------------------------------------------------------------------------------------
# What is right stays
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_agrees_stays(name, dtype):
    model = small_model(name).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels = apply_npu_kernels(model, ops=OPS)
        kernels.audit()
        model(**padded()).loss.backward()
    (seen,) = kernels.report().audits
    assert not seen.differing
    assert not off(kernels)
    assert seen.calls > 0
    assert seen.farthest < 0.5, "the limit is to leave room"


@pytest.mark.parametrize("ops", [["varlen_attention"], ["moe_experts"]], ids=str)
def test_a_body_of_experts_is_compared_as_its_own_rounding_allows(ops):
    for seed in range(3):
        model = small_model("qwen3-moe", seed=seed)
        _, kernels, said = trained(model, padded(), ops=ops)
        assert not said
        assert kernels.report().audits[0].rows == 3


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong goes
# ---------------------------------------------------------------------------------------------------------------------


def from_place_eighteen_on(run):
    """An op that is another one beyond what any probe has."""

    def wrong(self, site, module, x, *args, **kwargs):
        y = run(self, site, module, x, *args, **kwargs)
        return torch.cat((y[..., :18, :], 1.01 * y[..., 18:, :]), -2) if x.dim() == 3 and x.shape[1] > 18 else y

    return wrong


def test_an_op_that_differs_beyond_a_probe(monkeypatch):
    model, inputs = small_model("llama"), padded()
    expected = gradients(copy.deepcopy(model), inputs)
    monkeypatch.setattr(RmsNormPatch, "run", from_place_eighteen_on(RmsNormPatch.run))
    ops = ["rms_norm", "swiglu", "linear_cross_entropy"]
    wrong, *_ = trained(copy.deepcopy(model), inputs, audits=False, ops=ops)
    assert apart(wrong, expected) > 1e-3
    found, kernels, said = trained(model, inputs, ops=ops)
    assert apart(found, expected) < 1e-5
    assert off(kernels) == {"rms_norm"}
    assert len(said) == 1
    assert "rms_norm in LlamaRMSNorm differs from the model's own code on this batch" in said[0]
    report = kernels.report()
    assert "rms_norm in LlamaRMSNorm" in str(report)
    assert any("it differed from the model's own code" in each.reason for each in report.declined)
    assert report.ran["rms_norm"] == 0
    assert report.as_dict()["audits"][0]["differing"]


def without_segments(original):
    """Rows that see the rows before them."""

    def wrong(q, k, v, segments, **options):
        whole = packed.Segments.make([q.shape[0]], q.device)
        return original(q, k, v, whole, **options)

    return wrong


def test_padding_left_out_wrongly(monkeypatch):
    model, inputs = small_model("qwen3"), padded()
    expected = gradients(copy.deepcopy(model), inputs)
    monkeypatch.setattr("npu_trainer_kernels.patching.body.proof.TOLERANCE", 1e9)
    monkeypatch.setattr(packed, "varlen_attention", without_segments(packed.varlen_attention))
    wrong, *_ = trained(copy.deepcopy(model), inputs, audits=False)
    assert apart(wrong, expected) > 1e-3
    found, kernels, said = trained(model, inputs)
    assert apart(found, expected) < 1e-5
    assert off(kernels) == {"varlen_attention"}
    assert "padding left out differs" in said[0]


@pytest.fixture(autouse=True)
def _proofs_anew(monkeypatch):
    monkeypatch.setattr("npu_trainer_kernels.patching.body.proof._proofs", {})


def test_a_loss_that_differs(monkeypatch):
    model, inputs = small_model("llama"), padded()
    expected = gradients(copy.deepcopy(model), inputs)
    original = head_call.fused_linear_cross_entropy

    monkeypatch.setattr(head_call, "fused_linear_cross_entropy", lambda *a, **o: original(*a, **o) * 1.001)
    found, kernels, said = trained(model, inputs)
    assert apart(found, expected) < 1e-5
    assert off(kernels) == {"linear_cross_entropy"}
    assert len(said) == 1
    assert apart(gradients(model, inputs), expected) < 1e-5, "and from then on"


@pytest.mark.skipif(not HAS_TRL_HEAD, reason="this TRL has no fused head")
def test_log_probabilities_that_differ(monkeypatch):
    from trl.trainer.utils import add_fused_lm_head

    model, inputs = small_model("llama"), padded()
    add_fused_lm_head(model)
    given = {**inputs, "fused_lm_head": True} if "fused_lm_head" in model.forward.__code__.co_varnames else inputs
    original = trl_seam.planned_linear_logprob

    def wrong(*args, **options):
        out = original(*args, **options)
        return out._replace(log_prob=out.log_prob * 1.001)

    monkeypatch.setattr(trl_seam, "planned_linear_logprob", wrong)
    said = []
    kernels = apply_npu_kernels(model, ops=["linear_logprob"])
    kernels.audit(said.append)
    assert kernels.serves_trl
    del given["labels"]
    model(**given, labels=inputs["labels"])
    assert len(said) == 1
    assert not kernels.serves_trl


# ---------------------------------------------------------------------------------------------------------------------
# How it looks
# ---------------------------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_it():
    """Random numbers, buffers, counts and gradients are those of a run without it."""

    class Counting(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    def model():
        made = small_model("llama", attention_dropout=0.3)
        made.model.layers[0].mlp.down_proj = Counting(made.model.layers[0].mlp.down_proj)
        return made

    def outcome(audits):
        torch.manual_seed(3)
        patched = model()
        torch.manual_seed(4)
        found, kernels, _ = trained(patched, padded(), audits=audits)
        return found, kernels, patched, torch.rand(3)

    (found, kernels, patched, drawn), (expected, plain, other, as_drawn) = outcome(True), outcome(False)
    assert len(kernels.report().audits) == 1
    assert torch.equal(drawn, as_drawn)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert patched.model.layers[0].mlp.down_proj.calls == other.model.layers[0].mlp.down_proj.calls
    assert all(part.training for part in patched.modules())
    assert kernels.report().ran == plain.report().ran
    assert kernels.report().declined == plain.report().declined
    assert kernels.tokens == plain.tokens


def test_what_autocast_has_cast_keeps_its_graph():
    """Without gradients autocast would keep copies of weights that lead nowhere."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, *_ = trained(small_model("llama"), padded())
        expected, *_ = trained(small_model("llama"), padded(), audits=False)
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_forwards_of_a_new_kind_are_compared():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, ops=OPS)
    kernels.audit(pytest.fail)
    audits = kernels.report().audits

    def step(**given):
        model(**given).loss.backward()
        return len(audits)

    assert [step(**padded()), step(**padded())] == [1, 1]
    assert step(**padded(rows=((3, 41), (3, 15)), length=41)) == 1
    assert step(**padded(rows=((3, 43), (3, 15)), length=43)) == 2, "rows of more than twice the places"
    inputs = padded()
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    assert step(**inputs, inputs_embeds=embedded) == 3
    kernels.audit()
    assert step(**padded()) == 4
    with torch.no_grad():
        model(**padded())
    model.eval()
    assert step(**padded()) == 4
    assert not off(kernels)


def test_a_model_that_is_not_trained():
    model = small_model("llama").eval()
    kernels = apply_npu_kernels(model, ops=OPS)
    kernels.audit(pytest.fail, training=False)
    with torch.no_grad():
        model.generate(padded()["input_ids"][:1], max_new_tokens=2, do_sample=False)
        seen = len(kernels.report().audits)
        model(**padded())
    assert len(kernels.report().audits) == seen + 1


@pytest.mark.parametrize("divided", [False, True])
def test_code_that_counts_with_floats(divided):
    """Sizes that are sums of ones in fp32: ones stay. Those that have been thirds move, and the code raises."""

    class Counting(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            ones = torch.ones(x.shape[1]) / 3 * 3 if divided else torch.ones(x.shape[1]) * 1.0
            return self.inner(torch.cat(x.split([int(ones.long().sum())], 1), 1))

    model = small_model("llama")
    model.model.layers[0].mlp.down_proj = Counting(model.model.layers[0].mlp.down_proj)
    inputs = padded(rows=((0, 90), (0, 50)), length=90)
    expected = gradients(copy.deepcopy(model), inputs)
    found, kernels, said = trained(model, inputs)
    assert apart(found, expected) < 1e-5
    assert not said
    assert ("some code does not bear moved numbers" in str(kernels.report())) == divided


def test_a_copy_of_a_model_that_is_compared():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, ops=OPS)
    kernels.audit(pytest.fail)
    copied = copy.deepcopy(model)
    copied(**padded()).loss.backward()
    assert len(kernels.report().audits) == 1


@pytest.mark.parametrize("ops", [["rms_norm"], OPS], ids=["no body", "all"])
def test_a_pickle_has_nothing_of_a_comparison(ops):
    model = small_model("llama")
    apply_npu_kernels(model, ops=ops).audit()
    assert b"npu_trainer_kernels" not in pickle.dumps(model)


def test_what_refresh_adds_is_compared():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, ops=OPS)
    kernels.audit(pytest.fail)
    model(**padded()).loss.backward()
    model.model.layers[0].input_layernorm = nn.RMSNorm(SMALL["hidden_size"], eps=1e-3)
    kernels.refresh()
    model(**padded()).loss.backward()
    assert len(kernels.report().audits) == 2


def test_some_rows_are_enough():
    given = padded(rows=tuple((0, 5 + b) for b in range(12)))
    chosen = audit.some_rows(given)
    assert chosen["attention_mask"].sum(1).tolist() == [5, 6, 15, 16]
    assert chosen["labels"].shape == (4, 21)
    assert audit.some_rows({**given, "pixel_values": torch.ones(12, 3)})["input_ids"].shape == (12, 21)
    assert audit.some_rows({**given, "position_ids": torch.ones(3, 12, 21)})["input_ids"].shape == (12, 21)
    assert audit.some_rows({**given, "position_ids": torch.arange(21)[None]})["position_ids"].shape == (1, 21)


def test_the_rule():
    own = torch.randn(200, 16)
    rounded = own * (1 + 1e-7 * torch.randn(200, 16))
    limit = functools.partial(audit.distance, own=own, rounded=rounded)
    assert limit(own) == 0
    assert limit(rounded) == pytest.approx(1 / audit.FACTOR)
    assert limit(own * (1 + 1e-5)) > 1
    few = own.clone()
    few[:5] += 1e-3
    assert limit(few) > 1
    assert limit(torch.full_like(own, torch.nan)) == float("inf")
    assert limit(own[:100]) == float("inf")
    assert limit(own.bfloat16()) == float("inf")
    assert limit((own, own)) == float("inf")
    blind = own.clone()
    blind[3] = torch.nan  # some code gives a row that sees nothing no number
    assert audit.distance(own, blind, blind) == 0


def test_a_handle_that_was_restored():
    kernels = apply_npu_kernels(small_model("llama"), ops=OPS)
    kernels.restore()
    with pytest.raises(RuntimeError, match="nothing to compare"):
        kernels.audit()


# ---------------------------------------------------------------------------------------------------------------------
# What no probe shows, by the first batch alone: what else would have told is switched off
# ---------------------------------------------------------------------------------------------------------------------

# A body's proof has rows of up to 160 tokens.
ROWS = ((0, 330), (0, 40), (3, 61))


class Blind(LlamaAttention):
    """Sees 164 keys back, by a mask of its own where that is read, and else by an argument that says so."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        more = {}
        if self.config._attn_implementation == "eager":
            places = torch.arange(q.shape[2])
            attention_mask = attention_mask.masked_fill(places[:, None] - places >= 164, -1e9)
        else:
            more = {"block_indices": torch.zeros(1)}
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, **more)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class SlicedNorm(LlamaRMSNorm):
    """Of another size from place 240 on."""

    def forward(self, hidden_states):
        out = super().forward(hidden_states)
        return torch.cat((out[:, :240], 1.5 * out[:, 240:]), 1)


class Sided(LlamaDecoderLayer):
    """Adds what somebody has set for each row of the batch."""

    side = None

    def forward(self, hidden_states, *args, **kwargs):
        out = super().forward(hidden_states, *args, **kwargs)
        return out if self.side is None else out + self.side[torch.arange(len(out))]


class OfBlind(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.self_attn = Blind(config, i)


class OfSlices(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.input_layernorm = SlicedNorm(config.hidden_size, config.rms_norm_eps)


class OfSides(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([Sided(config, i) for i in range(len(self.layers))])


class Everything(frozenset):
    def __contains__(self, name):
        return True


@pytest.mark.parametrize("kind", [OfBlind, OfSlices, OfSides])
def test_what_begins_beyond_a_probe(monkeypatch, kind):
    monkeypatch.setattr(packed, "_ELSEWHERE", Everything())
    monkeypatch.setattr("npu_trainer_kernels.patching.probe.settings.beyond_one_run", lambda function: None)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager"))
    model.model = kind(model.config)
    model.train()
    inputs = padded(rows=ROWS, length=330)
    if kind is OfSides:
        model.model.layers[-1].side = torch.randn(3, 1, SMALL["hidden_size"])
    expected = gradients(copy.deepcopy(model), inputs)
    wrong, kernels, _ = trained(copy.deepcopy(model), inputs, audits=False)
    assert kernels.report().ran["varlen_attention"] == 1
    assert apart(wrong, expected) > 1e-2
    found, kernels, said = trained(model, inputs)
    assert apart(found, expected) < 1e-5
    assert off(kernels) == {"varlen_attention"} | ({"rms_norm"} if kind is OfSlices else set())
    assert said


def test_a_hook_of_all_modules_that_goes_by_places(monkeypatch):
    monkeypatch.setattr("npu_trainer_kernels.patching.body.proof.GLOBAL_HOOKS", ())

    def hook(module, args, out):
        if isinstance(module, LlamaMLP):
            out = out * (1 + torch.arange(out.shape[1]) / 10)[:, None]
        return out

    model, inputs = small_model("llama"), padded()
    apply_npu_kernels(model, ops=OPS).restore()  # what a miniature shows is shown before
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        expected = gradients(copy.deepcopy(model), inputs)
        wrong, *_ = trained(copy.deepcopy(model), inputs, audits=False)
        assert apart(wrong, expected) > 1e-2
        found, kernels, said = trained(model, inputs)
    finally:
        handle.remove()
    assert apart(found, expected) < 1e-5
    assert off(kernels) == {"varlen_attention"}
    assert said


def test_a_layer_that_evaluation_would_change_stays_in_training_mode():
    """bitsandbytes packs 4-bit weights for good on a CPU in evaluation mode, which an audit sets if a model draws."""

    def forward(self, x):
        if not self.training and not torch.is_grad_enabled():
            raise RuntimeError("packed")
        return nn.functional.linear(x, self.weight)

    packs = type("Linear4bit", (nn.Linear,), {"forward": forward, "__module__": "bitsandbytes.nn.modules"})
    model = small_model("llama", attention_dropout=0.1)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = packs
    with apply_npu_kernels(model, backend="torch") as kernels:
        kernels.audit()
        model(**batch()).loss.backward()
        (seen,) = kernels.report().audits
    assert not seen.aside
    assert all(module.training for module in model.modules())
