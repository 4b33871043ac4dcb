"""Captured decoder layers: equal to the bit to the layers' own code, or left to it with the reason."""

import copy
import functools
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError
from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.capture import pieces as pieces_module
from npu_trainer_kernels.capture import recording_now
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.body import batch as batch_module
from npu_trainer_kernels.patching.layers import LayerCapture, bucket, check_capture, layer_capture, layer_state
from npu_trainer_kernels.patching.layers.device_waits import DeviceWaits
from npu_trainer_kernels.patching.undo import Undo
from tests.closeness import assert_as_close, rounded
from tests.models import small_model
from tests.patching.captured import FULL, PADDED, Outcome, Twins, assert_same, full, llama_twins, rows
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


def lora_twins(targets: list[str], **options: Any) -> Twins:
    config = LoraConfig(target_modules=targets, r=4, init_lora_weights=False, **options)
    return Twins(get_peft_model(small_model("llama"), config).train())


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
    assert twins.reasons == {"other modules have parameters of it, too"}


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


# ---------------------------------------------------------------------------------------------------------------------
# Forwards and backwards in any order
# ---------------------------------------------------------------------------------------------------------------------


def test_gradients_accumulate_over_micro_batches() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        for each in PADDED[:3]:
            loss_of(model, each).backward()
        return loss_of(model, batch)

    twins = llama_twins()
    twins.steps(PADDED, step)
    assert twins.replayed == 2 * 15


def test_two_forwards_before_a_backward() -> None:
    twins = llama_twins()
    twins.steps(PADDED, lambda model, batch: loss_of(model, batch) * loss_of(model, PADDED[1]))
    twins.steps(PADDED, lambda model, batch: loss_of(model, batch) + loss_of(model, rows(30, 30, 30)))
    assert twins.reasons == {"another forward awaits its backward"}
    assert twins.replayed > 0


def test_the_first_of_two_forwards_goes_back_last() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss_of(model, PADDED[1]).backward()
        return loss

    twins = llama_twins()
    twins.steps(PADDED, step)


def test_two_backwards_of_one_forward() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        return loss

    twins = llama_twins()
    twins.steps(PADDED, step)
    assert twins.replayed == 6


def test_a_backward_of_what_was_overwritten_raises() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    first = loss_of(twins.model, PADDED[0])
    first.backward(retain_graph=True)
    loss_of(twins.model, PADDED[1])
    with pytest.raises(RuntimeError, match="ran forward again before the backward of an earlier forward"):
        first.backward()


@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.q_proj"])
def test_a_forward_after_a_part_of_a_backward(name: str) -> None:
    """The gradient of the last layer alone is asked for, which must stay as it is until the rest of the backward."""

    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        weight = model.model.layers[1].get_submodule(name).weight
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        other = loss_of(model, PADDED[1])
        return loss + other * grad.norm()

    twins = llama_twins()
    twins.steps(PADDED, step)
    expected = {"another forward awaits its backward"}
    if name == "self_attn.q_proj":
        expected.add("its arguments are others than those of the layers before it")
    assert twins.reasons == expected


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_evaluation_between_forward_and_backward(batches: tuple[Batch, ...]) -> None:
    seen: list[torch.Tensor] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        with torch.no_grad():
            seen.append(model(**batches[0]).logits)
        return loss

    twins = llama_twins()
    twins.steps(batches, step)
    assert twins.replayed == 12
    for found, expected in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(found, expected)


def test_inference_mode() -> None:
    twins = llama_twins()
    twins.steps(FULL[:2])
    for batch in FULL:
        with torch.inference_mode():
            found, expected = (model(**batch).logits for model in twins.both)
        assert torch.equal(found, expected)
    assert twins.reasons == {"inference mode is on"}
    with torch.no_grad():
        for batch in FULL:
            assert torch.equal(*(model(**batch).logits for model in twins.both))
    twins.steps(FULL)


def test_generation_between_steps() -> None:
    twins = llama_twins()
    twins.steps(FULL[:2])
    prompt = {"input_ids": FULL[0]["input_ids"], "max_new_tokens": 4, "do_sample": False}
    found, expected = (model.generate(**prompt) for model in twins.both)
    assert torch.equal(found, expected)
    before = twins.replayed
    twins.steps(FULL)
    assert twins.replayed == before + 8


