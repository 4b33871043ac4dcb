"""A body that computes live tokens only, with every kind of adapter and model: exact, or left alone with the reason."""

import copy
import types
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from npu_trainer_kernels import apply_npu_kernels
from tests.closeness import assert_as_close, rounded
from tests.models import SMALL, small_model
from tests.patching.padded import (
    IMAGE,
    RIGHT,
    Batch,
    compared,
    declined,
    llama,
    loss_of,
    of_transformers,
    padded,
    ran,
    shared,
    with_images,
)

# ---------------------------------------------------------------------------------------------------------------------
# Adapters
# ---------------------------------------------------------------------------------------------------------------------


def tuned(config: Any, family: str = "llama", **overrides: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = get_peft_model(small_model(family, **overrides), copy.deepcopy(config))
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.05)
        return model

    return make


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear", **options})


SERVED = {
    "LoRA": lora(),
    "DoRA": lora(use_dora=True),
    "an embedding with LoRA": lora(target_modules=["q_proj", "embed_tokens"]),
    "a trained copy of the embedding": lora(modules_to_save=["embed_tokens", "lm_head"]),
    "trained copies of norms": lora(modules_to_save=["input_layernorm"]),
    "some trained tokens": lora(trainable_token_indices=[3, 4, 5]),
    "IA3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED)
def test_adapters(config):
    kernels = compared(tuned(config))
    assert ran(kernels) == 1
    assert shared(kernels)


def keep_device(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As ms-swift's."""
    x = args[0]
    weight = self.weight if hasattr(self, "weight") else self.weight0
    if weight.device != x.device:
        return self.forward_origin(x.to(weight.device), *args[1:], **kwargs)
    return self.forward_origin(*args, **kwargs)


def neighbours(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.forward_origin(x) + self.forward_origin(x.roll(1, -2))


def long_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.forward_origin(x) if x.shape[-2] < 16 else neighbours(self, x)


def with_forwards(function: Any) -> Callable[..., Any]:
    def make() -> Any:
        model = tuned(lora())()
        for module in model.modules():
            if isinstance(module, LoraLayer):
                for linear in (*module.lora_A.values(), *module.lora_B.values()):
                    linear.forward_origin = linear.forward
                    linear.forward = types.MethodType(function, linear)
        return model

    return make


def test_a_forward_that_was_set_on_an_adapters_layers():
    kernels = compared(with_forwards(keep_device))
    assert ran(kernels) == 1
    assert not declined(kernels)


@pytest.mark.parametrize("function", [neighbours, long_rows])
def test_a_forward_that_was_set_on_an_adapters_layers_and_is_no_product(function):
    """One of them would not be seen by a few tokens."""
    kernels = compared(with_forwards(function))
    assert ran(kernels) == 0
    assert f"lora_A.default: its forward was set on the instance, by {__name__}" in str(kernels.report())


def test_a_forward_that_is_set_on_an_adapters_layers_later():
    model = tuned(lora())()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        linear = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"]
        linear.forward_origin, weights = linear.forward, dict(linear._parameters)
        linear.forward = types.MethodType(keep_device, linear)
        loss_of(model, padded())
        assert declined(kernels) == f"its Linear: its forward was set on the instance, by {__name__}"
        kernels.refresh()
        assert linear._parameters == weights
        loss_of(model, padded())
        assert ran(kernels) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_of_checkpointed_layers(reentrant):
    def prepare(model: Any) -> Any:
        model.enable_input_require_grads()
        return of_transformers(reentrant)(model)

    assert ran(compared(tuned(lora()), prepare)) == 1


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_rows_do_not_share_what_is_dropped(later):
    model = small_model("llama")
    dropping = lora(lora_dropout=0.3, target_modules=["down_proj"])
    model = model if later else get_peft_model(model, dropping)
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        model = get_peft_model(model, dropping) if later else model
        loss_of(model, padded()).backward()
        assert ran(kernels) == 1
        assert not shared(kernels)
        model.eval()
        with torch.no_grad():
            model(**padded())
        assert shared(kernels)


def test_virtual_tokens_before_padding_are_a_gap():
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    kernels = compared(tuned(prompt))
    assert ran(kernels) == 0
    assert declined(kernels) == "the mask of a row has a gap"
    kernels = compared(tuned(prompt), batch=padded(RIGHT))
    assert ran(kernels) == 1


LEFT_ALONE: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "keys and values": (PrefixTuningConfig, {"num_virtual_tokens": 5}, "it is given a cache of keys and values"),
    "tokens of each row that switch it on": (
        lora,
        {"target_modules": ["q_proj"], "alora_invocation_tokens": [3, 4]},
        "a hook of peft on its Linear may look at rows",
    ),
}


@pytest.mark.parametrize(("config", "options", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_adapters_that_know_of_rows(config, options, reason):
    kernels = compared(tuned(config(task_type="CAUSAL_LM", **options), hidden_size=64))
    assert ran(kernels) == 0
    assert reason in declined(kernels)


def test_an_adapter_that_looks_at_all_tokens():
    from peft import LilyConfig

    kernels = compared(tuned(LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])))
    assert ran(kernels) == 0
    assert "looks at all tokens at once, padding among them" in str(kernels.report())


def test_each_row_with_an_adapter_of_its_own():
    model = tuned(lora(target_modules=["q_proj"]))()
    model.add_adapter("other", lora(target_modules=["q_proj"]))
    batch = {name: value for name, value in padded().items() if name != "labels"}
    batch["adapter_names"] = ["default", "other", "__base__", "other"]
    model.eval()
    with torch.no_grad():
        expected = model(**batch).logits
        with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
            assert torch.equal(model(**batch).logits, expected)
    assert "a hook of peft" in declined(kernels)


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("asked", ["config", "call", "nobody"])
def test_experts_without_and_with_an_auxiliary_loss(family, asked):
    """Routers' logits have the places of the batch, and those of a shared token get the gradients of all its rows."""

    def make() -> Any:
        return small_model(family, output_router_logits=asked == "config", router_aux_loss_coef=1.0)

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch, output_router_logits=True) if asked == "call" else model(**batch)
        assert (out.aux_loss is None) == (asked == "nobody")
        return out.loss

    kernels = compared(make, step=step)
    assert ran(kernels) == 1
    assert shared(kernels)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Qwen3ForSequenceClassification"])
def test_classifiers_and_reward_models(name):
    def make() -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, name.replace("ForSequenceClassification", "Config"))
        model = getattr(transformers, name)(config(**SMALL, num_labels=2)).train()
        with torch.no_grad():
            model.get_input_embeddings().weight[0] = 1.0  # as where another token's id is that of padding
        return model

    batch = {**padded(), "labels": torch.tensor([0, 1, 1, 0])}
    assert ran(compared(make, batch=batch)) == 1
    reason = "the classifier finds its token by ids, and the token may be padding"
    # The classified token is the last one that is no padding by its id, whatever the mask says.
    kernels = compared(make, batch={**batch, "input_ids": batch["input_ids"] + 1})
    assert ran(kernels) == 0
    assert declined(kernels) == reason
    # Of an empty text it is the first place of all.
    empty = padded(((3, 21), (3, 15), (3, 19), (0, 0)))
    kernels = compared(make, batch={**batch, **{name: empty[name] for name in ("input_ids", "attention_mask")}})
    assert ran(kernels) == 0
    assert declined(kernels) == reason


