"""A batch that the body's patch does not serve stays padded: its numbers are the model's, and the report says why."""

import copy
import threading
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.body import packed as packed_module
from tests.models import SMALL, small_model

from .padded import of_package
from .test_padding import OP, made, padded, progress, values

INPUTS = padded("both", True)
IDS, MASK = INPUTS["input_ids"], INPUTS["attention_mask"]


def reasons(kernels: Any) -> dict[str, int]:
    """Calls that stayed padded, by reason."""
    return {each.reason: each.calls for each in kernels.report().declined if each.op == OP}


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y for x, y in zip(a, b, strict=True))


def step(model: Any, **given: Any) -> list[Any]:
    """Logits or loss of a call, and every gradient. A loss of logits reads those of live tokens."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    out, mask = model(**given), given.get("attention_mask")
    if out.loss is None:
        read = out.logits if mask is None or mask.shape != out.logits.shape[:2] else out.logits[mask.bool()]
        read.square().mean().backward()
    else:
        out.loss.backward()
    return [out.logits.detach() if out.loss is None else out.loss.detach(), *(p.grad for p in model.parameters())]


def stays(model: Any, why: str | None, **given: Any) -> None:
    """The call is the model's own to the bit; `why` is reported, or nothing is."""
    expected = step(model, **given)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert {each.op for each in kernels.report().replaced} == {OP}
        assert same(step(model, **given), expected)
        assert kernels.report().ran[OP] == 0
        assert reasons(kernels) == ({} if why is None else {why: 1})
    assert same(step(model, **given), expected)


def gapped() -> torch.Tensor:
    mask = MASK.clone()
    mask[0, 9] = 0
    return mask


def causal() -> torch.Tensor:
    """A mask of scores, as a caller may make it."""
    seen = torch.ones(28, 28, dtype=torch.bool).tril() & MASK[:, None, None].bool()
    return torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)


PLAIN = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
# name -> (arguments, reason; None: nothing worth a line in a report)
STAYS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no mask": ({**PLAIN, "attention_mask": None}, None),
    "nothing to drop": ({**PLAIN, "attention_mask": torch.ones_like(MASK)}, None),
    "a mask of scores": ({**PLAIN, "attention_mask": causal()}, "its mask does not mark tokens"),
    "a gap": ({**PLAIN, "attention_mask": gapped()}, "the mask of a row has a gap"),
    "no live token": ({**PLAIN, "attention_mask": torch.zeros_like(MASK)}, "no token is live"),
    "a cache is asked for": ({**PLAIN, "use_cache": True}, "a cache is asked for (use_cache)"),
    "hidden states are asked for": ({**PLAIN, "output_hidden_states": True}, "its hidden_states are asked for"),
    "attentions are asked for": ({**PLAIN, "output_attentions": True}, "its attentions are asked for"),
    "no routers": ({**PLAIN, "output_router_logits": True}, "its router_logits are asked for"),
    "labels at padding": ({**PLAIN, "labels": IDS}, "labels are predicted at positions of padding"),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_batch_stays_padded(name):
    given, why = STAYS[name]
    stays(made("llama", torch.float32, "eager"), why, **given)


def test_the_first_token_of_a_row_is_predicted_by_padding():
    """A label there is reason enough; the mask of the labels says so, not that of the tokens."""
    labels = INPUTS["labels"].clone()
    begin = int(MASK[0].argmax())
    labels[0, begin] = 7
    stays(made("llama", torch.float32, "eager"), "labels are predicted at positions of padding",
          **PLAIN, labels=labels)  # fmt: skip


def test_each_token_has_a_class():
    """Its label stands where its prediction does, and not one place later."""
    model: Any = transformers.LlamaForTokenClassification(transformers.LlamaConfig(**SMALL, num_labels=5))
    classes = IDS % 5
    at_padding = classes.masked_fill(MASK == 0, -100)
    row = int((MASK[:, 0] == 1).int().argmax())
    at_padding[row, int(MASK[row].sum())] = 3  # the only one, right behind a row's last token
    stays(model.train(), "labels are predicted at positions of padding", **PLAIN, labels=at_padding)
    expected = step(model, **PLAIN, labels=classes.masked_fill(MASK == 0, -100))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = step(model, **PLAIN, labels=classes.masked_fill(MASK == 0, -100))
        assert kernels.report().ran[OP] == 1
    torch.testing.assert_close(found, expected)