def test_evaluation_mode_and_cached_forwards() -> None:
    twins = llama_twins()
    twins.steps(FULL)
    for model in twins.both:
        model.eval()
    with torch.no_grad():
        for batch in FULL:
            assert torch.equal(*(model(**{**batch, "use_cache": True}).logits for model in twins.both))
    assert twins.reasons == {"it is given past_key_values of type DynamicCache"}
    before = twins.replayed
    twins.steps(FULL)
    assert twins.replayed == before + 6
    for model in twins.both:
        model.train()
    twins.steps(FULL)
    assert twins.replayed == before + 14


def test_steps_of_an_optimizer() -> None:
    twins = llama_twins()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in twins.both]
    for batch in (*PADDED, *PADDED):
        twins.steps([batch])
        for optimizer in optimizers:
            optimizer.step()
    found, expected = (dict(model.named_parameters()) for model in twins.both)
    assert_same(found, expected)
    assert twins.replayed == 14


def test_embeddings_as_inputs() -> None:
    grads: list[torch.Tensor] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        loss = model(**{**batch, "input_ids": None, "inputs_embeds": embedded}).loss
        grads.append(torch.autograd.grad(loss, embedded, retain_graph=True)[0])
        return loss

    twins = llama_twins()
    twins.steps(FULL, step)
    twins.steps(PADDED, step)
    for found, expected in zip(grads[::2], grads[1::2], strict=True):
        assert torch.equal(found, expected)
    assert twins.replayed == 12


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_second_derivatives_raise(batches: tuple[Batch, ...]) -> None:
    twins = Twins(small_model("llama"), ops=["rms_norm"])
    twins.steps(batches)
    for wanted in (twins.model.model.layers[0].mlp.up_proj.weight, twins.model.model.embed_tokens.weight):
        loss = loss_of(twins.model, batches[0])
        (grad,) = torch.autograd.grad(loss, wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            grad.square().sum().backward()


def test_second_derivatives_of_a_layer_alone_raise() -> None:
    twins = Twins(small_model("llama"), ops=["rms_norm"])
    body = twins.model.model
    for _ in range(3):
        hidden = torch.randn(2, 12, 48, requires_grad=True)
        places = body.rotary_emb(hidden, torch.arange(12)[None])
        out = body.layers[0](hidden, position_embeddings=places, attention_mask=None, position_ids=None)
        (grad,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
    assert twins.replayed == 2
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.square().sum(), body.layers[0].mlp.up_proj.weight)


def test_functional_calls_have_the_gradients_of_what_they_are_given() -> None:
    twins = llama_twins()
    twins.steps(FULL)
    batch = {k: v for k, v in FULL[0].items() if k != "labels"}

    def computed(model: Any) -> torch.Tensor:
        given = {name: (p.detach() * 1.01).requires_grad_() for name, p in model.named_parameters()}
        for _ in range(3):
            out = torch.func.functional_call(model, given, (), batch).logits.square().sum()
        name = "model.layers.0.mlp.up_proj.weight"
        return torch.autograd.grad(out, given[name])[0]

    assert torch.equal(*(computed(model) for model in twins.both))

    def transformed(model: Any) -> torch.Tensor:
        own = dict(model.named_parameters())
        name = "model.layers.0.mlp.up_proj.weight"

        def of(weight: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, {**own, name: weight}, (), batch).logits.square().sum()

        return torch.func.grad(of)(own[name].detach())

    assert torch.equal(*(transformed(model) for model in twins.both))


# ---------------------------------------------------------------------------------------------------------------------
# Hooks and outputs
# ---------------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_asked_for() -> None:
    kept: list[tuple[torch.Tensor, ...]] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch, output_hidden_states=True)
        kept.append(out.hidden_states)
        return out.loss + sum(h.mean() for h in out.hidden_states)

    twins = llama_twins()
    twins.steps(FULL)
    twins.steps(FULL, step)
    assert twins.reasons == {"hidden states are asked for"}
    for found, expected in zip(kept[::2], kept[1::2], strict=True):
        assert all(map(torch.equal, found, expected))
    before = twins.replayed
    twins.steps((*FULL, *FULL))
    assert twins.replayed > before + 4  # with the hooks of transformers, which do nothing now


