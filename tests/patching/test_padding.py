"""Nothing is computed for padding, and what rows begin with alike once: loss and gradients stay what they are."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from tests.closeness import assert_as_close, rounded
from tests.models import FAMILIES, HAS_TRL_HEAD, SMALL, in_double, small_model
from tests.pairs import pairs

OP = "varlen_attention"
_WIDTH = 28
# side -> (first column, column after the last) of each row; one row has no live token, one has one.
SIDES: dict[str, tuple[tuple[int, int], ...]] = {
    "left": ((0, 28), (9, 28), (9, 28), (27, 28), (28, 28), (19, 28)),
    "right": ((0, 28), (0, 17), (0, 21), (0, 1), (0, 0), (0, 24)),
    "both": ((4, 28), (4, 23), (4, 17), (9, 10), (3, 3), (0, 25)),
}
# What differs from the defaults: a window that is shorter than the rows, a cap that scores reach, an auxiliary loss
# that counts.
_OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "attn_logit_softcapping": 0.5},
    "gemma3": {"sliding_window": 9},
    "qwen3-moe": {"router_aux_loss_coef": 1.0},
}


def padded(side: str, shared: bool) -> dict[str, torch.Tensor]:
    """Ids, mask and labels; with `shared`, rows 0 to 2 begin alike where they begin at the same column, two of them for
    longer than the third. Some labels in the middle are ignored."""
    generator = torch.Generator().manual_seed(7)
    rows = SIDES[side]
    ids = torch.randint(3, SMALL["vocab_size"], (len(rows), _WIDTH), generator=generator)
    mask = torch.zeros_like(ids)
    for b, (begin, end) in enumerate(rows):
        mask[b, begin:end] = 1
    if shared:
        for a, b, count in ((0, 1, 17), (0, 2, 8), (1, 2, 8)):
            if rows[a][0] == rows[b][0]:
                ids[b, rows[b][0] :][:count] = ids[a, rows[a][0] :][:count]
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 12:14] = -100
    # The place before the first token is padding, which predicts nothing.
    for b, (begin, end) in enumerate(rows):
        if begin < end:
            labels[b, begin] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def live_and_distinct(inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The live tokens of a batch, and how many of them are left where rows that begin alike are counted once."""
    ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
    rows = [[(c, t) for c, (t, m) in enumerate(zip(*row, strict=True)) if m] for row in zip(ids, mask, strict=True)]
    return sum(map(len, rows)), len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


