"""Captured decoder layers: equal to the bit to the layers' own code, in all dtypes, modes and states of parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.body import batch as batch_module
from npu_trainer_kernels.patching.layers import bucket, layer_capture
from tests.closeness import assert_as_close, rounded
from tests.models import small_model
from tests.patching.captured import FULL, PADDED, Twins, full, llama_twins, lora_twins, rows
from tests.patching.padded import Batch, loss_of, of_transformers, values

MORE_LIVE, FEW_LIVE = rows(30, 10, 15, 9), rows(12, 12, 13, 12, seed=4)

# ---------------------------------------------------------------------------------------------------------------------
# Families and dtypes
# ---------------------------------------------------------------------------------------------------------------------

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DENSE = {"llama": {}, "qwen3": {}, "gemma3": WINDOWS, "phi3": {}, "cohere": {}}


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize("family", DENSE)
def test_families_have_the_same_bits(family: str, batches: tuple[Batch, ...]) -> None:
    twins = Twins(small_model(family, **DENSE[family]))
    twins.steps(batches)
    assert twins.replayed == 2 * (len(batches) - 1), str(twins.layers)
    assert not twins.reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_dtypes_have_the_same_bits(dtype: torch.dtype, batches: tuple[Batch, ...]) -> None:
    twins = Twins(small_model("qwen3").to(dtype))
    twins.steps(batches)
    assert twins.replayed == 2 * (len(batches) - 1), str(twins.layers)


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_sinks(batches: tuple[Batch, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS with the first expert for all tokens, since its experts choose tokens on the host."""

    def forward(experts: Any, hidden: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = experts.gate_up_proj[0], experts.down_proj[0]
        return (hidden @ up[:, : down.shape[0]]).relu() @ down * weights.sum(-1, keepdim=True)

    monkeypatch.setattr(modeling_gpt_oss.GptOssExperts, "forward", forward)
    twins = Twins(small_model("gpt-oss", sliding_window=6), ops=["varlen_attention", "rms_norm"])
    twins.steps(batches)
    if batches is PADDED:
        assert twins.replayed == 6, str(twins.layers)
        assert all(layer.self_attn.sinks.grad.any() for layer in twins.model.model.layers)
    else:
        assert twins.replayed, str(twins.layers)


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_experts_that_choose_on_the_host_are_declined(family: str) -> None:
    twins = Twins(small_model(family, output_router_logits=False))
    twins.steps(PADDED)
    assert twins.replayed == 0
    assert all(reason.startswith("it reads numbers of the device on the host (") for reason in twins.reasons)
    assert twins.reasons


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_bucket_is_close_to_the_plain_model(family: str) -> None:
    model = small_model(family, **DENSE[family])
    plain, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    apply_npu_kernels(model, backend="torch", capture="on")
    for batch in PADDED[:3]:
        found = values(model, batch, loss_of)
    exact = values(truth, batch, loss_of)
    expected, *moved = values(plain, batch, loss_of), *rounded(lambda: values(plain, batch, loss_of))
    for name, value in found.items():
        assert_as_close(value, expected[name], exact[name], name, [m[name] for m in moved])


# ---------------------------------------------------------------------------------------------------------------------
# Buckets
# ---------------------------------------------------------------------------------------------------------------------


def test_buckets_waste_little_and_are_monotone() -> None:
    found = [bucket(n) for n in range(1, 16385)]
    assert all(n <= b for n, b in enumerate(found, 1))
    assert found == sorted(found)
    assert all(bucket(b) == b for b in set(found))
    waste = [b / n - 1 for n, b in enumerate(found, 1) if n >= 128]
    assert sum(waste) / len(waste) <= 0.03


def test_padding_of_a_bucket_is_in_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = batch_module.packing_for

    def packing_for(*args: Any) -> Any:
        packing = original(*args)
        seen.append((packing.tokens, packing.live, packing.segments.q_ends[-1]))
        return packing

    monkeypatch.setattr(batch_module, "packing_for", packing_for)
    twins = llama_twins()
    seen.clear()  # the proof of the class, if no test has made it before
    twins.model(**PADDED[0])
    assert seen == [(64, 60, 60)]


def test_a_stale_tail_is_not_read() -> None:
    twins = llama_twins()
    twins.steps([MORE_LIVE, MORE_LIVE, FEW_LIVE, MORE_LIVE, FEW_LIVE, PADDED[0]])
    assert twins.replayed == 10


def test_layers_that_change_are_captured_anew_in_their_order() -> None:
    twins = llama_twins()
    twins.steps(FULL)
    for model in twins.both:
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(80, 48) / 50)
    before = twins.replayed
    twins.steps((*FULL, *FULL))
    assert twins.replayed == before + 11  # all but two forwards, and a layer of the first one
    for weight in range(3, 7):
        for model in twins.both:
            model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(80, 48) / weight / 20)
        twins.steps(FULL)
    assert twins.reasons == {"its layers were captured 3 times, and differ each time"}