def test_hidden_states_that_a_model_collects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = llama_twins()
    twins.steps(FULL)
    monkeypatch.setattr(layer_capture, "collected_outputs", lambda: None)
    before = twins.replayed
    twins.steps(FULL, lambda model, batch: model(**batch, output_hidden_states=True).loss)
    assert twins.replayed == before
    assert twins.reasons == {"hidden states are asked for"}
    monkeypatch.setattr(twins.model.config, "output_hidden_states", True)
    twins.model(**FULL[0])
    assert twins.replayed == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_hidden_states_are_asked_for_of_checkpointed_layers(reentrant: bool) -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        return model(**batch, output_hidden_states=True).loss

    twins = llama_twins(of_transformers(reentrant))
    twins.steps(FULL)
    twins.steps(FULL, step)
    assert "hidden states are asked for" in twins.reasons
    twins.steps(FULL)


# The op of experts reads numbers on the host on a CPU.
WITHOUT_EXPERTS = [op for op in PATCHES if op != "moe_experts"]


def batched_mixture() -> Any:
    """Returns a mixture whose experts are products of all tokens, with a loss of its router."""
    return small_model("qwen3-moe", experts_implementation="batched_mm", router_aux_loss_coef=1.0)


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize(
    "prepare", [None, of_transformers(True), of_transformers(False)], ids=["kept", "reentrant", "repeated"]
)
def test_a_mixtures_router_logits(prepare: Any, batches: tuple[Batch, ...]) -> None:
    kept: list[tuple[torch.Tensor, ...]] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch)
        kept.append(out.router_logits)
        return out.loss

    twins = Twins(batched_mixture(), prepare, ops=WITHOUT_EXPERTS)
    twins.steps(batches, step)
    assert twins.replayed == (1 if prepare is None else 2) * 2 * 3, str(twins.layers)
    for found, expected in zip(kept[::2], kept[1::2], strict=True):
        assert len(found) == len(expected) == 2
        assert all(map(torch.equal, found, expected))  # also after later replays
    # Without them the same layers have other graphs.
    twins.steps(batches, lambda model, batch: model(**batch, output_router_logits=False).loss)
    assert not twins.reasons


def test_router_logits_are_asked_for_between_a_forward_and_its_backward() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = model(**batch, output_router_logits=False).loss
        return loss + model(**batch).loss

    twins = Twins(batched_mixture(), of_transformers(False), ops=WITHOUT_EXPERTS)
    twins.steps(PADDED, step)
    twins.steps(PADDED)
    assert twins.replayed > 12


@pytest.mark.parametrize("fault", ["not copied", "without a gradient", "of other graphs"])
def test_fault_router_logits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = of_transformers(False) if fault == "of other graphs" else None
    twins = Twins(batched_mixture(), prepare, ops=WITHOUT_EXPERTS)
    kept: list[tuple[torch.Tensor, ...]] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch)
        kept.append(out.router_logits)
        return out.loss

    def compare() -> None:
        kept.clear()
        twins.steps(PADDED, step)
        for found, expected in zip(kept[::2], kept[1::2], strict=True):
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))

    compare()
    if fault == "not copied":
        monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **_: tensor.view_as(tensor))
    elif fault == "without a gradient":
        clone = torch.Tensor.clone
        monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **options: clone(tensor.detach(), **options))
    else:
        monkeypatch.setattr(layer_capture, "_First", lambda *_: None)
    with pytest.raises((AssertionError, CheckpointError)):
        compare()


def test_hooks_that_are_set_after_the_capture() -> None:
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)

    twins = llama_twins()
    twins.steps(PADDED)
    handles = [model.model.layers[0].mlp.down_proj.register_forward_hook(hook) for model in twins.both]
    twins.steps(PADDED)
    assert len(calls) == 8
    assert twins.reasons == {"other code has hooked it or a module of it"}
    for handle in handles:
        handle.remove()
    before = twins.replayed
    twins.steps(PADDED)
    assert twins.replayed == before + 8
    for model in twins.both:
        model.model.layers[1].register_full_backward_hook(hook)
    calls.clear()
    twins.steps(PADDED)
    assert len(calls) == 8