def test_an_answer_is_looked_for_among_all_places():
    model: Any = transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**SMALL))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert not kernels.report().replaced
        assert "its head compares all places of a row, padding among them" in str(kernels.report())


ELSEWHERE = "deepspeed.sequence.layer"


def elsewhere(where: str, monkeypatch: Any) -> list[Any]:
    """Somebody else attends in transformers' place or in PyTorch's, as what spreads rows over ranks does; its calls."""
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    attention = of_package(ELSEWHERE, counted)
    if where == "transformers":
        original: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention)
    else:
        original = functional.scaled_dot_product_attention
        monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    return calls


@pytest.mark.parametrize("where", ["transformers", "torch"])
def test_attention_of_somebody_else(where, monkeypatch):
    model = made("llama", torch.float32, "sdpa")
    calls = elsewhere(where, monkeypatch)
    stays(model, f"its attention (sdpa) is that of {ELSEWHERE}", **PLAIN)
    assert len(calls) == 3 * SMALL["num_hidden_layers"]
    monkeypatch.undo()
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        step(model, **PLAIN)
        assert kernels.report().ran[OP] == 1


def test_a_proof_asks_nobody_else(monkeypatch):
    """It may be needed when DeepSpeed spreads rows already: it is one process's."""
    calls = elsewhere("transformers", monkeypatch)
    # A configuration that nothing is known of yet.
    model = small_model("llama", attn_implementation="sdpa", rms_norm_eps=2e-6)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert {each.op for each in kernels.report().replaced} == {OP}
    assert not calls


def test_what_the_configuration_asks_for():
    model = made("llama", torch.float32, "eager")
    model.config.output_hidden_states = True
    stays(model, "its hidden_states are asked for", **PLAIN)


def test_checkpointed_layers_keep_no_cache_whatever_is_asked_for():
    model = made("llama", torch.float32, "eager")
    model.gradient_checkpointing_enable()
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        step(model, input_ids=IDS, attention_mask=MASK)
        assert kernels.report().ran[OP] == 1


@pytest.mark.parametrize("checkpoints", [False, True])
def test_without_gradients_there_is_a_cache_where_the_model_has_one(checkpoints):
    """transformers 5.24 keeps it under checkpointing, since nothing is computed twice; before, it dropped it."""
    model = made("llama", torch.float32, "eager")
    model.config.use_cache = True
    if checkpoints:
        model.gradient_checkpointing_enable()
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK)
        with apply_npu_kernels(model, ops=[OP]):
            found = model(input_ids=IDS, attention_mask=MASK)
    assert list(found) == list(expected)


def test_a_cache_that_is_given():
    model = made("llama", torch.float32, "eager").eval()
    with torch.no_grad():
        first = model(input_ids=IDS[:, :20], attention_mask=MASK[:, :20], use_cache=True)
        rest = {"input_ids": IDS[:, 20:], "attention_mask": MASK, "use_cache": True}
        expected = model(**rest, past_key_values=copy.deepcopy(first.past_key_values)).logits
        with apply_npu_kernels(model, ops=[OP]) as kernels:
            assert torch.equal(model(**rest, past_key_values=first.past_key_values).logits, expected)
            assert kernels.report().ran[OP] == 0
            assert not reasons(kernels)


def test_a_cache_that_is_given_in_training():
    model = made("llama", torch.float32, "eager")
    with torch.no_grad():
        cache = model.eval()(input_ids=IDS[:, :20], attention_mask=MASK[:, :20], use_cache=True).past_key_values
    rest = {"input_ids": IDS[:, 20:], "attention_mask": MASK, "use_cache": False}
    expected = step(model.train(), **rest, past_key_values=copy.deepcopy(cache))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert same(step(model, **rest, past_key_values=cache), expected)
        assert reasons(kernels) == {"it is given a cache of keys and values": 1}


