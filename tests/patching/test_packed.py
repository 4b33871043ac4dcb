"""What decides that a body may be handed one row: the windows of its masks, and what its miniature shows."""

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.body import proof as proofs
from npu_trainer_kernels.patching.body.packed import PackedMask, Unserved, attend_by_segments, window_of
from npu_trainer_kernels.patching.body.proof import _compared
from npu_trainer_kernels.patching.probe.miniature import miniature, small_config
from npu_trainer_kernels.patching.undo import Undo
from tests.families.tiny import tiny_model
from tests.models import SMALL, small_model

from .test_padding import OP, compare, padded

CONFIG = transformers.LlamaConfig(**SMALL, attn_implementation="eager")


# ---------------------------------------------------------------------------------------------------------------------
# Windows
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "window", "expected"), [
    (20, 1, 1), (20, 7, 7), (20, 19, 19), (20, 20, None), (20, 21, None), (1, 1, None), (1, 4, None),
])  # fmt: skip
def test_a_sliding_window_is_what_its_mask_lets_a_query_see(length, window, expected):
    allowed = masking_utils.sliding_window_causal_mask_function(window)
    assert window_of(allowed, length) == expected
    # By the mask itself: how many keys the last query of so many sees.
    last = sum(bool(allowed(0, 0, torch.tensor(length - 1), torch.tensor(k))) for k in range(length))
    assert last == (length if expected is None else expected)


def test_causal_masks_have_no_window():
    assert window_of(masking_utils.causal_mask_function, 20) is None
    everything = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: q >= 0)
    assert window_of(everything, 20) is None


def not_diagonal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < q


def every_second(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q - k) % 2 == 0)