def test_hooks_of_every_module() -> None:
    calls: list[int] = []
    twins = llama_twins()
    twins.steps(FULL)
    handle = register_module_forward_hook(lambda *_: calls.append(1))
    try:
        values(twins.model, FULL[0], loss_of)
    finally:
        handle.remove()
    assert len(calls) == sum(1 for _ in twins.model.modules() if type(_) is not nn.ModuleList)
    assert twins.reasons == {"other code has hooked every module"}
    before = twins.replayed
    twins.steps(FULL)
    assert twins.replayed == before + 8


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.1.input_layernorm", "model.norm"])
def test_what_hooks_have_kept_of_the_next_layer_stays(path: str) -> None:
    """The results of all but the last layer are where the next replay writes."""
    twins = llama_twins()
    twins.steps(FULL)
    kept: list[torch.Tensor] = []
    twins.model.get_submodule(path).register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    before = []
    for batch in FULL:
        values(twins.model, batch, loss_of)
        before.append(kept[-1].detach().clone())
    assert all(map(torch.equal, kept, before))


# ---------------------------------------------------------------------------------------------------------------------
# Copies, other models, threads, and the end
# ---------------------------------------------------------------------------------------------------------------------


def test_copies_and_pickles() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    copied = copy.deepcopy(twins.model)
    stored = io.BytesIO()
    torch.save(twins.model, stored)
    stored.seek(0)
    loaded = [torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(twins.model))]
    plain = small_model("llama")
    for each in loaded:
        assert not any("npu" in type(module).__module__ for module in each.modules())
        assert_same(values(each, FULL[0], loss_of), values(plain, FULL[0], loss_of))
    for batch in PADDED:
        losses = [loss_of(model, batch) for model in (copied, *twins.both)]
        for model, loss in zip((copied, *twins.both), losses, strict=True):
            model.zero_grad()
            loss.backward()
        grads = [{name: p.grad for name, p in model.named_parameters()} for model in (copied, *twins.both)]
        assert_same(grads[0], grads[2])
        assert_same(grads[1], grads[2])
    assert twins.reasons <= {"it is a copy of a layer that the kernels were applied to"}
    del copied
    twins.steps(PADDED)


def test_other_models_alike_in_the_same_process() -> None:
    twins, others = llama_twins(), Twins(small_model("llama", seed=3))

    def together(batch: Batch) -> None:
        models = (*twins.both, *others.both)
        losses = [loss_of(model, batch) for model in models]
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        grads = [{name: p.grad for name, p in model.named_parameters()} for model in models]
        assert_same(grads[0], grads[1])
        assert_same(grads[2], grads[3])

    for batch in PADDED:
        together(batch)
    assert twins.replayed == others.replayed == 6


def test_a_second_handle_of_the_same_model() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    again = apply_npu_kernels(twins.model, backend="torch", capture="on")
    twins.steps(PADDED)
    again.restore()
    twins.kernels.restore()
    assert not any("npu" in type(module).__module__ for module in twins.model.modules())