def test_what_is_classified_is_not_found_without_ids():
    torch.manual_seed(0)
    model: Any = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL)).train()
    embedded = model.model.embed_tokens(IDS).detach()
    given = {"inputs_embeds": embedded, "attention_mask": MASK, "use_cache": False}
    stays(model, "the classifier finds its token by ids, and this call has none, or no padding", **given)
    alone = {"input_ids": IDS[1:2], "attention_mask": MASK[1:2], "use_cache": False}
    model.config.pad_token_id = None
    stays(model, "the classifier finds its token by ids, and this call has none, or no padding", **alone)


def test_keys_of_another_dtype_than_queries_raise_as_ever():
    """The norm of the keys is kept in fp32."""
    model = made("qwen3", torch.bfloat16, "sdpa")
    for layer in model.model.layers:
        layer.self_attn.k_norm.float()
    with pytest.raises(RuntimeError, match="same dtype"):
        model(**PLAIN)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        with pytest.raises(RuntimeError, match="same dtype"):
            model(**PLAIN)
        reason = "queries, keys and values of torch.bfloat16, torch.float32 and torch.bfloat16"
        assert reasons(kernels) == {reason: 1}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generation_is_the_models_own(family):
    model = made(family, torch.float32, "eager").eval()
    given = {"input_ids": IDS[:3], "attention_mask": padded("left", True)["attention_mask"][:3]}
    expected = model.generate(**given, max_new_tokens=6, do_sample=False, output_logits=True,
                              return_dict_in_generate=True)  # fmt: skip
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = model.generate(**given, max_new_tokens=6, do_sample=False, output_logits=True,
                               return_dict_in_generate=True)  # fmt: skip
        assert kernels.report().ran[OP] == 0
        assert not reasons(kernels)
    assert torch.equal(found.sequences, expected.sequences)
    assert same(found.logits, expected.logits)


def test_positions_in_several_dimensions():
    """As of models that see images; the model of this test cannot take them either."""
    model = made("llama", torch.float32, "eager")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        with pytest.raises((RuntimeError, ValueError)):
            model(**PLAIN, position_ids=torch.arange(28).expand(3, 6, 28))
        assert reasons(kernels) == {"it is given positions in several dimensions": 1}


def test_a_tensor_that_the_patch_does_not_know():
    model = made("llama", torch.float32, "eager")
    stays(model, "it is given token_type_ids", **PLAIN, token_type_ids=torch.zeros_like(IDS))


def test_a_mask_of_other_tokens():
    model = made("llama", torch.float32, "eager")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            model(input_ids=IDS[:, :9], attention_mask=MASK, use_cache=False)
        assert reasons(kernels) == {"its mask is not of the shape of its tokens": 1}


def test_layers_that_are_compiled_by_themselves():
    model, expected = made("llama", torch.float32, "sdpa"), step(made("llama", torch.float32, "sdpa"), **PLAIN)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert same(step(model, **PLAIN), expected)
        assert reasons(kernels) == {"its layers are compiled": 1}


def test_a_model_that_is_compiled_as_a_whole():
    model, expected = made("llama", torch.float32, "sdpa"), step(made("llama", torch.float32, "sdpa"), **PLAIN)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert same(step(torch.compile(model, backend="eager"), **PLAIN), expected)
        assert kernels.report().ran[OP] == 0
    torch._dynamo.reset()


def test_tensors_without_numbers_stay_padded():
    """What estimates memory, or exports, has shapes alone: there are no lengths to read, and no tokens to count."""
    model = made("llama", torch.float32, "sdpa")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        model(**PLAIN)
        counted = kernels.tokens, kernels.live_tokens
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = {name: mode.from_tensor(v) if torch.is_tensor(v) else v for name, v in PLAIN.items()}
            model(**given).logits.sum().backward()
        assert (kernels.tokens, kernels.live_tokens) == counted
        assert reasons(kernels) == {"its ids or mask have no numbers (FakeTensorMode)": 1}


@pytest.mark.parametrize("training", [True, False])
def test_a_trace_is_of_the_models_own_code(training):
    """It is for batches whose tokens lie elsewhere."""
    model = made("llama", torch.float32, "sdpa").train(training)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    ids, mask = PLAIN["input_ids"], PLAIN["attention_mask"]
    with apply_npu_kernels(model):
        traced = torch.jit.trace(Logits(), (ids, mask), check_trace=False)
    other = mask.roll(1, 0)
    assert torch.equal(traced(ids, other), Logits()(ids, other))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(("longest", "served"), [(27, False), (28, True)])