def by_columns(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Everything before, and the first token from wherever."""
    return (k <= q) & ((k > q - 4) | (k == 0))


OTHERS = {
    "both ways": masking_utils.bidirectional_mask_function,
    "a window both ways": masking_utils.sliding_window_bidirectional_mask_function(4),
    "chunks": masking_utils.chunked_causal_mask_function(6, torch.zeros(1, dtype=torch.long)),
    "chunks that end with the rows": masking_utils.chunked_causal_mask_function(20, torch.zeros(1, dtype=torch.long)),
    "rows in a row": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 10 + [1] * 30])),
    ),
    "a beginning that sees itself": masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: (q < 30) & (k < 30)
    ),
    "not itself": not_diagonal,
    "every second": every_second,
    "a window and the first token": by_columns,
    "what tokens say": masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: torch.tensor([[0, 1]])[b, k] == 0
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_not_taken_for_windows(name):
    what = "looks at more than positions" if name == "what tokens say" else "is neither causal nor a sliding window"
    for length in (20, 19):
        with pytest.raises(Unserved, match=f"its mask {what}"):
            window_of(OTHERS[name], length)


def test_windows_are_read_on_the_host():
    with torch.device("meta"):
        assert window_of(masking_utils.sliding_window_causal_mask_function(5), 20) == 5


# ---------------------------------------------------------------------------------------------------------------------
# The miniature
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_packed_row_or_none(monkeypatch):
    """What takes no packed row is left alone here; `test_mixers` has the other way to leave its padding out."""
    monkeypatch.setattr(proofs, "leave_padding_to_mixers", lambda *_: "not here")
    monkeypatch.setattr(proofs, "_proofs", {})


def left_alone(model: nn.Module) -> str:
    """Why the body keeps its padding, as the report says; its numbers are compared by nobody here."""
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        (why,) = (each.reason for each in kernels.report().left_alone if each.op == OP)
        assert not kernels.report().replaced
    return str(why)


def with_body(body: Any, config: Any = CONFIG) -> Any:
    """A model of a body of one's own."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.model = body(copy.deepcopy(config))
    return model.train()


class Convolved(LlamaModel):
    """Mixes each token with those before it, wherever they come from."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mix = nn.Conv1d(config.hidden_size, config.hidden_size, 3, groups=config.hidden_size)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        embedded = self.embed_tokens(input_ids).transpose(1, 2)
        mixed = self.mix(nn.functional.pad(embedded, (2, 0))).transpose(1, 2)
        kwargs["inputs_embeds"] = mixed if attention_mask is None else mixed * attention_mask.unsqueeze(-1)
        return super().forward(None, attention_mask, position_ids, **kwargs)


class Summed(LlamaModel):
    """A running sum along the row, that starts at its first token."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        embedded = self.embed_tokens(input_ids)
        live = 1 if attention_mask is None else attention_mask.unsqueeze(-1)
        kwargs["inputs_embeds"] = embedded + 0.1 * (embedded * live).cumsum(1)
        return super().forward(None, attention_mask, position_ids, **kwargs)


class Centred(LlamaModel):
    """Takes off the mean of the whole batch."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        out = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        out.last_hidden_state = out.last_hidden_state - out.last_hidden_state.mean((0, 1), keepdim=True)
        return out


@pytest.mark.parametrize("body", [Convolved, Summed, Centred])
def test_what_looks_along_the_row_is_found_out(body):
    assert "tokens of a packed row are not what they are in their own" in left_alone(with_body(body))


def largest(out: torch.Tensor, count: int) -> torch.Tensor:
    """Doubles so many tokens of a row, the largest ones."""
    size = out.norm(dim=-1)
    chosen = size.topk(min(count, out.shape[1]), dim=1).indices
    return out * (1 + torch.zeros_like(size).scatter(1, chosen, 1.0)).unsqueeze(-1)


LATE = {
    "a slice": lambda out: torch.cat((out[..., :120, :], 1.5 * out[..., 120:, :]), -2),
    "so many of a row": lambda out: largest(out, 150),
    "a clamp": lambda out: out * max(out.shape[1], 120) / 120,
    "from a place on": lambda out: torch.where(torch.arange(out.shape[1])[:, None] >= 120, 2 * out, out),
}


@pytest.mark.parametrize("rule", LATE)
def test_rules_that_begin_late_in_a_row_are_found_out(rule):
    class Late(LlamaMLP):
        def forward(self, x):
            return LATE[rule](super().forward(x))

    class OfLate(LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.layers:
                layer.mlp = Late(config)

    assert "tokens of a packed row are not what they are in their own" in left_alone(with_body(OfLate))


class Pairs(LlamaModel):
    """Wants as many rows as there were."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if len(input_ids) == 1:
            raise ValueError("two rows at least")
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


def test_what_raises_is_left_alone():
    assert left_alone(with_body(Pairs)) == "its code takes no packed row: ValueError: two rows at least"


class OfRows(LlamaModel):
    """Returns something else than hidden states of tokens; `change` makes it of the output."""

    change: Any = None

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return type(self).change(super().forward(input_ids, attention_mask, position_ids, **kwargs))


def with_halves(out: Any) -> Any:
    out["halves"] = out.last_hidden_state / 2
    return out


def shortened(out: Any) -> Any:
    out.last_hidden_state = out.last_hidden_state[:, 1:]
    return out


def overflowed(out: Any) -> Any:
    out.last_hidden_state = out.last_hidden_state * torch.inf
    return out


def with_routers(out: Any) -> Any:
    routers = out.last_hidden_state[..., :4].flatten(0, 1).unsqueeze(1)
    return MoeModelOutputWithPast(last_hidden_state=out.last_hidden_state, router_logits=(routers,))


OUTPUTS: dict[str, tuple[Any, str]] = {
    "another output": (with_halves, "it returns halves"),
    "a tuple": (lambda out: (out.last_hidden_state, out.last_hidden_state / 2), "it returns more than hidden states"),
    "fewer places": (shortened, "a miniature of it gives no hidden state for each token"),
    "no numbers": (overflowed, "a miniature of it gives hidden states that are no numbers"),
    "routers' logits of another shape": (with_routers, "its router_logits are not of its tokens"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_returns_something_else_is_left_alone(name):
    change, why = OUTPUTS[name]
    assert left_alone(with_body(type("Body", (OfRows,), {"change": change}))) == why


class Large(LlamaModel):
    """Has no small sizes."""

    def __init__(self, config: Any) -> None:
        if config.vocab_size < SMALL["vocab_size"]:
            raise ValueError("too small")
        super().__init__(config)


class Long(LlamaModel):
    """Has no short rows."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        raise IndexError("too short")


@pytest.mark.parametrize(("body", "why"), [
    (Large, "no miniature of it can be made: ValueError: too small"),
    (Long, "a miniature of it takes no padded batch: IndexError: too short"),
])  # fmt: skip
def test_what_has_no_miniature_is_left_alone(body, why):
    assert left_alone(with_body(body)) == why


def test_routers_that_are_none():
    """A configuration may promise what its body does not return: it is served unless somebody asks for that."""
    model = small_model("llama", output_router_logits=True)
    small = small_config(model.config)
    vars(small).update(output_router_logits=False)
    body = miniature(LlamaModel, small)
    attend_by_segments(body, "", Undo())
    why = _compared(body, LlamaModel, "", routed=True, mixes=False, leading=False, probe=proofs._probe())
    assert why == "a miniature of it gives no router_logits"
    inputs = padded("both", True)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        expected, found = (each(**inputs, use_cache=False).loss for each in (small_model("llama"), model))
        assert [each.reason for each in kernels.report().declined] == ["its router_logits are asked for"]
    assert torch.equal(found, expected)


class Counting(LlamaModel):
    """Counts the live tokens of a row, as OPT and many others do."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0) * 2
            position_ids = position_ids // 2 + 3 * (position_ids > 8)
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class CountingLive(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        # A rotation sees distances alone; this is what an embedding of positions is.
        if input_ids is not None and position_ids is not None:
            kwargs["inputs_embeds"] = self.embed_tokens(input_ids) * (1 + 0.1 * position_ids.unsqueeze(-1))
            input_ids = None
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class CountingColumns(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if input_ids is not None:
            columns = torch.arange(input_ids.shape[1]).unsqueeze(0) if position_ids is None else position_ids
            kwargs["inputs_embeds"] = self.embed_tokens(input_ids) * (1 + 0.1 * columns.unsqueeze(-1))
            input_ids = None
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


@pytest.mark.parametrize(("body", "count"), [(CountingLive, "live tokens"), (CountingColumns, "columns")])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_positions_are_counted_as_the_model_counts_them(body, count, side):
    report = compare(with_body(body), padded(side, True), (OP,), count)
    assert [each.detail for each in report.replaced] == [f"positions count {count}"]
    assert report.ran[OP] == 1


def test_positions_that_are_counted_in_a_third_way():
    assert "not what they are" in left_alone(with_body(Counting))


class OwnAttention(LlamaAttention):
    """Attends by itself; what it is given as a mask is for itself too."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        out = self.attended(q, k, v, attention_mask).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(out), None

    @staticmethod
    def attended(q, k, v, mask):
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + mask
        return scores.softmax(-1) @ v


class Unmasked(OwnAttention):
    """Causal along the row that it is given, and needs no mask for that."""

    @staticmethod
    def attended(q, k, v, mask):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def body_of(attention: type[nn.Module]) -> Any:
    class Body(LlamaModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for i, layer in enumerate(self.layers):
                layer.self_attn = attention(config, i)

    return Body


class Blind(LlamaAttention):
    """Attends to all there is."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, None, **kwargs)


class BothWays(LlamaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = False


class Handing(LlamaAttention):
    """Hands `more` to the function that attends, and has masks of its own where that is not known to read it."""

    more: Any = None

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, **self.more)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


@pytest.mark.parametrize(("attention", "why"), [
    (OwnAttention, "its code takes no packed row: TypeError"),
    (Unmasked, "its attention is not transformers' own"),
    (Blind, "it attends to something else than its own tokens"),
    (BothWays, "its attention is not causal"),
    (type("Handing", (Handing,), {"more": {"is_causal": False}}), "its attention is not causal"),
])  # fmt: skip
def test_attention_of_ones_own(attention, why):
    assert why in left_alone(with_body(body_of(attention)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("more", [
    {"block_indices": torch.zeros(1, 1, 1, 1)}, {"sinks": torch.zeros(4)}, {"head_mask": torch.ones(4)},
    {"indices": [torch.zeros(1)]}, {"logit_cap": 30.0},
], ids=lambda more: next(iter(more)))  # fmt: skip
def test_what_attention_is_given_and_we_do_not_know(more, attention):
    """It may say which keys are seen, under some names of attention and not under others."""
    kind = type("Handing", (Handing,), {"more": more})
    config = transformers.LlamaConfig(**SMALL, attn_implementation=attention)
    assert left_alone(with_body(body_of(kind), config)) == f"its attention is given {next(iter(more))}"


def test_what_attention_is_given_and_everybody_knows():
    more = {"position_bias": None, "position_ids": torch.zeros(1), "num_items_in_batch": torch.tensor(3), "flag": True}
    kind = type("Handing", (Handing,), {"more": more})
    model = with_body(body_of(kind))
    assert compare(model, padded("both", True), (OP,), "known").ran[OP] == 1


@pytest.mark.parametrize(("family", "owner"), [
    ("gemma2", transformers.Gemma2PreTrainedModel), ("gpt-oss", transformers.GptOssPreTrainedModel),
])  # fmt: skip
def test_a_row_attends_as_the_named_function_does(monkeypatch, family, owner):
    """In some versions of transformers sdpa takes no notice of a soft cap, and in all of sinks."""

    def ignoring(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal)

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ignoring.__module__ = own.__module__
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", ignoring)
    monkeypatch.setattr(owner, "_supports_sdpa", True)
    options = {"attn_logit_softcapping": 0.5} if family == "gemma2" else {}
    model = small_model(family, attn_implementation="sdpa", **options)
    assert compare(model, padded("both", True), (OP,), family).ran[OP] == 1


def test_one_layer_of_many_that_attends_by_itself():
    """The others would be served."""

    class Body(LlamaModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layers[-1].self_attn = Unmasked(config, len(self.layers) - 1)

    assert "not what they are" in left_alone(with_body(Body))


class Mixing(nn.Module):
    """Sees its neighbour."""

    def forward(self, x):
        return x + 0.1 * x.roll(1, -2)


def test_a_module_that_the_miniature_lacks():
    model = small_model("llama")
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, Mixing())
    assert left_alone(model) == "its layers.1.mlp is a Sequential, which was not proven"


def test_a_module_whose_class_was_derived():
    class Derived(LlamaAttention):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states.roll(1, -2), *args, **kwargs)

    model = small_model("llama")
    model.model.layers[0].self_attn.__class__ = Derived
    assert left_alone(model) == "its layers.0.self_attn is a Derived, which was not proven"


def test_a_module_whose_forward_was_exchanged():
    model = small_model("llama")
    model.model.layers[1].mlp.forward = lambda x: x.roll(1, -2)
    assert "layers.1.mlp: its forward was set on the instance" in left_alone(model)
    model = small_model("llama")
    model.model.forward = lambda *args, **kwargs: None
    assert "its forward was set on the instance" in left_alone(model)


@pytest.mark.parametrize("which", ["the body's", "a layer's"])
def test_a_class_whose_forward_is_exchanged_later(monkeypatch, which):
    """A proof holds for the code that was proven."""

    class Body(LlamaModel):
        pass

    model = with_body(Body)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert [each.op for each in kernels.report().replaced] == [OP]
    cls: Any = Body if which == "the body's" else type(model.model.layers[0].mlp)
    own = cls.forward

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        if isinstance(out, torch.Tensor):
            return out.cumsum(-2)
        out.last_hidden_state = out.last_hidden_state.cumsum(1)
        return out

    monkeypatch.setattr(cls, "forward", forward)
    assert ("not what they are" if cls is Body else "layers.0.mlp is a LlamaMLP, which was not") in left_alone(model)


def test_linear_layers_in_whatever_form_mix_no_tokens():
    class Quantised(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(torch.bfloat16).to(x.dtype))

    model = small_model("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Quantised
    report = compare(model, padded("both", True), (OP,), "quantised")
    assert report.ran[OP] == 1


@pytest.mark.parametrize("kind", ["jamba", "mamba", "recurrent_gemma"])
def test_bodies_with_a_state_that_no_op_computes_are_left_alone(kind):
    """Mamba, a linear recurrence."""
    assert left_alone(tiny_model("causal", kind))


def test_heads_of_several_sizes_are_each_asked_about(monkeypatch):
    """Gemma 4's layers that attend to everything have larger ones."""
    asked = set()
    monkeypatch.setattr("npu_trainer_kernels.patching.body.packed.unserved", lambda *args, **more: asked.add(args[2]))
    model = tiny_model("causal", "gemma4_text")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        ids = torch.arange(3, 15).view(2, 6)
        model(input_ids=ids, attention_mask=(ids != 14).long(), use_cache=False)
        assert kernels.report().ran == {OP: 1}
    attentions = [layer.self_attn for layer in model.model.layers]
    assert asked == {(each.head_dim, each.head_dim) for each in attentions}
    assert len(asked) == 2


def test_encoders_and_what_has_no_body():
    config = transformers.T5Config(vocab_size=331, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4)
    assert left_alone(transformers.T5ForConditionalGeneration(config))
    assert left_alone(nn.Sequential(nn.Linear(3, 3))) == "no body of a transformers model found"


def test_a_miniature_leaves_random_numbers_and_defaults_as_they_are(monkeypatch):
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    # What seeds the generators of all GPUs, as `torch.manual_seed` does; without one it is called, too.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("an accelerator was seeded"))
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            made = miniature(LlamaModel, small_config(CONFIG))
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert {(p.device.type, p.dtype) for p in made.parameters()} == {("cpu", torch.float32)}
    assert not made.training


def test_a_miniature_of_a_model_without_weights():
    """Where sharding or loading comes later, the parameters are not there yet."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert [each.op for each in kernels.report().replaced] == [OP]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_small_configuration_keeps_a_layer_of_each_kind_and_changes_nothing_of_its_origin():
    config = transformers.Gemma3TextConfig(num_hidden_layers=26, sliding_window=512, hidden_size=1152)
    before = copy.deepcopy(config.to_dict())
    small = small_config(config)
    assert config.to_dict() == before
    assert set(small.layer_types) == set(config.layer_types)
    assert small.num_hidden_layers == len(small.layer_types) < 7
    assert small.sliding_window == 8
    assert sum(p.numel() for p in miniature(transformers.Gemma3TextModel, small).parameters()) < 200_000


@pytest.mark.parametrize(("config", "body"), [
    (transformers.Gemma4TextConfig(num_kv_shared_layers=20), transformers.Gemma4TextModel),
    (transformers.Gemma3nTextConfig(), transformers.Gemma3nTextModel),
], ids=["gemma4", "gemma3n"])  # fmt: skip
def test_layers_that_share_keys_are_of_a_kind_of_their_own(config, body):
    small = small_config(config)
    layers = miniature(body, small).layers
    assert {layer.self_attn.is_kv_shared_layer for layer in layers} == {False, True}
    assert {small.layer_types[i] for i in range(len(layers)) if layers[i].self_attn.is_kv_shared_layer} == {
        "sliding_attention", "full_attention",
    }  # fmt: skip
    # As deep as it is, and of its size, without weights.
    with torch.device("meta"):
        model = with_body(lambda _: body(config))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert [each.op for each in kernels.report().replaced] == [OP]


def test_layers_whose_keys_earlier_ones_made():
    batch = padded("both", True)
    batch |= {name: batch[name].clamp(max=300) for name in ("input_ids", "labels")}
    report = compare(tiny_model("causal", "gemma4_text").train(), batch, (OP,), "gemma4")
    assert report.ran[OP] == 1


def test_blocks_that_are_chosen_of():
    """What released configurations have, and the defaults of the class do not."""
    assert left_alone(tiny_model("causal", "minimax_m3_vl_text")) == "its attention is given block_indices"


class ByName(OwnAttention):
    """Attends by itself under the names that it knows, and leaves `what` to the function under others."""

    what = ""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.scaling = 1 / 64  # scores as small as Gemma 2's

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        if self.config._attn_implementation == "eager":
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        return LlamaAttention.forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    def attended(self, q, k, v, mask):
        scores = q @ k.transpose(2, 3) * self.scaling
        if self.what == "cap":
            scores = self.config.attn_logit_softcapping * torch.tanh(scores / self.config.attn_logit_softcapping)
        if self.what == "blocks":
            block = torch.arange(q.shape[2]) // self.config.index_block_size
            scores = scores.masked_fill(block[:, None] != block, torch.finfo(scores.dtype).min)
        return (scores + mask).softmax(-1) @ v


@pytest.mark.parametrize(("what", "size"), [
    ("cap", {"attn_logit_softcapping": 50.0}), ("blocks", {"index_block_size": 128}), ("", {}),
])  # fmt: skip
def test_what_only_large_scores_and_long_rows_show(what, size):
    kind = type("ByName", (ByName,), {"what": what})
    config = transformers.LlamaConfig(**SMALL, attn_implementation="eager", **size)
    model = with_body(body_of(kind), config)
    if what:
        assert "not what they are in their own" in left_alone(model)
    else:
        with apply_npu_kernels(model, ops=[OP]) as kernels:
            assert kernels.report().replaced


@pytest.mark.parametrize("cut", [-1, slice(0, 4), (slice(None), slice(-3, None)), (Ellipsis, slice(None)),
                                 torch.tensor([0])], ids=str)  # fmt: skip
def test_a_mask_is_not_cut(cut):
    mask = PackedMask(None, None)
    assert mask[:, :, slice(-0, None), :] is mask
    with pytest.raises(Unserved, match="it cuts its mask"):
        mask[cut]


def test_one_proof_for_one_configuration(monkeypatch):
    """Applying the kernels again costs no second one; another configuration has its own."""
    from npu_trainer_kernels.patching.body import proof

    made = []
    own = proof.miniature
    monkeypatch.setattr(proof, "_proofs", {})
    monkeypatch.setattr(proof, "miniature", lambda *args: made.append(args) or own(*args))
    for window in (None, None, 9, 9):
        options = {} if window is None else {"sliding_window": window}
        apply_npu_kernels(small_model("mistral", **options), ops=[OP]).restore()
    # Windows are cut down to the same small one; the second has none.
    assert len(made) <= 2
    apply_npu_kernels(small_model("qwen2"), ops=[OP]).restore()
    assert len({args[0] for args in made}) == 2


def test_a_proof_is_no_matter_of_the_weights():
    """Zeros would make every row alike; a miniature has weights of its own."""
    model = small_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert [each.op for each in kernels.report().replaced] == [OP]


def test_all_ops_together_prove_the_same():
    """Other ops change classes first."""
    with apply_npu_kernels(small_model("qwen3"), ops=PATCHES) as kernels:
        found = {each.op: each.detail for each in kernels.report().replaced}
    assert found[OP] == "positions count columns"
