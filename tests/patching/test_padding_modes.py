"""A body that computes live tokens only, in every mode that people train in: exact, or left alone with the reason."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import transformers
from accelerate.utils import compile_regions
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from npu_trainer_kernels import NpuKernels, NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.ops.varlen_attention import varlen_attention
from npu_trainer_kernels.patching import _packed
from tests.closeness import assert_as_close
from tests.models import SMALL, farthest, neighbour, small_model

Batch = dict[str, Any]
Step = Callable[[Any, Batch], torch.Tensor]


def padded(rows: tuple[tuple[int, int], ...] = ((3, 21), (3, 15), (3, 19), (6, 21)), length: int = 21) -> Batch:
    """A batch whose rows live from one column to another; the first twelve columns are the same in all rows."""
    ids = torch.randint(3, SMALL["vocab_size"], (len(rows), length), generator=torch.Generator().manual_seed(1))
    ids[:, :12] = ids[0, :12]
    mask = torch.zeros_like(ids)
    for row, (begin, end) in enumerate(rows):
        mask[row, begin:end] = 1
    ids = ids.masked_fill(mask == 0, SMALL["pad_token_id"])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :8] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


RIGHT = ((0, 21), (0, 15), (0, 19), (0, 8))


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def same(model: Any) -> Any:
    return model


def values(model: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor | None]:
    """The loss and every gradient, by number: wrappers rename parameters."""
    torch.manual_seed(5)
    loss = step(model, batch)
    loss.backward()
    gradients = (p.grad for p in model.parameters() if p.requires_grad)
    return {"loss": loss.detach(), **{str(i): gradient for i, gradient in enumerate(gradients)}}


def names_of_attention(model: nn.Module) -> list[str]:
    """What configurations name: a part of a model may have one of its own."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [config._attn_implementation for config in configs.values()]


def compared(
    make: Callable[[], Any], prepare: Callable[[Any], Any] = same, step: Step = loss_of, batch: Batch | None = None,
    truth_step: Step | None = None,
) -> NpuKernels:  # fmt: skip
    """Loss and gradients beside those of the unpatched model, by the package's rule; the handle, for what ran."""
    batch = padded() if batch is None else batch
    model = make()
    truth = values(copy.deepcopy(model).double(), batch, truth_step or step)
    plain = [model, *(neighbour(model, seed) for seed in (0, 1))]
    expected = farthest([values(prepare(copy.deepcopy(m)), batch, step) for m in plain], truth)
    before = names_of_attention(model)
    kernels = apply_npu_kernels(model, ops=["varlen_attention"])
    actual = values(prepare(model), batch, step)
    assert names_of_attention(model) == before
    for name, value in actual.items():
        exact, reference = truth[name], expected[name]
        assert (value is None) == (exact is None), name
        if value is not None and exact is not None and reference is not None:
            assert_as_close(value, reference, exact, name)
    return kernels


def ran(kernels: NpuKernels) -> int:
    return kernels.report().ran.get("varlen_attention", 0)


def declined(kernels: NpuKernels) -> str:
    return "; ".join(d.reason for d in kernels.report().declined)


def shared(kernels: NpuKernels) -> bool:
    savings = next(site.progress for site in kernels.report().sites if site.progress.positions)
    return savings.computed < savings.live


def llama(**overrides: Any) -> Callable[[], Any]:
    return lambda: small_model("llama", **overrides)


# ---------------------------------------------------------------------------------------------------------------------
# Activation checkpointing
# ---------------------------------------------------------------------------------------------------------------------


def of_transformers(reentrant: bool) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return prepare


def of_torch(kind: CheckpointImpl, what: str) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=kind),
            check_fn=lambda module: type(module).__name__.endswith(what),
        )
        return model

    return prepare