def test_a_rotation_that_depends_on_the_longest_row(longest, served):
    """Beyond its limit it looks at the greatest position, which in a packed row is another one."""
    config = transformers.LlamaConfig(**{**SMALL, "max_position_embeddings": longest}, rope_parameters=DYNAMIC)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    if not served:
        stays(model, "its rotation depends on the longest row", **PLAIN)
        return
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        step(model, **PLAIN)
        assert kernels.report().ran[OP] == 1


def test_what_is_dropped_out_is_not_shared():
    """Each row drops other probabilities; without dropout, in evaluation, they share their beginning."""
    model = small_model("llama", attn_implementation="sdpa", attention_dropout=0.2)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        values(model, INPUTS)
        counted = progress(kernels.report())
        assert counted.computed == counted.live
        model.eval()
        with torch.no_grad():
            model(**PLAIN)
        assert counted.computed < counted.live


def test_without_gradients_it_serves_what_scores():
    model = made("llama", torch.float32, "sdpa").eval()
    with torch.no_grad(), apply_npu_kernels(model, ops=[OP]) as kernels:
        model(**PLAIN)
        assert kernels.report().ran[OP] == 1


def test_what_a_backend_cannot_serve_is_asked_once(monkeypatch):
    """Of the same circumstances the next batch is not begun; in others it is asked again."""
    asked = []

    def unserved(device: Any, dtype: Any, sizes: Any, **more: Any) -> str | None:
        asked.append(dtype)
        return "planted" if dtype is torch.bfloat16 else None

    monkeypatch.setattr("npu_trainer_kernels.patching.body.packed.unserved", unserved)
    model = made("llama", torch.float32, "eager")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        asked.clear()
        with torch.autocast("cpu", torch.bfloat16):
            step(model, **PLAIN)
            count = len(asked)
            step(model, **PLAIN)
        assert len(asked) == count
        assert reasons(kernels) == {"planted": 2}
        step(model, **PLAIN)
        assert kernels.report().ran[OP] == 1


def test_too_many_segments_refuse_one_batch_alone(monkeypatch):
    def unserved(*args: Any, segments: int = 1, **more: Any) -> str | None:
        return "too many" if segments > 5 else None

    monkeypatch.setattr("npu_trainer_kernels.patching.body.packed.unserved", unserved)
    model = made("llama", torch.float32, "eager")
    expected = step(model, **PLAIN)
    fewer = {**PLAIN, "input_ids": IDS[:2], "attention_mask": MASK[:2]}
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert same(step(model, **PLAIN), expected)
        assert (reasons(kernels), kernels.report().ran[OP]) == ({"too many": 1}, 0)
        step(model, **fewer)
        assert (reasons(kernels), kernels.report().ran[OP]) == ({"too many": 1}, 1)


def test_a_layer_that_is_served_in_no_way_is_known_before_it_begins(monkeypatch):
    monkeypatch.setattr("npu_trainer_kernels.patching.body.packed.unserved", lambda *args, **more: "planted")
    model = made("llama", torch.float32, "eager")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        monkeypatch.setattr("npu_trainer_kernels.patching.body.batch.packed_row", None)  # no packed row sets out
        values(model, INPUTS)
        assert reasons(kernels) == {"planted": 1}


class Sided(LlamaDecoderLayer):
    """Adds, where there is one, a tensor that somebody has set for the batch."""

    side: Any = None
    gate: Any = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(hidden_states, *args, **kwargs)
        out = out if self.side is None else out + self.side
        return out if self.gate is None else out.masked_fill(self.gate.unsqueeze(-1), 0.0)


class WithSides(LlamaModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([Sided(config, i) for i in range(len(self.layers))])


SIDE_INPUTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "of each row": ({"side": torch.randn(6, 1, SMALL["hidden_size"])}, "its layers make a tensor of shape [6, "),
    "of each place": ({"side": torch.randn(6, 28, 1)}, "its code takes no packed row: RuntimeError: The size of"),
    "a mask of places": ({"gate": MASK == 0}, "its code takes no packed row: RuntimeError: The size of"),
}