@pytest.mark.parametrize("name", ["gemma3", "qwen2-vl", "llava"])
def test_models_for_images_get_text_alone(name):
    kernels = compared(lambda: with_images(name))
    assert ran(kernels) == 1
    assert shared(kernels)
    assert not declined(kernels)


def images_in(name: str) -> Batch:
    batch = padded()
    batch["input_ids"][:, 6:10] = IMAGE
    batch["labels"][:, :12] = -100
    torch.manual_seed(2)
    if name == "qwen2-vl":
        batch["pixel_values"] = torch.randn(4 * 16, 3 * 2 * 14 * 14)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 4)
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    else:
        batch["pixel_values"] = torch.randn(4, 3, 28, 28)
    if name == "gemma3":
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3", "its mask does not mark tokens"),
        ("qwen2-vl", "it is given positions in several dimensions"),
        ("llava", ""),
    ],
)
def test_models_for_images_get_images(name, reason):
    """What the part for text is given then is embedded already; where it has masks and positions as ever, it is
    served."""
    kernels = compared(lambda: with_images(name), batch=images_in(name))
    assert declined(kernels) == reason
    assert ran(kernels) == (name == "llava")


class OfAnotherKind(nn.Linear):
    """As quantised layers are: linear, with a forward of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * 0.5, self.bias)


def test_linear_layers_of_another_kind():
    def make() -> Any:
        model = small_model("llama")
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = OfAnotherKind
        return model

    assert ran(compared(make)) == 1


def test_a_model_on_several_devices():
    def make() -> Any:
        return accelerate.dispatch_model(small_model("llama"), {"": "cpu"}, force_hooks=True)

    with apply_npu_kernels(make(), ops=["varlen_attention"]) as kernels:
        (left,) = kernels.report().left_alone
    assert "its forward was set on the instance" in left.reason


def test_copies_that_threads_run():
    model = small_model("llama").model
    batch = padded()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        copy_of_it = model._replicate_for_data_parallel()
        copy_of_it(batch["input_ids"], batch["attention_mask"], use_cache=False)
        assert ran(kernels) == 0
        assert "DataParallel" in declined(kernels)


def test_inference_mode():
    model = small_model("llama")
    batch = padded()
    live = batch["attention_mask"].bool()
    plain = copy.deepcopy(model)
    with torch.inference_mode():
        expected = plain(**batch).logits[live]
        with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
            actual = model(**batch).logits[live]
    truth = copy.deepcopy(model).double()(**batch).logits[live].detach()
    assert ran(kernels) == 1
    assert_as_close(actual, expected, truth, "logits", lambda: rounded(lambda: plain(**batch).logits[live].detach()))


def test_gradients_of_several_batches():
    def step(model: Any, batch: Batch) -> torch.Tensor:
        losses = []
        for rows in (slice(0, 1), slice(1, 4)):
            part = {name: value[rows] if torch.is_tensor(value) else value for name, value in batch.items()}
            losses.append(loss_of(model, part))
        return sum(losses)

    assert ran(compared(llama(), step=step)) == 2