def values(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Loss, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": out.loss.detach(), **grads}


def made(family: str, dtype: torch.dtype, attention: str) -> Any:
    model = small_model(family, attn_implementation=attention, **_OPTIONS.get(family, {}))
    return model.to(dtype)


def compare(model: Any, inputs: dict[str, torch.Tensor], ops: tuple[str, ...] | None, what: str, **more: Any) -> Any:
    """The report of a step under these ops, which by the rule is the model's own."""
    expected, moved, truth = references(model, inputs)
    with apply_npu_kernels(model, ops=ops, **more) as kernels:
        actual = values(model, inputs)
        report = kernels.report()
    assert actual.keys() == truth.keys()
    for name, exact in truth.items():
        given = actual[name]
        assert (given is None) == (exact is None), f"{what} {name}"
        if given is not None:
            assert_as_close(given, expected[name], exact, f"{what} {name}", [m[name] for m in moved])
    return report


def references(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any, Any]:
    """Of the unpatched model: its step in its dtype, what rounding makes of it, and the truth."""
    exact = copy.deepcopy(model).double()
    with in_double():
        truth = values(exact, inputs)
    return values(model, inputs), rounded(lambda: values(model, inputs)), truth


def progress(report: Any) -> Any:
    """What the patch says of the batches that it packed."""
    (site,) = (site for site in report.sites if site.op == OP)
    return site.progress


CASES = [
    (family, attention)
    for family in FAMILIES
    for attention in ("sdpa", "eager")
    # State runs along the rows of the one; transformers has no other attention for the others: the scores of one are
    # capped, the other has sinks.
    if family != "mamba2" and (attention == "eager" or family not in ("gemma2", "gpt-oss"))
]


@pytest.mark.parametrize(
    ("case", "side", "dtype", "shared"),
    pairs(CASES, list(SIDES), [torch.float32, torch.bfloat16], [False, True]),
    ids=str,
)
def test_a_padded_batch_is_the_models_own(case, side, dtype, shared):
    family, attention = case
    model, inputs = made(family, dtype, attention), padded(side, shared)
    live, distinct = live_and_distinct(inputs)
    assert (live > distinct) == shared
    for name, ops in (("alone", (OP,)), ("with all ops", tuple(PATCHES))):
        report = compare(model, inputs, ops, f"{family} {name}")
        assert report.ran[OP] == 1
        assert not [each for each in report.declined if each.op == OP]
        counted = progress(report)
        assert (counted.positions, counted.live) == (inputs["input_ids"].numel(), live)
        assert counted.computed == distinct


def test_a_batch_without_padding_whose_rows_begin_alike():
    """There is nothing to drop, and still something to save."""
    model, inputs = made("qwen3", torch.float32, "sdpa"), padded("both", True)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    inputs["input_ids"][1:, :15] = inputs["input_ids"][0, :15]
    inputs["labels"] = inputs["input_ids"]
    report = compare(model, inputs, (OP,), "qwen3")
    assert (progress(report).live, progress(report).computed) == (6 * _WIDTH, 15 + 6 * (_WIDTH - 15))


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_checkpointed_layers_attend_by_segments_again(family, reentrant, shared):
    """The same bits, and the configuration is what it was while they are computed once more."""
    model, inputs = made(family, torch.float32, "eager"), padded("both", shared)
    if reentrant:  # its first forward is without gradients, and so are the routers' logits that a loss reads
        model.config.output_router_logits = False
    with apply_npu_kernels(model, ops=[OP]):
        expected = values(model, inputs)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = values(model, inputs)
        assert model.config._attn_implementation == "eager"
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def test_two_steps_whose_layers_are_computed_again_later():
    """The second forward is over before the first backward begins: what belongs to a row travels with it."""
    model = made("gemma3", torch.float32, "eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [padded("both", True), padded("right", False)]
    with apply_npu_kernels(model, ops=[OP]):
        each = []
        for inputs in batches:
            each.append(values(model, inputs))
        model.zero_grad(set_to_none=True)
        losses = [model(**inputs, use_cache=False).loss for inputs in batches]
        losses[1].backward()
        assert all(torch.equal(p.grad, each[1][name]) for name, p in model.named_parameters())
        model.zero_grad(set_to_none=True)
        losses[0].backward()
        assert all(torch.equal(p.grad, each[0][name]) for name, p in model.named_parameters())


def test_the_same_step_gives_the_same_bits():
    model, inputs = made("qwen3", torch.bfloat16, "sdpa"), padded("right", True)
    with apply_npu_kernels(model, ops=[OP]):
        first, second = values(model, inputs), values(model, inputs)
    assert all(torch.equal(first[name], value) for name, value in second.items())


@pytest.mark.parametrize("side", SIDES)
def test_hidden_states_have_the_shape_of_the_batch_and_padding_is_zero(side):
    model, inputs = made("llama", torch.float32, "sdpa").model.eval(), padded(side, True)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    live = inputs["attention_mask"].bool()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        expected = plain(**given, use_cache=False).last_hidden_state
        truth = copy.deepcopy(model).double()(**given, use_cache=False).last_hidden_state
        with apply_npu_kernels(model, ops=[OP]) as kernels:
            out = model(**given, use_cache=False)
            as_tuple = model(**given, use_cache=False, return_dict=False)
        assert kernels.report().ran[OP] == 2
    assert list(out) == ["last_hidden_state"]
    assert out.last_hidden_state.shape == expected.shape
    assert not out.last_hidden_state[~live].any()

    @torch.no_grad()
    def again() -> torch.Tensor:
        return plain(**given, use_cache=False).last_hidden_state[live]

    assert_as_close(out.last_hidden_state[live], expected[live], truth[live], side, lambda: rounded(again))
    assert torch.equal(as_tuple[0], out.last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_every_dtype(dtype):
    model, inputs = made("llama", torch.float32, "sdpa"), padded("both", True)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        expected = values(model, inputs)
        found = values(model, {**inputs, "attention_mask": inputs["attention_mask"].to(dtype)})
        assert kernels.report().ran[OP] == 2
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_positions_that_are_given(family):
    """Others than the model's own, and different in each row: of a shared beginning they are the same."""
    model, inputs = made(family, torch.float32, "eager"), padded("both", True)
    counted = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    report = compare(model, {**inputs, "position_ids": counted}, (OP,), family)
    assert report.ran[OP] == 1
    one_row = torch.arange(_WIDTH).unsqueeze(0) + 3
    report = compare(model, {**inputs, "position_ids": one_row}, (OP,), family)
    assert report.ran[OP] == 1


def test_positions_that_differ_where_rows_begin_alike():
    """The same tokens at the same columns are no common beginning where they are said to stand somewhere else."""
    model, inputs = made("llama", torch.float32, "eager"), padded("both", True)
    positions = torch.arange(_WIDTH) + 5 * torch.arange(len(inputs["input_ids"])).unsqueeze(1)
    # Rotations see distances alone: a step in the middle of a row changes one.
    positions[1, 8:] += 4
    compare(model, {**inputs, "position_ids": positions}, (OP,), "llama")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_embeddings_that_are_given_get_their_gradient(family):
    model, inputs = made(family, torch.float32, "eager"), padded("both", True)
    ids = inputs.pop("input_ids")
    exact = copy.deepcopy(model).double()

    def gradient(of: Any) -> torch.Tensor:
        embedded = of.get_input_embeddings()(ids).detach().requires_grad_()
        of(inputs_embeds=embedded, **inputs, use_cache=False).loss.backward()
        return embedded.grad

    with in_double():
        truth = gradient(exact)
    expected, moved = gradient(model), rounded(lambda: gradient(model))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = gradient(model)
        counted = progress(kernels.report())
    assert counted.computed == counted.live  # there are no ids to compare
    assert_as_close(found, expected, truth, family, moved)


@pytest.mark.parametrize("side", SIDES)
def test_a_sequence_is_classified_by_its_last_token(side):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_labels=3)
    model = transformers.LlamaForSequenceClassification(config).train()
    # It finds that token by the id of padding, and a row without any would have none.
    whole = padded(side, True)
    inputs = {name: value[whole["attention_mask"].any(1)] for name, value in whole.items()}
    inputs["input_ids"] *= inputs["attention_mask"]
    inputs["labels"] = torch.tensor([0, 2, 1, 1, 0])
    report = compare(model, inputs, (OP,), side)
    assert report.ran[OP] == 1


def test_frozen_weights_with_adapters():
    from peft import LoraConfig, get_peft_model

    inputs = padded("both", True)
    model = get_peft_model(made("qwen3", torch.float32, "sdpa"), LoraConfig(target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    report = compare(model, inputs, (OP,), "LoRA")
    assert report.ran[OP] == 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_autocast(family):
    # Weights that autocast does not round: the truth is of the same ones.
    model, inputs = made(family, torch.bfloat16, "eager").float(), padded("both", True)

    def step(of: Any) -> dict[str, torch.Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            return values(of, inputs)

    with in_double():
        truth = values(copy.deepcopy(model).double(), inputs)
    expected, moved = step(model), rounded(lambda: step(model))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = step(model)
        assert kernels.report().ran[OP] == 1
    for name, exact in truth.items():
        assert_as_close(found[name], expected[name], exact, name, [m[name] for m in moved])


@pytest.mark.skipif(not HAS_TRL_HEAD, reason="TRL has no head of its own before 1.15")
@pytest.mark.parametrize("side", SIDES)
def test_log_probabilities_of_trls_head(side):
    """Scored without gradients, as old and reference log-probabilities are, and with them."""
    from trl.trainer.utils import add_fused_lm_head

    model, inputs = made("qwen3", torch.float32, "sdpa"), padded(side, True)
    add_fused_lm_head(model)
    inputs["fused_lm_head"] = True
    report = compare(model, inputs, tuple(PATCHES), side)
    assert report.ran[OP] == 1
    assert report.ran["linear_logprob"] == 1


def test_the_host_waits_for_the_device_once_a_forward():
    """What it needs to know is asked for with one copy; layers and attention ask for nothing."""
    waits = {getattr(torch.Tensor, name): name for name in (
        "cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
    )}  # fmt: skip

    class Count(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in waits:
                seen.append(waits[func])
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    model, inputs = made("llama", torch.float32, "eager"), padded("both", True)
    del inputs["labels"]
    with apply_npu_kernels(model.model, ops=[OP]) as kernels, Count():
        model.model(**inputs, use_cache=False)
        assert kernels.report().ran[OP] == 1
    # The copy is on the host then, and `numpy` is another view of it.
    assert seen == ["cpu", "numpy"]


def test_what_the_report_says():
    model, inputs = made("llama", torch.float32, "sdpa"), padded("both", True)
    live, distinct = live_and_distinct(inputs)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        values(model, inputs)
        values(model, inputs)
        text = str(kernels.report())
        assert kernels.live_tokens == 2 * live
    share = f"{live / inputs['input_ids'].numel():.0%} of the positions were live"
    assert f"{share}, {1 - distinct / live:.0%} of their tokens saved by shared beginnings" in text
    assert "2 calls" in text