CHECKPOINTS: dict[str, Callable[[Any], Any]] = {
    "transformers, reentrant": of_transformers(True),
    "transformers, not reentrant": of_transformers(False),
    "torch, reentrant": of_torch(CheckpointImpl.REENTRANT, "DecoderLayer"),
    "torch, not reentrant": of_torch(CheckpointImpl.NO_REENTRANT, "DecoderLayer"),
    "torch, attention alone": of_torch(CheckpointImpl.NO_REENTRANT, "Attention"),
}
checkpoints = pytest.mark.parametrize("prepare", CHECKPOINTS.values(), ids=CHECKPOINTS)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of segments of each call of the op."""
    calls = []

    def counted(q: Any, k: Any, v: Any, segments: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(segments))
        return varlen_attention(q, k, v, segments, **kwargs)

    monkeypatch.setattr(_packed, "varlen_attention", counted)
    return calls


@checkpoints
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_recomputed_layers_attend_by_segments(prepare, family, attended):
    apply_npu_kernels(small_model(family, sliding_window=6)).restore()  # its proof is made
    attended.clear()
    kernels = compared(lambda: small_model(family, sliding_window=6), prepare)
    assert ran(kernels) == 1
    assert shared(kernels)
    assert len(attended) == 2 * 2  # two layers, each of them twice
    assert len(set(attended)) == 1


def test_a_model_that_is_recomputed_as_a_whole():
    def step(model: Any, batch: Batch) -> torch.Tensor:
        return checkpoint(lambda: model(**batch).loss, use_reentrant=False)

    assert ran(compared(llama(), step=step)) == 2


def test_between_forward_and_backward_the_configuration_is_as_it_was():
    model = of_transformers(False)(small_model("llama"))
    with apply_npu_kernels(model, ops=["varlen_attention"]):
        loss = loss_of(model, padded())
        assert model.config._attn_implementation == "sdpa"
        # Another batch in between, unpatched, as generation is.
        with torch.no_grad():
            model(input_ids=padded()["input_ids"])
        loss.backward()
        assert model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------------------------------------------------


def under_autocast(dtype: torch.dtype) -> Step:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return loss_of(model, batch)

    return step


@pytest.mark.parametrize("prepare", [same, *CHECKPOINTS.values()], ids=["kept", *CHECKPOINTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, prepare):
    assert ran(compared(llama(), prepare, under_autocast(dtype), truth_step=loss_of)) == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, attention):
    assert ran(compared(lambda: llama(attn_implementation=attention)().to(dtype))) == 1


def test_a_forward_that_accelerate_has_wrapped():
    def prepare(model: Any) -> Any:
        return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)

    assert ran(compared(llama(), prepare, truth_step=loss_of)) == 1
    model = prepare(small_model("llama"))
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        loss_of(model, padded()).backward()
    assert ran(kernels) == 1


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
    "keys and values": (PrefixTuningConfig, {"num_virtual_tokens": 5}, "past_key_values"),
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


def test_experts_without_and_with_a_loss_of_their_own():
    assert ran(compared(lambda: small_model("qwen3-moe", output_router_logits=False))) == 1
    kernels = compared(lambda: small_model("qwen3-moe"))
    assert declined(kernels) == "its router_logits are asked for"


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Qwen3ForSequenceClassification"])
def test_classifiers_and_reward_models(name):
    def make() -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, name.replace("ForSequenceClassification", "Config"))
        return getattr(transformers, name)(config(**SMALL, num_labels=2)).train()

    batch = {**padded(), "labels": torch.tensor([0, 1, 1, 0])}
    assert ran(compared(make, batch=batch)) == 1
    # The classified token is the last one that is no padding by its id, whatever the mask says.
    kernels = compared(make, batch={**batch, "input_ids": batch["input_ids"] + 1})
    assert ran(kernels) == 0
    assert "found by ids" in declined(kernels)


TEXT = {**SMALL, "hidden_size": 64}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
IMAGE = 300
QWEN_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
SPECIAL = {"image_token_id": IMAGE, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


def with_images(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gemma3":
        config = transformers.Gemma3Config(
            text_config={**TEXT, **WINDOWS}, vision_config={**VISION, "num_hidden_layers": 1}, mm_tokens_per_image=4,
            image_token_index=IMAGE, boi_token_index=301, eoi_token_index=302,
        )  # fmt: skip
        return transformers.Gemma3ForConditionalGeneration(config).train()
    if name == "qwen2-vl":
        config = transformers.Qwen2VLConfig(text_config={**TEXT, **SECTIONS}, vision_config=QWEN_VISION, **SPECIAL)
        return transformers.Qwen2VLForConditionalGeneration(config).train()
    vision = transformers.CLIPVisionConfig(**VISION, num_hidden_layers=2)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=vision, image_token_index=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config).train()


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
    ("name", "reasons"),
    [
        ("gemma3", ["it is given pixel_values", "its mask is none of tokens"]),
        ("qwen2-vl", ["it is given pixel_values", "it is given positions in several dimensions"]),
        ("llava", ["it is given pixel_values"]),
    ],
)
def test_models_for_images_get_images(name, reasons):
    """What the part for text is given then is embedded already; where it has masks and positions as ever, it is
    served."""
    kernels = compared(lambda: with_images(name), batch=images_in(name))
    assert declined(kernels).split("; ") == reasons
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
    with torch.inference_mode():
        expected = model(**batch).logits[live]
        with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
            actual = model(**batch).logits[live]
    truth = copy.deepcopy(model).double()(**batch).logits[live].detach()
    assert ran(kernels) == 1
    assert_as_close(actual, expected, truth, "logits")


def test_gradients_of_several_batches():
    def step(model: Any, batch: Batch) -> torch.Tensor:
        losses = []
        for rows in (slice(0, 1), slice(1, 4)):
            part = {name: value[rows] if torch.is_tensor(value) else value for name, value in batch.items()}
            losses.append(loss_of(model, part))
        return sum(losses)

    assert ran(compared(llama(), step=step)) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_dropout(attention):
    """Other numbers are drawn, from the same distribution: mean and spread of each hidden state over many draws."""
    draws = 400
    batch = padded()
    live = batch["attention_mask"].bool()
    model = small_model("llama", attention_dropout=0.3, attn_implementation=attention, num_hidden_layers=1).model

    def drawn() -> torch.Tensor:
        with torch.no_grad():
            given = (batch["input_ids"], batch["attention_mask"])
            return torch.stack([model(*given, use_cache=False).last_hidden_state[live] for _ in range(draws)])

    plain = drawn()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        ours = drawn()
        assert ran(kernels) == draws
        assert not shared(kernels)
    # The first token of a row has one key: it is dropped or not. Two standard normal numbers would differ like these.
    apart = (ours.mean(0) - plain.mean(0)) / ((ours.var(0) + plain.var(0)) / draws).sqrt()
    assert 0.8 < apart.square().mean().sqrt() < 1.2
    assert 0.95 < ours.var(0).mean() / plain.var(0).mean() < 1.05
    # A draw is its own for each row, also where rows begin alike.
    first, second = (ours[:, live[:row].sum()] for row in (0, 1))
    assert (first - second).abs().max() > 0.1


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile and hooks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def each_layer(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def each_layer_exchanged(model: Any) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def each_forward(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    return model


def each_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")
    return model


def regions(model: Any) -> Any:
    return compile_regions(model, backend="eager")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("prepare", [each_layer, each_layer_exchanged, each_forward, each_attention, regions])
def test_compiled_layers_get_the_batch(prepare):
    """A graph that a packed row went through would be compiled anew for the next one."""
    kernels = compared(llama(), prepare)
    assert ran(kernels) == 0
    assert "compiled" in declined(kernels) or "its forward was set on the instance" in declined(kernels)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("what", ["model", "body"])
def test_a_compiled_body_is_the_same_graph(what):
    frames = []
    for patched in (False, True):
        torch._dynamo.reset()
        counter, model = CompileCounter(), small_model("llama")
        if patched:
            kernels = apply_npu_kernels(model, ops=["varlen_attention"])
        (model if what == "model" else model.model).compile(backend=counter)
        for length in (21, 22, 23, 24):
            loss_of(model, padded(length=length)).backward()
        frames.append(counter.frame_count)
    assert frames[0] == frames[1]
    assert ran(kernels) == 0


def test_hooks_that_may_look_at_rows():
    def watched(model: Any) -> Any:
        model.model.layers[1].register_forward_hook(lambda module, args, output: None)
        return model

    kernels = compared(llama(), watched)
    assert ran(kernels) == 0
    assert "on its LlamaDecoderLayer may look at rows" in declined(kernels)


# ---------------------------------------------------------------------------------------------------------------------
# Trainers, caches and waits
# ---------------------------------------------------------------------------------------------------------------------


def after_two_steps(model: Any, folder: Path, **options: Any) -> NpuKernelsCallback:
    """A Trainer has trained the model on padded rows, and has said nothing of caches."""
    batch = padded()
    del batch["use_cache"]
    rows = [{key: value[i].tolist() for key, value in batch.items()} for i in range(4)]
    callback = NpuKernelsCallback(ops=["varlen_attention"])
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
    return callback


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_in_a_trainer_no_cache_is_asked_for(name, tmp_path):
    model = small_model("llama") if name == "llama" else with_images("gemma3")
    callback = after_two_steps(model, tmp_path, bf16=True)
    assert callback.report().ran == {"varlen_attention": 2}
    assert not callback.report().declined
    assert callback.handle.settings.caches, "what was said of the Trainer's run outlived it"


def test_noise_that_depends_on_the_size_of_a_batch(tmp_path):
    callback = after_two_steps(small_model("llama"), tmp_path, neftune_noise_alpha=5.0)
    assert [d.reason for d in callback.report().declined] == [
        "a hook of transformers on its Embedding may look at rows"
    ]


def test_by_hand_a_cache_is_made_where_the_configuration_says_so():
    batch = padded()
    del batch["use_cache"]
    kernels = compared(llama(), batch=batch)
    assert declined(kernels) == "a cache is asked for (use_cache)"
    assert ran(compared(llama(use_cache=False), batch=batch)) == 1


def llava() -> Any:
    return with_images("llava")


@pytest.mark.parametrize("make", [llama(), llava], ids=["llama", "llava"])
@pytest.mark.parametrize("prepare", [same, *CHECKPOINTS.values()], ids=["kept", *CHECKPOINTS])
def test_the_host_waits_once_for_a_forward_and_never_for_backward(make, prepare, monkeypatch):
    """Tensors without numbers: whatever asks for one raises, but for the copy of the ids, which is counted here."""
    batch = padded()
    seen = np.where(batch["attention_mask"].numpy() > 0, batch["input_ids"].numpy(), -1)
    waits = []

    def numpy(tensor: torch.Tensor) -> np.ndarray:
        waits.append(tuple(tensor.shape))
        return seen

    apply_npu_kernels(make(), ops=["varlen_attention"]).restore()  # its proof is made, with numbers
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = {name: mode.from_tensor(v) if torch.is_tensor(v) else v for name, v in batch.items()}
    monkeypatch.setattr(FakeTensor, "numpy", numpy, raising=False)
    with mode:
        model = make()
        kernels = apply_npu_kernels(model, ops=["varlen_attention"])
        loss = loss_of(prepare(model), given)
        assert waits == [(4, 21)]
        loss.backward()
        assert waits == [(4, 21)]
    assert ran(kernels) == 1