@pytest.mark.parametrize("name", SIDE_INPUTS)
def test_what_a_layer_adds_of_the_batch_goes_with_the_batch(name):
    """Only the last layer: in others attention would see that there are several rows."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation="eager"))
    model.model = WithSides(copy.deepcopy(model.config))
    model.train()
    given, why = SIDE_INPUTS[name]
    vars(model.model.layers[-1]).update(given)
    expected = step(model, **PLAIN)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert same(step(model, **PLAIN), expected)
        (reason,) = reasons(kernels)
        assert why in reason
        for each in given:
            delattr(model.model.layers[-1], each)
        step(model, **PLAIN)
        assert kernels.report().ran[OP] == 1


# ---------------------------------------------------------------------------------------------------------------------
# What is left of it: nothing
# ---------------------------------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes and hooks of every module, and what its configuration names."""
    return {
        path: (
            type(m), set(vars(m)), {name: list(value) for name, value in vars(m).items() if name.endswith("hooks")},
            getattr(getattr(m, "config", None), "_attn_implementation", None),
        )
        for path, m in model.named_modules()
    }  # fmt: skip


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(value) for m in model.modules() for name, value in vars(m).items()
        if "hooks" in name and isinstance(value, dict)
    )  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("ops", [(OP,), tuple(PATCHES)], ids=["alone", "with all ops"])
def test_restore_is_exact(attention, ops):
    model = made("qwen3", torch.float32, attention)
    before, config = state_of(model), model.config.to_dict()
    expected = values(model, INPUTS)
    kernels = apply_npu_kernels(model, ops=ops)
    assert state_of(model) != before
    values(model, INPUTS)
    assert model.config._attn_implementation == attention
    assert model.config.to_dict() == config
    kernels.restore()
    kernels.restore()
    assert state_of(model) == before
    found = values(model, INPUTS)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_inner_with_leaves_the_outer_one_on():
    model = made("llama", torch.float32, "sdpa")
    before = state_of(model)
    with apply_npu_kernels(model, ops=[OP]) as outer:
        patched = state_of(model)
        with apply_npu_kernels(model, ops=[OP]) as inner:
            assert inner is outer
        assert state_of(model) == patched
        values(model, INPUTS)
        assert outer.report().ran[OP] == 1
    assert state_of(model) == before