def test_the_longest_unused_bucket_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = llama_twins()
    one, two, three = (full(2, length) for length in (12, 14, 16))
    twins.steps([one, one])
    graphs = twins.layers.as_dict()["graphs"]
    monkeypatch.setattr(layer_capture, "_MOST_GRAPHS", 2 * graphs)
    twins.steps([two, two, one])
    assert twins.layers.as_dict()["buckets"] == 2
    twins.steps([three, three])
    (mode,) = (mode for mode in twins.layers._modes.values() if mode.keeps)
    assert [shape[:2] for shape, *_ in mode.buckets] == [(2, 12), (2, 16)]
    before = twins.replayed
    twins.steps([one, three, two, two, one])
    assert twins.replayed == before + 6  # one and three, and two when it is captured again


def test_numbers_of_tokens_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = llama_twins()
    monkeypatch.setattr(layer_capture, "_MOST_BUCKETS", 3)
    twins.steps([full(2, 12), full(2, 12), *(full(2, length) for length in (14, 16, 18))])
    (mode,) = (mode for mode in twins.layers._modes.values() if mode.keeps)
    assert [shape[:2] for shape, *_ in mode.buckets] == [(2, 14), (2, 16), (2, 18)]
    before = twins.replayed
    twins.steps([full(2, 12), full(2, 12)])
    assert twins.replayed == before + 2


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and autocast
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant: bool, batches: tuple[Batch, ...]) -> None:
    twins = llama_twins(of_transformers(reentrant))
    twins.steps(batches)
    assert twins.replayed == 2 * 2 * 3, str(twins.layers)
    assert not twins.reasons


def test_checkpointed_layers_may_run_forward_twice_before_a_backward() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        return loss_of(model, batch) + loss_of(model, PADDED[3])

    twins = llama_twins(of_transformers(False))
    twins.steps(PADDED[:3], step)
    assert twins.replayed > 12


