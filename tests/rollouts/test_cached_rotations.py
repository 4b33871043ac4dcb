"""The norms of queries and keys, their rotation and the update of the cache as one call: where it is made, and that a
step has the same tokens wherever it is not."""

import copy
import functools
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from npu_trainer_kernels import apply_npu_kernels, completions, serve_rollouts
from npu_trainer_kernels.patching.call import current_call
from npu_trainer_kernels.patching.modules import CACHED_ROTATION, cached_rotation
from npu_trainer_kernels.rollouts import decode, serve
from npu_trainer_kernels.rollouts import rollout_cache as cache_module
from tests.models import small_model

from .common import alone, greedy, prompts, served
from .test_rollouts import FAMILIES

# Whether attentions make the call, and whether norms move into it.
FOUND = {
    "llama": (True, False),
    "qwen3": (True, True),
    "gemma2": (True, False),
    "gemma3": (True, True),
    "phi3": (True, False),
    "cohere": (False, False),
}


def found_in(model):
    return [each for module in model.modules() if (each := cached_rotation(module, {})) is not None]


@pytest.mark.parametrize("family", FOUND)
def test_families(family):
    model = small_model(family, **FAMILIES[family]).eval()
    assert found_in(model) == [], "the kernels were not applied yet"
    apply_npu_kernels(model, backend="torch")
    calls, norms = FOUND[family]
    found = found_in(model)
    assert len(found) == calls * model.config.num_hidden_layers
    assert [each.norms is not None for each in found] == [norms] * len(found)
    assert [each.qk_norm() is not None for each in found] == [norms] * len(found)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the op. A function of this module that notes them would make the step one that changes a list."""
    spy = Mock(wraps=cache_module.qk_norm_rope_append)
    monkeypatch.setattr(cache_module, "qk_norm_rope_append", spy)
    return spy.call_args_list


def same_tokens(model, plain, count=8):
    config = greedy(count)
    assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)


@pytest.mark.parametrize(("family", "normed"), [("llama", False), ("qwen3", True), ("gemma3", True)])
def test_a_step_makes_one_call_for_each_layer(family, normed, calls):
    model, _, rollouts = served(family, **FAMILIES[family])
    same_tokens(model, small_model(family, **FAMILIES[family]).eval())
    assert rollouts.engine.rollouts == 1
    # A capture runs the step twice.
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert all((call.kwargs["norm"] is not None) == normed for call in calls)


def test_nothing_is_left_of_it(monkeypatch):
    model, _, _ = served("qwen3")
    completions(model, prompts(), greedy(4))  # the first packed row prepares the body, until the kernels are restored
    before = [dict(vars(module)) for module in model.modules()]
    completions(model, prompts(), greedy(4))

    def same():
        return all(vars(m).keys() == b.keys() for m, b in zip(model.modules(), before, strict=True))

    assert same()

    def stops(*args, **kwargs):
        assert not same()
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module, "qk_norm_rope_append", stops)
    with pytest.raises(KeyboardInterrupt):
        completions(model, prompts(), greedy(4))
    assert same()
    assert current_call() is None  # PyTorch runs no hook of a forward that this error leaves


# ---------------------------------------------------------------------------------------------------------------------
# Where it is not made
# ---------------------------------------------------------------------------------------------------------------------


def _hook(model):
    for layer in model.model.layers:
        layer.self_attn.q_norm.register_forward_hook(lambda module, args, out: out * 0.5)


def _other_forward(model):
    for layer in model.model.layers:
        layer.self_attn.forward = functools.partial(type(layer.self_attn).forward, layer.self_attn)


def _other_eps(model):
    for layer in model.model.layers:
        layer.self_attn.k_norm.variance_epsilon = 0.1


@pytest.mark.parametrize(
    ("change", "calls_made", "norms_moved"),
    [(_hook, True, False), (_other_forward, False, False), (_other_eps, True, False)],
    ids=["a hook of a norm", "a forward of an instance", "norms of two forms"],
)
def test_changed_models(change, calls_made, norms_moved, calls, monkeypatch):
    # Hooks of other code are left to `generate`; a norm with one that is let pass has to be called, too.
    monkeypatch.setattr(serve, "other_code", lambda model, shared: None)
    model, plain = small_model("qwen3").eval(), small_model("qwen3").eval()
    change(model)
    change(plain)
    serve_rollouts(apply_npu_kernels(model, backend="torch"))
    same_tokens(model, plain)
    assert bool(calls) == calls_made
    assert all((call.kwargs["norm"] is not None) == norms_moved for call in calls)


def test_a_hooked_norm_is_left_to_generate(calls):
    model = small_model("qwen3").eval()
    _hook(model)
    serve_rollouts(apply_npu_kernels(model, backend="torch"))
    with pytest.raises(ValueError, match=r"other code has hooked model\.layers\.0\.self_attn\.q_norm"):
        completions(model, prompts(), greedy(4))
    assert calls == []


@pytest.mark.parametrize("without", ["rope", "rms_norm"])
def test_without_the_ops_whose_place_it_takes(without, calls):
    model = small_model("qwen3").eval()
    serve_rollouts(apply_npu_kernels(model, ops=sorted({"rope", "rms_norm"} - {without}), backend="torch"))
    same_tokens(model, small_model("qwen3").eval())
    assert bool(calls) == (without != "rope")
    assert all(call.kwargs["norm"] is None for call in calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_step_has_the_bits_of_separate_calls(family, autocast, dtype, monkeypatch):
    """In every precision: the logits of captured steps with the call and without it, by the same backend."""

    def logits():
        seen = []
        model, _, _ = served(family, dtype=dtype, **FAMILIES[family])
        replay = decode.Step.replay
        with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            patch.setattr(decode.Step, "replay", lambda step: seen.append(replay(step).clone()) or seen[-1])
            completions(model, prompts(), greedy(6))
        return torch.stack(seen)

    at_once = logits()
    monkeypatch.setattr(cache_module, "cached_rotation", lambda *args: None)
    assert torch.equal(at_once, logits())


@pytest.mark.parametrize("declines", ["dtype", "layer", "tokens", "size", "heads"])
def test_calls_that_are_declined_have_the_same_tokens(declines, calls, monkeypatch):
    """The norms have moved into the call, which then makes the separate calls."""
    # Qwen3's norms return fp32 for whatever they get.
    family = "llama" if declines == "dtype" else "qwen3"
    model, _, _ = served(family)
    original = cache_module.RolloutCache._serves

    def asked(self, attention, value, layer, q, k, cos, sin):
        given = {
            "dtype": (value, layer, q.half(), k.half(), cos.half(), sin.half()),
            "layer": (value, 7, q, k, cos, sin),
            "tokens": (value, layer, *(t.repeat_interleave(2, -2) for t in (q, k, cos, sin))),
            "size": (value[..., :-1], layer, q, k, cos, sin),
            "heads": (value, layer, q, k[:, :1], cos, sin),
        }
        assert original(self, attention, value, layer, q, k, cos, sin)
        return original(self, attention, *given[declines])

    monkeypatch.setattr(cache_module.RolloutCache, "_serves", asked)
    same_tokens(model, small_model(family).eval())
    assert calls == []


# ---------------------------------------------------------------------------------------------------------------------
# Forwards, statement by statement
# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Returns what its forward has after the update of the cache. The kernels would give it the rotation."""

    _npu_kernels_apply_rotary_pos_emb = staticmethod(apply_rotary_pos_emb)

    def __init__(self):
        super().__init__()
        self.layer_idx = 3
        for name in ("q_norm", "k_norm"):
            norm = Qwen3RMSNorm(8)
            nn.init.uniform_(norm.weight)
            setattr(self, name, copy.deepcopy(norm))
        apply_npu_kernels(self, backend="torch")