class Planted(Exception):
    pass


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_exception_on_the_way_leaves_the_configuration_as_it_was(monkeypatch, checkpointed):
    """In the middle of a packed forward, and where a layer is computed again."""
    model = made("llama", torch.float32, "eager")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls, when, attend = [], 0, packed_module.varlen_attention

    def raises(*args: Any, **more: Any) -> torch.Tensor:
        calls.append(model.config._attn_implementation)
        if len(calls) == when:
            raise Planted
        return attend(*args, **more)

    monkeypatch.setattr(packed_module, "varlen_attention", raises)
    with apply_npu_kernels(model, ops=[OP]):
        calls.clear()
        expected = values(model, INPUTS)
        assert calls == ["eager"] * (4 if checkpointed else 2)  # nor is it written to on the way
        for when in range(1, len(calls) + 1):
            calls.clear()
            with pytest.raises(Planted):
                values(model, INPUTS)
            assert len(calls) == when
            assert model.config._attn_implementation == "eager"
            calls.clear()
            when = 0
            found = values(model, INPUTS)
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("other", ["another batch", "a batch without padding", "a model with the same configuration"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_another_thread_computes_in_the_midst_of_a_forward(monkeypatch, other, checkpointed):
    """One thread is stopped at each attention, in backward too, until another one has done a step without gradients."""
    model = made("gemma3", torch.float32, "eager")
    beside = transformers.Gemma3ForCausalLM(model.config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = {**PLAIN, **({"attention_mask": torch.ones_like(MASK)} if other == "a batch without padding" else {})}
    batch["input_ids"] = IDS.flip(0) if other == "another batch" else IDS

    def outside() -> torch.Tensor:
        with torch.no_grad():
            return (beside if other.startswith("a model") else model)(**batch).logits

    attend, threads, found = packed_module.varlen_attention, [], []

    def stopped(*args: Any, **more: Any) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            threads.append(threading.Thread(target=lambda: found.append(outside())))
            threads[-1].start()
            threads[-1].join()
        return attend(*args, **more)

    with apply_npu_kernels(model, ops=[OP]) as kernels:
        expected, wanted = step(model, **PLAIN), outside()
        ran = kernels.report().ran[OP]
        monkeypatch.setattr(packed_module, "varlen_attention", stopped)
        assert same(step(model, **PLAIN), expected)
        assert kernels.report().ran[OP] == ran + 1 + (len(threads) if other == "another batch" else 0)
    assert len(found) == len(threads) == model.config.num_hidden_layers * (2 if checkpointed else 1)
    assert all(torch.equal(each, wanted) for each in found)


def test_another_patched_model_in_the_midst_of_a_forward(monkeypatch):
    """On the same thread: the row that is on its way is none of its own."""
    model, other = made("llama", torch.float32, "eager"), made("qwen3", torch.float32, "eager")
    attend, found = packed_module.varlen_attention, []

    def inside(*args: Any, **more: Any) -> torch.Tensor:
        with torch.no_grad():
            found.append(other(**PLAIN).logits)
        return attend(*args, **more)

    with torch.no_grad():
        wanted = other(**PLAIN).logits
    with apply_npu_kernels(model, ops=[OP]), apply_npu_kernels(other, ops=[OP]):
        expected = step(model, **PLAIN)
        monkeypatch.setattr(packed_module, "varlen_attention", inside)
        assert same(step(model, **PLAIN), expected)
    assert found
    assert all(torch.equal(each, wanted) for each in found)


def test_an_attention_that_came_later():
    """It knows nothing of packed rows."""
    model = made("llama", torch.float32, "eager")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        new = type(made("llama", torch.float32, "eager").model.layers[1].self_attn)(model.config, 1)
        new.load_state_dict(model.model.layers[1].self_attn.state_dict())
        model.model.layers[1].self_attn = new
        step(model, **PLAIN)
        assert reasons(kernels) == {"a LlamaAttention has come into it since": 1}
        kernels.refresh()
        step(model, **PLAIN)
        assert kernels.report().ran[OP] == 1


def test_a_copy_is_patched_and_can_be_restored():
    model = made("llama", torch.float32, "eager")
    before, count = [type(m) for m in model.modules()], hooks_of(model)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        twin = copy.deepcopy(model)
        expected, found = values(model, INPUTS), values(twin, INPUTS)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert kernels.report().ran[OP] == 2
    apply_npu_kernels(twin, ops=[OP]).restore()
    assert [type(m) for m in twin.modules()] == before
    assert hooks_of(twin.model) == hooks_of(model.model)
    assert hooks_of(model) == count


def test_a_loaded_model_computes_what_it_is_and_can_be_patched_anew(tmp_path):
    model = made("llama", torch.float32, "eager").model
    given = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
    before, count = [type(m) for m in model.modules()], hooks_of(model)
    expected = model(**given).last_hidden_state
    with apply_npu_kernels(model, ops=[OP]):
        packed = model(**given).last_hidden_state
        torch.save(model.layers, tmp_path / "layers.pt")
    model.layers = torch.load(tmp_path / "layers.pt", weights_only=False)
    assert torch.equal(model(**given).last_hidden_state, expected)
    with apply_npu_kernels(model, ops=[OP]):
        assert torch.equal(model(**given).last_hidden_state, packed)
    assert [type(m) for m in model.modules()] == before
    assert hooks_of(model) == count


def test_two_models_with_one_configuration():
    """A reference model often has the policy's: what one does on its way is nothing to the other."""
    config = made("llama", torch.float32, "eager").config
    patched, plain = (transformers.LlamaForCausalLM(config) for _ in range(2))
    assert patched.config is plain.config
    plain.load_state_dict(patched.state_dict())
    expected = values(plain, INPUTS)
    with apply_npu_kernels(patched, ops=[OP]) as kernels:
        values(patched, INPUTS)
        found = values(plain, INPUTS)
        assert kernels.report().ran[OP] == 1
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_body_that_is_not_asked_for_is_left_as_it_is():
    model = made("llama", torch.float32, "eager")
    # The head's patch, too, moves a body: to compile it apart from the head.
    others = [name for name in PATCHES if name not in (OP, "linear_cross_entropy", "linear_logprob")]
    with apply_npu_kernels(model, ops=others) as kernels:
        assert OP not in {each.op for each in kernels.report().replaced}
        assert type(model.model) is transformers.LlamaModel
