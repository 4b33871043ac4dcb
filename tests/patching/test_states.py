"""Modules that carry a state along a row take packed rows: every number stays, and no row sees another."""

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.ops.attention import Segments, Shared
from npu_trainer_kernels.ops.linear_attention import delta_rule_chunks as chunks
from npu_trainer_kernels.patching.body import (
    Unserved,
    packed_row,
    packing_for,
    padding,
    proof,
    state_forms,
    state_row,
    states,
)
from npu_trainer_kernels.patching.body.layout import layout
from npu_trainer_kernels.patching.body.state_row import StateRow
from npu_trainer_kernels.patching.probe import small_config
from npu_trainer_kernels.patching.undo import Undo
from npu_trainer_kernels.support.foreign import at_least
from tests.closeness import assert_as_close, rounded
from tests.families.tiny import model_class, tiny_config
from tests.models import in_double
from tests.ops.test_gated_delta_rule import states_that_leak
from tests.patching.test_mixers import Values, classes_come_back, generates_as_before, hybrid, two_forwards
from tests.patching.test_padding import compare, live_and_distinct, padded, progress, values

OPS = ("varlen_attention",)
MIXERS = {
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    **({"lfm3": "Lfm3ShortConv"} if at_least("transformers", "5.23") else {}),
    "mamba2": "Mamba2Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "zamba2": "Zamba2MambaMixer",
}


def batch(model: Any, side: str, shared: bool = True) -> dict[str, torch.Tensor]:
    size = model.config.vocab_size
    return {
        name: value if name == "attention_mask" else torch.where(value > 2, value % (size - 3) + 3, value)
        for name, value in padded(side, shared).items()
    }


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_batch_is_the_models_own(kind: str, side: str) -> None:
    model = hybrid(kind)
    inputs = batch(model, side)
    report = compare(model, inputs, OPS, f"{kind} {side}")
    saved = progress(report)
    live, distinct = live_and_distinct(inputs)
    assert (saved.live, saved.computed) == (live, distinct)
    assert saved.computed < saved.positions
    (site,) = (site for site in report.sites if site.op == "varlen_attention")
    positions = "" if kind == "mamba2" else "positions count columns; "  # it takes none
    assert str(site.form) == f"{positions}states by segments in {MIXERS[kind]}"


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "granitemoehybrid", "lfm2", pytest.param("kimi_linear", marks=pytest.mark.full)]
)
def test_with_every_op(kind: str) -> None:
    model = hybrid(kind)
    assert progress(compare(model, batch(model, "both"), None, kind)).trained == 1


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_without_padding(kind: str, device: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator it is packed as well where transformers has no kernels for the state."""
    monkeypatch.setattr(padding, "_device_of", lambda rows: torch.device(device))
    model = hybrid(kind)
    inputs = {name: value[:2, 8:20] for name, value in batch(model, "both", shared=False).items()}
    mask = inputs.pop("attention_mask")
    if masked:
        inputs["attention_mask"] = torch.ones_like(mask)
    saved = progress(compare(model, inputs, OPS, kind))
    assert saved.computed == (24 if (kind, device) == ("qwen3_5_text", "cuda") else 0)


def held(model: Any, step: Callable[[Any], Values], prepare: Callable[[Any], object] = lambda model: None,
         plain: Callable[[Any], Values] | None = None, **options: Any) -> Any:  # fmt: skip
    """Holds a step under the kernels, after `prepare`, to the model's own without them (or to another step of it)."""
    exact = copy.deepcopy(model).double()
    own = plain or step
    with in_double():
        truth = own(exact)
    expected, moved = own(model), rounded(lambda: own(model))
    prepare(model)
    with apply_npu_kernels(model, ops=OPS, **options) as kernels:
        actual = step(model)
        report = kernels.report()
        assert not report.declined, report.declined
    for name, value in truth.items():
        given = actual[name]
        assert (given is None) == (value is None), name
        if given is not None:
            assert_as_close(given, expected[name], value, name, [m[name] for m in moved])
    return report


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "lfm2"])
def test_recomputed(kind: str, reentrant: bool) -> None:
    model = hybrid(kind)
    inputs = batch(model, "both")
    report = held(
        model, lambda model: values(model, inputs),
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant}),
    )  # fmt: skip
    assert progress(report).trained


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", pytest.param("kimi_linear", marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(kind: str, dtype: torch.dtype) -> None:
    model = hybrid(kind).to(dtype)
    inputs = batch(model, "both")
    assert progress(held(model, lambda model: values(model, inputs))).trained


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba"])
def test_under_autocast(kind: str) -> None:
    model = hybrid(kind)
    inputs = batch(model, "both")

    def step(model: Any) -> Values:
        double = next(model.parameters()).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16, enabled=not double):
            return values(model, inputs)

    assert progress(held(model, step)).trained