def under_autocast(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


@pytest.mark.parametrize("prepare", [None, of_transformers(True), of_transformers(False)])
@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_autocast(batches: tuple[Batch, ...], prepare: Any) -> None:
    twins = llama_twins(prepare)
    twins.steps(batches, under_autocast)
    assert twins.replayed == (6 if prepare is None else 12), str(twins.layers)


def test_autocast_that_ends_after_the_capture() -> None:
    twins = llama_twins()
    twins.steps(PADDED, under_autocast)
    before = twins.replayed
    twins.steps(PADDED)
    assert twins.replayed == before + 6
    twins.steps(PADDED, under_autocast)


# ---------------------------------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"], ["gate_proj", "up_proj", "o_proj"]])
@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_lora(targets: list[str], batches: tuple[Batch, ...]) -> None:
    twins = lora_twins(targets)
    twins.steps(batches)
    assert twins.replayed == 6, str(twins.layers)


def test_lora_with_dropout_is_declined() -> None:
    twins = lora_twins(["q_proj"], lora_dropout=0.1)
    twins.steps(FULL)
    assert twins.replayed == 0
    assert {reason.partition(" (")[0] for reason in twins.reasons} == {"it draws random numbers"}


def test_adapters_that_are_switched_off_and_merged_after_the_capture() -> None:
    twins = lora_twins(["q_proj", "down_proj"])
    twins.steps(FULL)

    def without(model: Any, batch: Batch) -> torch.Tensor:
        with model.disable_adapter(), torch.no_grad():
            plain = loss_of(model, batch)
        return loss_of(model, batch) * plain

    twins.steps(FULL, without)
    for model in twins.both:
        model.merge_adapter()
    with torch.no_grad():
        for batch in FULL:
            assert torch.equal(*(loss_of(model, batch) for model in twins.both))
    for model in twins.both:
        model.unmerge_adapter()
    before = twins.replayed
    twins.steps(FULL)
    assert twins.replayed > before


def test_frozen_parameters_and_one_that_is_trained_later() -> None:
    def freeze(model: Any) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(True)

    twins = llama_twins(freeze)
    twins.steps(PADDED)
    assert twins.replayed == 6, str(twins.layers)
    for model in twins.both:
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    twins.steps(PADDED)
    for model in twins.both:
        assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
        model.model.layers[1].requires_grad_(False)
    twins.steps(PADDED)
    assert not twins.reasons


def test_frozen_first_layers_are_replayed_while_an_earlier_loss_is_kept() -> None:
    twins = llama_twins(lambda model: model.model.layers[0].requires_grad_(False) and model.model.embed_tokens
                        .requires_grad_(False) and None)  # fmt: skip
    for batch in FULL:
        twins.model.zero_grad()
        loss = loss_of(twins.model, batch)
        loss.backward()  # its nodes of autograd live on while the next forward runs
    assert twins.replayed == 6, str(twins.layers)
    twins.steps(FULL)


def test_weights_that_are_loaded_in_place_are_replayed() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    state = small_model("llama", seed=1).state_dict()
    for model in twins.both:
        model.load_state_dict(state)
    before = twins.replayed
    twins.steps(PADDED)
    assert twins.replayed == before + 8


def test_weights_that_are_exchanged_are_not_those_of_the_capture() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    torch.manual_seed(7)
    new = torch.randn(48, 64) / 7
    for model in twins.both:
        model.model.layers[1].self_attn.o_proj.weight = nn.Parameter(new.clone())
    before = twins.replayed
    twins.steps(PADDED)
    assert twins.replayed == before + 4 + 3
    for model in twins.both:
        model.model.layers[0].self_attn.o_proj.weight.data = new.clone()  # the same parameter elsewhere
    twins.steps(PADDED)


def test_modules_and_functions_that_are_exchanged_are_not_those_of_the_capture() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(48, 64), nn.Linear(64, 48)
            self.act = nn.functional.relu
            self.options = {"scales": [2.0]}

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.down(self.act(self.up(hidden))) * self.options["scales"][0]

    model = small_model("llama")
    model.model.layers[0].mlp = Mlp()
    twins = Twins(model)
    twins.steps(FULL)
    for each in twins.both:
        each.model.layers[0].mlp.act = nn.functional.gelu
    twins.steps(FULL)
    for each in twins.both:
        each.model.layers[0].mlp.options["scales"][0] = 3.0
    twins.steps(FULL)
    for each in twins.both:
        each.model.layers[0].mlp.act = nn.functional.relu
        each.model.layers[1].mlp = nn.Linear(48, 48, bias=False)
        nn.init.eye_(each.model.layers[1].mlp.weight)
    twins.steps(FULL)


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_another_attention_after_the_capture(batches: tuple[Batch, ...]) -> None:
    twins = Twins(small_model("llama"), ops=["rms_norm"])  # with masks, and without a packed body
    twins.steps(batches)
    assert twins.replayed == 6
    for model in twins.both:
        model.set_attn_implementation("eager")
    twins.steps(batches)
    before = twins.replayed
    for model in twins.both:
        model.set_attn_implementation("sdpa")
    twins.steps((*batches, *batches))
    assert twins.replayed > before
    assert not twins.reasons


def test_tied_weights() -> None:
    twins = Twins(small_model("llama-tied"))
    twins.steps(PADDED)
    assert twins.replayed == 6
    model = small_model("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    twins = Twins(model)
    twins.steps(PADDED)
    assert twins.replayed == 0
    assert twins.reasons == {"other modules share parameters with it"}


def test_gradient_hooks_on_parameters() -> None:
    def hook(model: Any) -> None:
        model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * 2)

    def scale(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(5)

    twins = llama_twins(hook)
    twins.steps(PADDED)
    assert twins.reasons == {"a parameter of it has a hook"}
    for model in twins.both:
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad * 3)
        model.model.layers[1].mlp.down_proj.weight.register_post_accumulate_grad_hook(scale)
    before = twins.replayed
    twins.steps(PADDED)
    assert twins.replayed == before + 4