class Usual(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q = self.q_norm(q.view(2, 1, -1, 8)).transpose(1, 2)
        k = self.k_norm(k.view(2, 1, -1, 8)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v


class NormedAfterTransposing(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q = q.view(2, 1, -1, 8).transpose(1, 2)
        k = k.view(2, 1, -1, 8).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos=cos, sin=sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v


class SeesNormedKeys(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q = self.q_norm(q.view(2, 1, -1, 8)).transpose(1, 2)
        k = self.k_norm(k.view(2, 1, -1, 8)).transpose(1, 2)
        v = v + 0 * k.sum() + 1
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v


class NormsInABranch(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q = q.view(2, 1, -1, 8).transpose(1, 2)
        k = k.view(2, 1, -1, 8).transpose(1, 2)
        if self.layer_idx:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v


class ScaledNorm(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q = 2 * self.q_norm(q.view(2, 1, -1, 8)).transpose(1, 2)
        k = self.k_norm(k.view(2, 1, -1, 8)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v


class SomethingBetween(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q, k = q.view(2, 1, -1, 8).transpose(1, 2), k.view(2, 1, -1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q = q * 2
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v


class MoreInTheUpdate(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q, k = q.view(2, 1, -1, 8).transpose(1, 2), k.view(2, 1, -1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, {"sin": sin})
        return q, k, v


class KeywordsInTheUpdate(Attention):
    def forward(self, q, k, v, cos, sin, cache=None, **kwargs):
        q, k = q.view(2, 1, -1, 8).transpose(1, 2), k.view(2, 1, -1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs, twice=cos)
        return q, k, v


class KeysAsAKeyword(Attention):
    def forward(self, q, k, v, cos, sin, cache=None):
        q, k = q.view(2, 1, -1, 8).transpose(1, 2), k.view(2, 1, -1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, twice=k)
        return q, k, v


class AnotherBranch(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q, k = q.view(2, 1, -1, 8).transpose(1, 2), k.view(2, 1, -1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        else:
            k = k * 2
        return q, k, v


class RotatesTwice(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q, k = q.view(2, 1, -1, 8).transpose(1, 2), k.view(2, 1, -1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v


class KeysAsValues(Attention):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q, k = q.view(2, 1, -1, 8).transpose(1, 2), k.view(2, 1, -1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, k, self.layer_idx)
        return q, k, v


# The attentions, whether they make the call, and whether norms move into it.
FORWARDS = {
    Usual: (True, True),
    NormedAfterTransposing: (True, True),
    SeesNormedKeys: (True, False),
    NormsInABranch: (True, False),
    ScaledNorm: (True, False),
    SomethingBetween: (False, False),
    MoreInTheUpdate: (False, False),
    KeywordsInTheUpdate: (True, False),
    KeysAsAKeyword: (False, False),
    AnotherBranch: (False, False),
    RotatesTwice: (False, False),
    KeysAsValues: (False, False),
}


class Cache:
    """Keys and values of one token more."""

    def update(self, k, v, layer, *more, twice=None, kwargs=None):
        return torch.cat((k, k), 2) + layer + (0 if twice is None else 2 * twice.mean()), torch.cat((v, v), 2)


@pytest.mark.parametrize("kind", FORWARDS, ids=lambda kind: kind.__name__)
def test_forwards(kind):
    torch.manual_seed(0)
    module = kind()
    given = [torch.randn(2, 1, heads * 8) for heads in (4, 2)]
    given += [torch.randn(2, 2, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)]
    found = cached_rotation(module, {})
    assert (found is not None, found is not None and found.norms is not None) == FORWARDS[kind]
    if found is None:
        return
    rotated = cache_module.RolloutCache.rotate_and_update
    # A cache that this is no step of: the separate calls are made.
    vars(module)[CACHED_ROTATION] = functools.partial(rotated, object(), found)
    for cache in (None, Cache()):
        for mine, own in zip(found.forward(module, *given, cache), module.forward(*given, cache), strict=True):
            assert torch.equal(mine, own)
