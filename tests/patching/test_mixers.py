"""Bodies with a state along their rows: only the modules that mix tokens compute padding, and every number stays."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.body import batch as batches
from npu_trainer_kernels.patching.body import mixers, proof
from npu_trainer_kernels.patching.body.layout import layout
from npu_trainer_kernels.patching.probe import small_config
from npu_trainer_kernels.patching.undo import Undo
from tests.closeness import assert_as_close, rounded
from tests.families.tiny import model_class, tiny_config
from tests.models import in_double, small_model
from tests.patching.padded import of_package
from tests.patching.test_padding import compare, live_and_distinct, padded, progress, values

OPS = ("varlen_attention",)
FAMILIES = ("bailing_hybrid", "bamba", "bart", "bloom", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
            "mpt", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "zamba")  # fmt: skip


@pytest.fixture(autouse=True)
def without_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are carried by segments where they can be (`test_states.py`): here nobody does."""
    monkeypatch.setattr(proof, "_proofs", {})
    monkeypatch.setattr(proof, "carry_by_segments", lambda *_: frozenset())


def hybrid(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config("causal", kind)
    config._experts_implementation = "eager"  # the default has no product in fp64
    for name, value in options.items():
        setattr(config, name, value)
    return model_class("causal", kind)(config).train()


def batch(model: Any, side: str) -> dict[str, torch.Tensor]:
    inputs = padded(side, shared=False)
    size = model.config.vocab_size
    return {
        name: torch.where(v > 2, v % (size - 3) + 3, v) if name != "attention_mask" else v for name, v in inputs.items()
    }


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_batch_is_the_models_own(kind: str, side: str) -> None:
    model = hybrid(kind)
    inputs = batch(model, side)
    report = compare(model, inputs, OPS, f"{kind} {side}")
    saved = progress(report)
    live = live_and_distinct(inputs)[0]
    assert (saved.live, saved.computed, saved.positions) == (live, live, inputs["input_ids"].numel())


BEFORE_ROWS = {
    "deepseek_v4": "padding is computed by DeepseekV4Attention",
    "recurrent_gemma": "padding is computed by RecurrentGemmaAttention, RecurrentGemmaRecurrentBlock",
    "xlstm": "padding is computed by xLSTMLayer",
}


@pytest.mark.parametrize("kind", BEFORE_ROWS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_state_that_reads_no_mask(kind: str, side: str) -> None:
    """Padding before a row's tokens runs into its state: it is computed as in the model's own forward."""
    model = hybrid(kind)
    inputs = batch(model, side)
    if kind == "xlstm":  # takes rows of whole chunks
        missing = -inputs["input_ids"].shape[1] % model.config.chunk_size
        inputs = {n: nn.functional.pad(v, (0, missing), value=-100 * (n == "labels")) for n, v in inputs.items()}
    mask = inputs["attention_mask"]
    upto = sum(max(row.nonzero().flatten().tolist(), default=-1) + 1 for row in mask)
    with apply_npu_kernels(copy.deepcopy(model), ops=OPS) as kernels:
        (site,) = kernels.report().sites
        assert str(site.form) == f"{BEFORE_ROWS[kind]}; what is before a row's tokens by all modules"
    if mask.numel() - upto < 0.1 * mask.numel():
        assert side == "left"  # nothing to be left out
        return
    saved = progress(compare(model, inputs, OPS, f"{kind} {side}"))
    assert (saved.computed, saved.positions) == (upto, mask.numel())


def test_padding_before_a_rows_tokens_is_no_token_of_such_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without it the proof fails, and nothing is served."""
    of = batches.Batch.of
    monkeypatch.setattr(batches.Batch, "of", lambda *args, leading=False, **options: of(*args, **options))
    with apply_npu_kernels(hybrid("recurrent_gemma"), ops=OPS) as kernels:
        (left,) = kernels.report().left_alone
    assert left.reason.startswith("tokens of a packed row are not what they are in their own (differs by ")


def test_a_body_without_a_mask() -> None:
    with apply_npu_kernels(hybrid("cpmant"), ops=OPS) as kernels:
        (left,) = kernels.report().left_alone
    assert left.reason == "its forward takes no ids and mask"


def test_a_module_without_positions_around_a_body() -> None:
    """It must not leave to mixers what the body inside computes by segments."""
    model = hybrid("moss_transcribe_diarize")
    with apply_npu_kernels(model, ops=OPS) as kernels:
        report = kernels.report()
    (site,), (left,) = report.sites, report.left_alone
    assert not site.form.proof.mixes
    assert left.reason == "its forward takes no positions: the text-only body inside decides for itself"


def test_what_a_body_makes_of_its_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooler would read the first tokens of other rows."""
    model = hybrid("jamba")
    kind = type(model.model)
    own = kind.forward

    @functools.wraps(own)
    def forward(body: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(body, *args, **kwargs)
        out["pooler_output"] = out.last_hidden_state[:, 0]
        return out

    monkeypatch.setattr(kind, "forward", forward)
    body = model.model
    why = proof._shown(body, "", small_config(body.config), mixes=True)
    assert why == "it returns pooler_output"


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid"])
def test_with_every_op(kind: str) -> None:
    model = hybrid(kind)
    assert progress(compare(model, batch(model, "both"), None, kind)).trained == 1


Values = dict[str, torch.Tensor | None]


def held(model: Any, step: Callable[[Any], Values], *, reentrant: bool = False) -> None:
    """Holds a step under the kernels, with checkpoints, to the model's own without either."""
    exact = copy.deepcopy(model).double()
    with in_double():
        truth = step(exact)
    expected, moved = step(model), rounded(lambda: step(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with apply_npu_kernels(model, ops=OPS) as kernels:
        actual = step(model)
        assert progress(kernels.report()).trained
    for name, value in truth.items():
        given = actual[name]
        assert (given is None) == (value is None), name
        if given is not None:
            assert_as_close(given, expected[name], value, name, [m[name] for m in moved])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_recomputed(kind: str, reentrant: bool) -> None:
    model = hybrid(kind)
    inputs = batch(model, "both")
    held(model, lambda model: values(model, inputs), reentrant=reentrant)


def two_forwards(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Callable[[Any], Values]:
    """The gradients of two batches whose forwards both run before a backward."""

    def both(model: Any) -> Values:
        model.zero_grad(set_to_none=True)
        losses = [model(**inputs, use_cache=False).loss for inputs in (one, other)]
        sum(losses[1:], losses[0]).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return both


def test_two_forwards_before_their_backwards() -> None:
    model = hybrid("qwen3_next")
    held(model, two_forwards(batch(model, "left"), batch(model, "right")))


def test_who_gets_what(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_next")
    inputs = batch(model, "both")
    seen: dict[str, set[tuple[int, ...]]] = {}
    monkeypatch.setattr(proof, "_proofs", {})  # of the classes with these forwards
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__ in ("Qwen3NextAttention", "Qwen3NextGatedDeltaNet", "Qwen3NextSparseMoeBlock"):
            monkeypatch.setattr(kind, "forward", noting(kind, seen))
    with apply_npu_kernels(model, ops=OPS) as kernels:
        seen.clear()
        values(model, inputs)
        (site,) = (site for site in kernels.report().sites if site.op == "varlen_attention")
        assert str(site.form) == "padding is computed by Qwen3NextAttention, Qwen3NextGatedDeltaNet"
    shape, live = tuple(inputs["input_ids"].shape), live_and_distinct(inputs)[0]
    assert seen == {
        "Qwen3NextAttention": {shape},
        "Qwen3NextGatedDeltaNet": {shape},
        "Qwen3NextSparseMoeBlock": {(1, live)},
    }


def noting(kind: Any, seen: dict[str, set[tuple[int, ...]]]) -> Callable[..., Any]:
    """The forward of a class, which notes the first two sizes of the hidden states that it is given."""
    original = kind.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        seen.setdefault(kind.__name__, set()).add(tuple(hidden.shape[:2]))
        return original(module, *args, **kwargs)

    return functools.wraps(original)(of_package("accelerate.hooks", forward))


def test_a_body_whose_mixers_compute_padding_is_not_captured() -> None:
    model = hybrid("qwen3_5_text")
    inputs = batch(model, "both")
    with apply_npu_kernels(model, ops=OPS, capture="on") as kernels:
        for _ in range(3):
            values(model, inputs)
        report = kernels.report()
    assert progress(report).computed > 0
    assert report.capture.reasons == {
        "modules that mix tokens get the padded batch, whose shape is another one at each step": 3
    }


def test_the_report_names_who_computes_padding() -> None:
    model = hybrid("lfm2")
    with apply_npu_kernels(model, ops=OPS) as kernels:
        values(model, batch(model, "both"))
        said = str(progress(kernels.report()))
    assert said.endswith(" of the positions were live, padding is computed by Lfm2Attention, Lfm2ShortConv")


def test_little_padding_is_computed() -> None:
    model = hybrid("bamba")
    inputs = {name: value[:2] for name, value in batch(model, "right").items()}
    for name, value in inputs.items():
        value[1, -2:], value[1, :-2] = (-100 if name == "labels" else 0), (3 if name != "attention_mask" else 1)
    assert inputs["attention_mask"].sum() == 54
    with apply_npu_kernels(model, ops=OPS) as kernels:
        values(model, inputs)
        assert progress(kernels.report()).computed == 0


def test_layers_by_themselves_take_what_they_took() -> None:
    body: Any = nn.Module()
    body.layers = nn.ModuleList([Reads()])
    undo = Undo()
    assert mixers.leave_padding_to_mixers(body, undo) is None
    hidden = torch.randn(2, 3, 4)
    assert torch.equal(body.layers[0](hidden=hidden), hidden.flatten(0, 1))
    rows = rows_of_two()
    with mixers.live_tokens_alone(rows), pytest.raises(mixers.Unserved):
        body.layers[0](hidden=hidden)
    undo.restore()


def test_compiled_it_is_its_own() -> None:
    model = hybrid("lfm2")
    inputs = batch(model, "both")
    expected = values(model, inputs)["loss"]
    with apply_npu_kernels(model, ops=OPS):
        compiled = torch.compile(model, backend="eager")
        found = compiled(**inputs, use_cache=False).loss
    assert torch.equal(found, expected)


def classes_come_back(model: Any) -> None:
    before = [type(module) for module in model.modules()]
    with apply_npu_kernels(model, ops=OPS):
        assert [type(module) for module in model.modules()] != before
    assert [type(module) for module in model.modules()] == before


def test_the_models_classes_come_back() -> None:
    classes_come_back(hybrid("bamba"))


def generates_as_before(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    ids, mask = inputs["input_ids"][:2], inputs["attention_mask"][:2]
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with apply_npu_kernels(model, ops=OPS):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), expected)


def test_generation_is_its_own() -> None:
    model = hybrid("qwen3_next").eval()
    generates_as_before(model, batch(model, "left"))


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a token in another place": ("pad", lambda values: values.roll(1, 1)),
    "a result of another place": ("pack", lambda values: values.roll(1, 1)),
    "a row's result in another row": ("pack", lambda values: values.roll(1, 0)),
    "the gradient of what mixers get is lost": ("pad", lambda values: values.detach()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, change = FAULTS[fault]
    model = hybrid("qwen3_next")
    inputs = batch(model, "both")
    with apply_npu_kernels(model, ops=OPS):
        pass  # the proof, which would see it
    original = getattr(mixers.LiveRows, method)
    monkeypatch.setattr(mixers.LiveRows, method, lambda rows, values: original(rows, change(values)))
    with pytest.raises(AssertionError):
        compare(model, inputs, OPS, "planted")


# ---------------------------------------------------------------------------------------------------------------------
# What is left alone
# ---------------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A layer that is none of transformers'."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inside = layer


class Reads(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()

    def forward(self, hidden: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return self.mixer(hidden.flatten(0, 1), attention_mask=attention_mask)


class Mixer(nn.Module):
    def forward(self, hidden: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return hidden


def rows_of_two() -> mixers.LiveRows:
    found = layout(torch.tensor([[1, 2, -1], [-1, 3, 4]]).numpy(), share=False)
    assert not isinstance(found, str)
    return mixers.LiveRows.of(found, (2, 3), torch.device("cpu"))


def test_layers_of_other_code() -> None:
    body: Any = small_model("llama").model
    body.layers = nn.ModuleList(Plain(layer) for layer in body.layers)
    assert mixers.leave_padding_to_mixers(body, Undo()) == "its layers are not transformers' own"
    assert mixers.leave_padding_to_mixers(nn.Module(), Undo()) == "its layers are not transformers' own"


def test_rows_are_packed_and_padded() -> None:
    rows, values = rows_of_two(), torch.arange(12.0).view(2, 3, 2)
    packed = rows.pack(values)
    assert packed.tolist() == [[[0, 1], [2, 3], [8, 9], [10, 11]]]
    assert rows.pad(packed).tolist() == [[[0, 1], [2, 3], [0, 0]], [[0, 0], [8, 9], [10, 11]]]


def test_hidden_states_of_other_shapes() -> None:
    body = nn.Module()
    body.layers = nn.ModuleList([Reads()])
    undo = Undo()
    assert mixers.leave_padding_to_mixers(body, undo) is None
    (layer,) = body.layers
    with mixers.live_tokens_alone(rows_of_two()):
        with pytest.raises(mixers.Unserved, match=r"^its layers are not given the hidden states of its batch$"):
            layer(torch.zeros(2, 5, 4))
        with pytest.raises(mixers.Unserved, match=r"^its Mixer is not given the hidden states of its tokens$"):
            layer(torch.zeros(2, 3, 4))
    undo.restore()
    assert type(layer) is Reads


def test_a_body_that_gives_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    body: Any = small_model("llama").model
    monkeypatch.setattr(mixers, "_mixes_tokens", lambda module: False)
    monkeypatch.setattr(mixers.LiveRows, "pack", lambda rows, values: values)
    why = proof._shown(body, "", small_config(body.config), mixes=True)
    assert isinstance(why, str)
    assert why.startswith("its layers give hidden states of shape [6, 24, ")