def test_two_threads_with_a_model_each() -> None:
    pairs = [llama_twins(), Twins(small_model("llama", seed=3))]
    errors: list[BaseException] = []

    def work(twins: Twins) -> None:
        try:
            for _ in range(2):
                twins.steps(PADDED)
                twins.steps(FULL)
        except BaseException as error:  # noqa: BLE001  an assertion that fails on a thread fails nothing
            errors.append(error)

    # `values` seeds the process's generator, which nothing here draws from.
    threads = [threading.Thread(target=work, args=(twins,)) for twins in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert [twins.replayed for twins in pairs] == [28, 28]


def test_restore_puts_everything_back_and_frees_what_was_captured() -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    kernels = apply_npu_kernels(model, backend="torch", capture="on")
    for batch in PADDED:
        values(model, batch, loss_of)
    layers = kernels.settings.layers
    held = [
        weakref.ref(each)
        for mode in layers._modes.values() for spot in mode.buckets.values() for variants in spot.layers.values()
        for captured in variants for each in (captured.pieces, captured.pieces.pieces[0].outputs[0])
    ]  # fmt: skip
    assert held
    report = str(kernels.report())
    assert "captured layers: 75% of 8 calls replayed" in report
    del layers
    kernels.restore()
    gc.collect()
    assert not any(each() is not None for each in held)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(vars(m).keys() == vars(p).keys() for m, p in zip(model.modules(), plain.modules(), strict=True))
    assert_same(values(model, PADDED[0], loss_of), values(plain, PADDED[0], loss_of))
    assert "captured layers: " in str(kernels.report())
    kernels.refresh()
    for batch in PADDED:
        values(model, batch, loss_of)
    assert kernels.settings.layers.replayed == 6


def test_a_model_that_is_dropped_takes_what_was_captured_along() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    held = [weakref.ref(twins.layers), weakref.ref(twins.model)]
    del twins
    gc.collect()
    assert not any(each() is not None for each in held)


class Events:
    """Events of a device that begins what it is asked for at once (`waits`), or later."""

    def __init__(self, waits: Callable[[int], bool]) -> None:
        self.asked, self._waits = 0, waits

    def Event(self) -> Any:
        return self

    def current_stream(self, where: torch.device) -> None:
        assert where.type == "cuda"

    def record(self, stream: None) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return self._waits(self.asked)


@pytest.mark.parametrize(("waits", "for_host"), [(10, True), (8, True), (7, False), (0, False)])
def test_auto_captures_where_the_device_waits_at_nearly_all_layers(
    waits: int, for_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(lambda asked: asked % 10 < waits)
    monkeypatch.setattr(torch, "get_device_module", lambda where: events)
    with FakeTensorMode():
        hidden = torch.empty(2, 3, device="cuda")
    found = DeviceWaits()
    for layer in 4 * (0, 1):
        assert not found.seen(layer, hidden)
    assert events.asked == 1  # the first three forwards are not looked at
    while not found.seen(0, hidden):
        assert events.asked < 1000
    assert found.share == waits / 10
    assert found.for_host == for_host


def test_unknown_modes() -> None:
    with pytest.raises(ValueError, match="capture must be one of auto, on, off; got 'yes'"):
        check_capture("capture", "yes")
    kernels = apply_npu_kernels(small_model("llama"), backend="torch", capture="off")
    assert kernels.settings.layers is None


# ---------------------------------------------------------------------------------------------------------------------
# Layers that are left alone
# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attends as layers of transformers do, after what a test changes."""

    def __init__(self, change: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.change = change
        self.config = LlamaConfig(attn_implementation="sdpa")

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        given = {"attention_mask": mask, **self.change(hidden, mask)}
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        states = hidden.view(2, 1, 6, 4)
        return function(self, states, states, states, **given)[0].view(2, 6, 4)


class Layer(GradientCheckpointingLayer):
    def __init__(self, own: Callable[..., Any], change: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.linear, self.attention, self.own = nn.Linear(4, 4), Attention(change), own

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return self.own(self, hidden, attention_mask, **kwargs)


def attends(layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return hidden + layer.attention(layer.linear(hidden), mask)


def of_layer(
    own: Callable[..., Any] = attends, prepare: Callable[[Any], None] | None = None,
    change: Callable[..., dict[str, Any]] = lambda *_: {}, **kwargs: Any,
) -> LayerCapture:  # fmt: skip
    """Calls a layer some times beside the same layer that is not captured."""
    layer = Layer(own, change)
    if prepare is not None:
        prepare(layer)
    plain = copy.deepcopy(layer)
    made = LayerCapture(Undo(), list, lambda: False)
    made.install(nn.ModuleList([layer]), "on")
    for _ in range(4):
        hidden = torch.randn(2, 6, 4)
        made_by = [tree_leaves(each(hidden, **kwargs)) for each in (layer, plain)]
        for found, expected in zip(*made_by, strict=True):
            if found is None:
                continue
            assert torch.equal(found, expected)
            if found.requires_grad:
                found.sum().backward()
    return made


def test_a_layer_of_any_family_is_replayed() -> None:
    for mask in (None, torch.ones(2, 1, 6, 6).tril().bool()):
        made = of_layer(attention_mask=mask)
        assert made.replayed == 3
        assert not made.reasons
    both = of_layer(lambda *args: (attends(*args), None))
    assert both.replayed == 3


class Strange(nn.Parameter):
    pass


def set_strange(layer: Any) -> None:
    layer.linear.weight = Strange(layer.linear.weight.detach())


def set_forward(layer: Any) -> None:
    layer.linear.forward = functools.partial(nn.Linear.forward, layer.linear)


class Sharded(nn.Linear):
    """Stands for FSDP2's modules."""


def set_sharded(layer: Any) -> None:
    layer.linear.__class__ = Sharded


def failing(layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if recording_now():
        raise RuntimeError("no stream")
    return attends(layer, hidden, mask)


def changing(layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return attends(layer, hidden, mask)


LEFT_ALONE: dict[str, dict[str, Any]] = {
    "its parameters move (FSDP)": {"prepare": set_sharded},
    "a parameter of it is a Strange": {"prepare": set_strange},
    "a forward was set on a module of it": {"prepare": set_forward},
    "it could not be captured: RuntimeError: no stream": {"own": failing},
    "it returns what it is given": {"own": lambda layer, hidden, mask: hidden[:]},
    "it is given settings of type object": {
        "own": lambda layer, hidden, mask, settings: attends(layer, hidden, mask),
        "settings": object(),
    },
    "its attention returns weights": {},
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_layers_that_are_left_alone(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_weights(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query.transpose(1, 2), query

    monkeypatch.setattr(layer_capture, "FSDPModule", Sharded)
    if reason == "its attention returns weights":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", with_weights)
        made = of_layer()
    else:
        made = of_layer(**LEFT_ALONE[reason])
    assert made.replayed == 0
    assert set(made.reasons) == {reason}


def test_a_call_without_a_tensor() -> None:
    made = LayerCapture(Undo(), list, lambda: False)
    layer = Layer(lambda *_: None, lambda *_: {})
    made.install(nn.ModuleList([layer]), "on")
    layer(None)
    assert dict(made.reasons) == {"it is given no tensor": 1}


def test_a_layer_whose_state_changes_at_each_call() -> None:
    made = of_layer(changing)
    assert made.replayed == 0
    layer = Layer(changing, lambda *_: {})
    made.install(nn.ModuleList([layer]), "on")
    for _ in range(12):
        layer(torch.randn(2, 6, 4))
    assert set(made.reasons) == {
        "a call of it changes its modules or parameters",
        "its modules or parameters change: 4 states of it are captured",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def twins() -> Twins:
    """Twins that have captured, and are the same."""
    both = llama_twins()
    both.steps(PADDED)
    return both


def assert_caught(
    twins: Twins, step: Callable[[Any, Batch], torch.Tensor] = loss_of, batches: tuple[Batch, ...] = PADDED
) -> None:
    with pytest.raises(AssertionError):
        twins.steps(batches, step)


def test_fault_a_stale_static_input(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_capture.Input, "load", lambda *_: None)
    assert_caught(twins)


def test_fault_an_input_that_is_not_copied(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_capture.Input, "holds", lambda place, _: place.path != 0)
    assert_caught(twins)


@pytest.mark.parametrize("path", [("position_embeddings", 0), ("position_embeddings", 1)])
def test_fault_positions_that_are_not_copied(path: Any, twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    original = layer_capture.Input.holds
    monkeypatch.setattr(layer_capture.Input, "holds", lambda p, t: p.path == path or original(p, t))
    assert_caught(twins)


def test_fault_the_gradient_of_a_residual_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes from a piece to the next one beside attention has its gradient in the joint backward."""
    original = pieces_module._copies

    def lost(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(t) if t.dim() == 3 else t for t in original(tensors)]

    both = llama_twins()
    both.steps(PADDED)
    monkeypatch.setattr(pieces_module, "_copies", lost)
    assert_caught(both)


def test_fault_the_gradient_of_attention_is_lost(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pieces_module._fill

    def fill(buffer: torch.Tensor, value: torch.Tensor | None, dim: int | None = None) -> None:
        original(buffer, None if dim == 2 else value, dim)

    monkeypatch.setattr(pieces_module, "_fill", fill)
    assert_caught(twins)


def test_fault_a_tail_that_is_not_cleared(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pieces_module._fill

    def fill(buffer: torch.Tensor, value: torch.Tensor | None, dim: int | None = None) -> None:
        original(buffer, value, dim)
        if value is not None and dim is not None and value.shape[dim] != buffer.shape[dim]:
            buffer.narrow(dim, value.shape[dim], buffer.shape[dim] - value.shape[dim]).fill_(3)

    monkeypatch.setattr(pieces_module, "_fill", fill)
    assert_caught(twins)


def test_fault_another_layers_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    both = llama_twins()
    original = layer_capture.LayerCapture._ready

    def ready(by: Any, layer: Any, *args: Any) -> Any:
        return original(by, both.model.model.layers[0] if layer is both.model.model.layers[1] else layer, *args)

    monkeypatch.setattr(layer_capture.LayerCapture, "_ready", ready)
    assert_caught(both)


def test_fault_a_second_forward_overwrites_the_first(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        return loss_of(model, batch) * loss_of(model, same_rows)

    same_rows = rows(30, 10, 15, 5, seed=5)

    class Never(set):
        def add(self, _: object) -> None:
            pass

    # Neither of the two guards, nor autograd's own, which sees that what it has saved was written to.
    monkeypatch.setattr(layer_capture, "Turn", lambda rows: layer_capture_turn(rows, Never()))
    with pytest.raises(RuntimeError, match="ran forward again before the backward"):
        twins.steps(PADDED[:1], step)
    monkeypatch.setattr(pieces_module, "_may_go_back", lambda turn: None)
    with pytest.raises(RuntimeError, match=r"modified inplace|modified by an inplace"):
        twins.steps(PADDED[:1], step)
    monkeypatch.setattr(pieces_module, "increment_version", lambda tensors: None)
    assert_caught(twins, step, PADDED[:1])


layer_capture_turn = layer_capture.Turn


def test_fault_a_frozen_parameter_that_is_trained_later(monkeypatch: pytest.MonkeyPatch) -> None:
    both = llama_twins(lambda model: model.model.layers[0].mlp.requires_grad_(False) and None)
    both.steps(PADDED)
    monkeypatch.setattr(layer_state.LayerState, "holds", lambda _: True)
    for model in both.both:
        model.model.layers[0].mlp.requires_grad_(True)
    assert_caught(both)


@pytest.mark.parametrize("what", ["weight", "adapter", "hook"])
def test_fault_a_change_that_nobody_looks_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = lora_twins(["down_proj"])
    both.steps(FULL)
    monkeypatch.setattr(layer_state.LayerState, "holds", lambda _: True)
    for model in both.both:
        proj = model.base_model.model.model.layers[0].mlp.down_proj
        if what == "weight":
            proj.base_layer.weight = nn.Parameter(proj.base_layer.weight * 2, requires_grad=False)
        elif what == "adapter":
            proj.scaling["default"] *= 3
        else:
            proj.register_forward_hook(lambda module, args, out: out * 2)
    assert_caught(both, batches=FULL)


def test_fault_gradients_are_handed_out_as_static_buffers(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(model: Any) -> list[Outcome]:
        """Gradients as autograd has them: `.grad` may be a copy."""
        made = []
        for batch in PADDED:
            grads = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
            made.append({str(i): grad for i, grad in enumerate(grads)})
        return made

    def compare() -> None:
        for found, expected in zip(*map(outcomes, twins.both), strict=True):
            assert_same(found, expected)

    compare()
    monkeypatch.setattr(pieces_module, "_copies", lambda tensors: tensors)
    with pytest.raises(AssertionError):
        compare()


def test_fault_padding_of_a_bucket_in_a_routers_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(small_model("qwen3-moe", router_aux_loss_coef=1.0))
    plain = small_model("qwen3-moe", router_aux_loss_coef=1.0)
    truth = copy.deepcopy(plain).double()

    def compare() -> None:
        found, expected, exact = (values(model, PADDED[0], loss_of) for model in (twins.model, plain, truth))
        moved = rounded(lambda: values(plain, PADDED[0], loss_of))
        for name, value in found.items():
            if value is not None:
                assert_as_close(value, expected[name], exact[name], name, [m[name] for m in moved])

    compare()
    original = batch_module._padded_logits
    monkeypatch.setattr(batch_module, "_padded_logits", lambda logits, *a: original(logits.flip(0), *a))
    with pytest.raises(AssertionError):
        compare()