def test_two_forwards_before_their_backwards() -> None:
    model = hybrid("qwen3_next")
    held(model, two_forwards(batch(model, "left"), batch(model, "right")))


def test_the_models_classes_come_back() -> None:
    classes_come_back(hybrid("falcon_h1"))


def test_generation_is_its_own() -> None:
    model = hybrid("qwen3_next").eval()
    generates_as_before(model, batch(model, "left"))


# ---------------------------------------------------------------------------------------------------------------------
# Batches that a collator has packed
# ---------------------------------------------------------------------------------------------------------------------

LENGTHS = (13, 40, 2, 70, 1, 9)


def packed_and_apart(size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Rows side by side as TRL's collator makes them, and the same rows padded."""
    ids = torch.randint(3, size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    labels = ids.masked_fill(positions == 0, -100)
    mask = torch.ones_like(ids)
    apart = {
        name: nn.utils.rnn.pad_sequence(value.split(LENGTHS), batch_first=True, padding_value=fill)
        for name, value, fill in (("input_ids", ids, 0), ("labels", labels, -100), ("attention_mask", mask, 0))
    }
    packed = {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}
    return packed, apart


def lengths_again() -> dict[str, Any]:
    ends = torch.tensor((0, *itertools.accumulate(LENGTHS)), dtype=torch.int32)
    longest = max(LENGTHS)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


@pytest.mark.parametrize(
    ("kind", "again"),
    [("qwen3_next", True), ("bamba", False), ("bamba", True), ("lfm2", False), ("minimax", False), ("llama", True),
     ("zamba2", False), ("mamba2", False), ("bloom", False),
     *(pytest.param(kind, False, marks=pytest.mark.full) for kind in ("kimi_linear", "jamba"))],
)  # fmt: skip
def test_packed_rows_are_kept_apart(kind: str, again: bool) -> None:
    model = hybrid(kind)
    packed, apart = packed_and_apart(model.config.vocab_size)
    given = {**packed, **(lengths_again() if again else {})}
    report = held(model, lambda model: values(model, given), plain=lambda model: values(model, apart))
    assert report.ran["varlen_attention"] == 1


def test_a_body_of_states_is_given_a_cache() -> None:
    """Mamba 2's is no cache of keys, and has another name."""
    model = hybrid("mamba2").eval()
    inputs = batch(model, "left", shared=False)
    cache = model(input_ids=inputs["input_ids"], use_cache=True).cache_params
    with apply_npu_kernels(model, ops=OPS) as kernels:
        model.backbone(inputs["input_ids"], cache_params=cache, attention_mask=inputs["attention_mask"])
        report = kernels.report()
    assert [left.reason for left in report.declined] == ["it is given a cache of keys and values"]


@pytest.mark.parametrize(("kind", "mixers"), [("mamba", "MambaMixer"), ("rwkv", "RwkvFeedForward, RwkvSelfAttention")])
def test_a_body_of_mixers_alone(kind: str, mixers: str) -> None:
    with apply_npu_kernels(hybrid(kind), ops=OPS) as kernels:
        report = kernels.report()
    assert not report.sites
    (left,) = report.left_alone
    assert left.reason == f"all matrices of its layers are in modules that mix tokens: {mixers}"


def test_several_packed_rows_in_a_batch() -> None:
    model = hybrid("qwen3_5_text")
    packed, _ = packed_and_apart(model.config.vocab_size)
    # Two rows of 55 and 80 tokens: the second begins with the fourth sequence.
    two = {name: torch.stack((value[0, :80], value[0, 55:])) for name, value in packed.items()}
    two["position_ids"][0, 55:] = torch.arange(25)
    assert (two["position_ids"] == 0).sum(1).tolist() == [4, 3]
    rows = [(0, 0, 13), (0, 13, 53), (0, 53, 55), (0, 55, 80), (1, 0, 70), (1, 70, 71), (1, 71, 80)]
    padded_rows = {
        name: nn.utils.rnn.pad_sequence([two[name][b, i:j] for b, i, j in rows], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    padded_rows["attention_mask"] = nn.utils.rnn.pad_sequence(
        [torch.ones(j - i, dtype=torch.long) for _, i, j in rows], batch_first=True
    )
    # The label of a row's first token is to be predicted by nothing, also where the row begins inside of a batch's.
    for (b, i, _), labels in zip(rows, padded_rows["labels"], strict=True):
        two["labels"][b, i] = labels[0] = -100
    held(model, lambda model: values(model, two), plain=lambda model: values(model, padded_rows))


def test_one_row_by_positions_is_the_models_own() -> None:
    model = hybrid("qwen3_next")
    ids = torch.randint(3, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(4))
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12).expand(2, 12)}
    expected = values(model, inputs)["loss"]
    with apply_npu_kernels(model, ops=OPS) as kernels:
        assert torch.equal(values(model, inputs)["loss"], expected)
        report = kernels.report()
    assert (report.ran, report.declined) == ({"varlen_attention": 0}, [])


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_the_first_batch_may_be_packed(kind: str) -> None:
    """The model's own forward on packed rows is wrong; the audit compares with the rows padded."""
    model = hybrid(kind)
    packed, _ = packed_and_apart(model.config.vocab_size)
    told: list[str] = []
    with apply_npu_kernels(model) as kernels:
        kernels.audit(told.append)
        values(model, packed)
        report = kernels.report()
    (audited,) = report.audits
    assert (audited.rows, audited.longest, audited.differing, told) == (3, 40, [], [])
    assert audited.farthest > 0
    assert not report.declined


def test_the_audit_sees_packed_rows_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_next")
    packed, _ = packed_and_apart(model.config.vocab_size)
    told: list[str] = []
    with apply_npu_kernels(model) as kernels:
        monkeypatch.setattr(StateRow, "inputs_before", leaking_inputs)
        kernels.audit(told.append)
        values(model, packed)
    assert len(told) == 1
    assert "padding left out differs from the model's own code on this batch" in told[0]


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------

own_inputs = StateRow.inputs_before


def leaking_inputs(row: StateRow, x: torch.Tensor, count: int) -> torch.Tensor:
    """The inputs before a segment are those of the row, whoever's they are."""
    before = [functional.pad(x[0], (count, 0))[:, begin : begin + count] for begin in row._begins]
    return torch.stack(before)


def scaled_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor - (x * (factor - 1)).detach()


@contextlib.contextmanager
def one_segment(patch: pytest.MonkeyPatch) -> Iterator[None]:
    own = state_forms.gated_delta_rule

    def rule(*tensors: torch.Tensor, segments: Any = None, state: Any = None, **options: Any) -> Any:
        return own(*tensors, segments=segments and Segments.make([segments.q_ends[-1]], "cpu"), **options)

    patch.setattr(state_forms, "gated_delta_rule", rule)
    yield


@contextlib.contextmanager
def one_chunk(patch: pytest.MonkeyPatch, of_given: bool = False) -> Iterator[None]:
    """The chunks of one segment, the second of those that are computed at once, go on from the chunk before them."""
    patch.setattr(chunks, "states", states_that_leak(of_given))
    yield


@contextlib.contextmanager
def of_states(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """What prefixes hand on is changed."""
    own = state_row.take

    def taken(x: torch.Tensor, rows: Shared) -> torch.Tensor:
        found = own(x, rows)
        return change(found) if x.dim() == 4 else found

    patch.setattr(state_row, "take", taken)
    yield


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "one tap reaches the row before": lambda p: p.setattr(StateRow, "inputs_before", leaking_inputs),
    "a convolution forgets the prompt": lambda p: p.setattr(StateRow, "inputs_before", lambda *_: None),
    "a prompt's taps have no gradient": lambda p: p.setattr(
        StateRow, "inputs_before", lambda row, x, n: own_inputs(row, x.detach(), n)
    ),
    "a prompt's first chunk takes the state of the chunk before": lambda p: one_chunk(p, of_given=False),
    "a row's first chunk takes the state of the chunk before": lambda p: one_chunk(p, of_given=True),
    "rows continue other prompts": lambda p: of_states(p, lambda state: state.roll(1, 0)),
    "a prompt's state is forgotten": lambda p: of_states(p, torch.zeros_like),
    "a prompt's state has no gradient": lambda p: of_states(p, torch.Tensor.detach),
    "a prompt's gradient is counted G - 1 times": lambda p: of_states(p, lambda s: scaled_gradient(s, 0.5)),
}


def two_prompts(model: Any) -> dict[str, torch.Tensor]:
    """Two prompts of two rows each, of different lengths."""
    ids = torch.randint(3, model.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(6))
    ids[1, :14], ids[3, :10] = ids[0, :14], ids[2, :10]
    mask = torch.ones_like(ids)
    mask[1, 20:] = mask[2, 17:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", pytest.param("kimi_linear", marks=pytest.mark.full)])
def test_two_prompts(kind: str) -> None:
    model = hybrid(kind)
    saved = progress(compare(model, two_prompts(model), OPS, kind))
    assert (saved.live, saved.computed) == (85, 61)


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", pytest.param("kimi_linear", marks=pytest.mark.full)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid(kind)
    inputs = two_prompts(model)
    with apply_npu_kernels(model, ops=OPS):
        pass  # the proof, which would see it
    with FAULTS[fault](monkeypatch) or contextlib.nullcontext(), pytest.raises(AssertionError):
        compare(model, inputs, OPS, "planted")


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", pytest.param("kimi_linear", marks=pytest.mark.full)])
@pytest.mark.parametrize("fault", [one_segment, one_chunk])
def test_a_state_that_runs_on_is_seen(
    fault: Callable[[pytest.MonkeyPatch], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hybrid(kind)
    inputs = batch(model, "both", shared=False)
    with apply_npu_kernels(model, ops=OPS):
        pass
    with fault(monkeypatch), pytest.raises(AssertionError):
        compare(model, inputs, OPS, "planted")


def test_the_proof_sees_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_proofs", {})
    monkeypatch.setattr(StateRow, "inputs_before", leaking_inputs)
    with apply_npu_kernels(hybrid("lfm2"), ops=OPS) as kernels:
        (site,) = kernels.report().sites
    assert str(site.form) == "padding is computed by Lfm2Attention, Lfm2ShortConv"


# ---------------------------------------------------------------------------------------------------------------------
# Which functions are recognised
# ---------------------------------------------------------------------------------------------------------------------


def test_the_functions_of_transformers() -> None:
    form = state_forms.state_form
    assert form(qwen3_next.causal_conv1d_fn) == state_forms.StateForm("convolution")
    assert form(qwen3_next.torch_chunk_gated_delta_rule) == state_forms.StateForm("delta rule", 3)
    assert form(kimi_linear.chunk_kimi_delta_attention) == state_forms.StateForm("delta rule", 4)
    assert form(bamba.mamba2_chunk_scan) == state_forms.StateForm("scan")
    assert form(bamba.mamba2_split_conv1d_scan_combined) == state_forms.StateForm("shortcut")
    for other in (qwen3_next.causal_conv1d_update, qwen3_next.torch_recurrent_gated_delta_rule, bamba.rotate_half):
        assert form(other) is None


def causal_conv1d_fn(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """One tap too early."""
    out = inspect.unwrap(qwen3_next.causal_conv1d_fn)(hidden_states, weight, bias, activation)
    return functional.pad(out, (1, 0))[..., :-1]


def chunk_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    chunk_size: int = 64, initial_state: Any = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """A rule that forgets after 64 tokens."""
    own = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)
    parts = [
        own(*(t[:, i : i + 64] for t in (query, key, value, g, beta)), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        for i in range(0, query.shape[1], 64)
    ]
    return torch.cat([out for out, _ in parts], 1), None


def chunk_scan(
    hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int,
    D: Any = None, dt_bias: Any = None, initial_states: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """A scan whose steps have no limit."""
    own = inspect.unwrap(bamba.mamba2_chunk_scan)
    return own(hidden_states, dt, A, B, C, chunk_size, D, dt_bias, None, dt_softplus)


def split_conv1d_scan(zxbcdt: torch.Tensor, **kwargs: Any) -> Any:
    return zxbcdt


@pytest.mark.parametrize("function", [causal_conv1d_fn, chunk_rule, chunk_scan, split_conv1d_scan])
def test_nearly_the_same_is_not_recognised(function: Any) -> None:
    assert state_forms.state_form(function) is None


def carried(kind: str, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> list[str]:
    """The reasons of a batch's declined calls if a function of the model's file is changed after the patch."""
    model = hybrid(kind)
    inputs = batch(model, "both")
    module = inspect.getmodule(next(m for m in model.modules() if type(m).__name__ == MIXERS[kind]))
    with apply_npu_kernels(model, ops=OPS) as kernels:
        monkeypatch.setattr(module, name, change(getattr(module, name)))
        values(model, inputs)
        return [left.reason for left in kernels.report().declined]


def test_an_exchanged_function_is_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = carried("qwen3_next", monkeypatch, "causal_conv1d_fn", lambda own: lambda *args, **kw: own(*args, **kw))
    assert reasons == ["its causal_conv1d_fn has been exchanged"]


def test_another_forward_of_the_class_is_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("lfm2")
    kind: Any = next(type(m) for m in model.modules() if type(m).__name__ == "Lfm2ShortConv")
    with apply_npu_kernels(model, ops=OPS) as kernels:
        own = kind.forward
        monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: own(*args, **kwargs))
        values(model, batch(model, "both"))
        reasons = [left.reason for left in kernels.report().declined]
    assert len(reasons) == 1
    assert "Lfm2ShortConv" in reasons[0]


def test_arguments_that_are_not_covered() -> None:
    x, weight = torch.randn(1, 4, 6), torch.randn(4, 3)
    conv, rule, scan = (state_forms.StateForm(name, 3) for name in ("convolution", "delta rule", "scan"))
    with pytest.raises(state_forms.OtherCall, match=r"^activation='gelu'$"):
        state_forms.compute(conv, {"hidden_states": x, "weight": weight, "activation": "gelu"}, None)
    q = torch.randn(1, 6, 2, 4)
    gate = torch.zeros(1, 6, 2)
    given = {"query": q, "key": q, "value": q, "g": gate, "beta": gate}
    with pytest.raises(state_forms.OtherCall, match=r"^a state of its own$"):
        state_forms.compute(rule, {**given, "output_final_state": True}, None)
    steps = {"hidden_states": q, "dt": gate, "A": torch.zeros(2), "B": q, "C": q}
    with pytest.raises(state_forms.OtherCall, match=r"^a state of its own$"):
        state_forms.compute(scan, {**steps, "return_final_states": True}, None)
    with pytest.raises(state_forms.OtherCall, match=r"^cu_seqlens$"):
        state_forms.arguments_of(qwen3_next.torch_chunk_gated_delta_rule, (), {**given, "cu_seqlens": gate})


def test_a_module_that_is_not_given_its_layers_mask() -> None:
    model = hybrid("lfm2")
    with apply_npu_kernels(model, ops=OPS):
        mixer = next(layer.conv for layer in model.model.layers if hasattr(layer, "conv"))
        row = packing_for(model.model, model.model, Segments.make([2, 3], "cpu"), None)
        row.carries = True
        hidden = torch.randn(1, 5, model.config.hidden_size)
        with packed_row(row), pytest.raises(Unserved, match=r"^its Lfm2ShortConv is not given its layer's mask$"):
            mixer(hidden)
        mixer(hidden)


def test_a_state_of_another_kind_takes_no_packed_row() -> None:
    body = hybrid("recurrent_gemma").model
    assert proof._shown(body, "", small_config(body.config), mixes=False) == "state runs along its rows"


# ---------------------------------------------------------------------------------------------------------------------
# Where segments begin and go on
# ---------------------------------------------------------------------------------------------------------------------


def rows_with_prefixes() -> tuple[Segments, list[list[int]], list[tuple[int, int]]]:
    """The segments of a batch whose rows share prefixes at two depths; for each segment, the tokens of its prefix, and
    its begin and end."""
    ids = np.random.default_rng(3).integers(3, 50, (6, 40))
    ids[1, :30], ids[2, :30], ids[3, :12] = ids[0, :30], ids[0, :30], ids[0, :12]
    found = layout(ids, share=True)
    assert not isinstance(found, str)
    assert found.keys is not None
    keys = Shared.make(found.keys, len(found.places), "cpu")
    segments = Segments.make(found.lengths, "cpu", found.key_lengths, keys)
    prefixes, spans, begin, at = [], [], 0, 0
    for queries, of_keys in zip(found.lengths, found.key_lengths, strict=True):
        prefixes.append(found.keys[at : at + of_keys - queries].tolist())
        spans.append((begin, begin + queries))
        begin, at = begin + queries, at + of_keys
    assert {len(p) for p in prefixes} >= {0, 12, 30}
    return segments, prefixes, spans


def test_inputs_before_segments() -> None:
    segments, prefixes, _ = rows_with_prefixes()
    row = StateRow(segments)
    x = torch.randn(1, 5, segments.q_ends[-1])
    found = row.inputs_before(x, 3)
    assert found is not None
    for i, prefix in enumerate(prefixes):
        expected = functional.pad(x[0][:, prefix[-3:]], (3 - min(3, len(prefix)), 0))
        assert torch.equal(found[i], expected)
    assert StateRow(Segments.make([2, 3], "cpu")).inputs_before(x, 3) is None


def test_states_go_on_where_their_prefix_ends() -> None:
    """With a state that adds up, each token's result is the sum of all tokens of its row up to it."""
    segments, prefixes, spans = rows_with_prefixes()
    x = torch.arange(1.0, segments.q_ends[-1] + 1)[None, :, None].double()

    def carry(given: Any, inside: Segments, state: Any, ends: bool) -> Any:
        parts = given[0][0].split([q for q, _ in inside.lengths])
        begins = [0.0] * len(parts) if state is None else state.flatten().tolist()
        sums = [part.cumsum(0) + begin for part, begin in zip(parts, begins, strict=True)]
        return torch.cat(sums)[None], torch.stack([each[-1] for each in sums])

    found = StateRow(segments).run(carry, x)
    for prefix, (begin, end) in zip(prefixes, spans, strict=True):
        for t in range(begin, end):
            assert found[0, t, 0] == x[0, [*prefix, *range(begin, t + 1)]].sum()


def test_who_is_prepared() -> None:
    model = hybrid("jamba")
    body = model.model
    undo = Undo()
    before = [type(module) for module in body.modules()]
    assert {kind.__name__ for kind in states.carry_by_segments(body, undo)} == {"JambaMambaMixer"}
    now = [type(module) for module in body.modules()]
    states.carry_by_segments(body, undo)
    assert [type(module) for module in body.modules()] == now != before
    undo.restore()
    assert [type(module) for module in body.modules()] == before
    plain = model_class("causal", "llama")(tiny_config("causal", "llama"))
    assert states.carry_by_segments(plain.model, undo) == frozenset()
