"""What the tests of packed bodies have in common: batches, and the comparison with the unpatched model."""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from npu_trainer_kernels import NpuKernels, apply_npu_kernels
from tests.closeness import assert_as_close, rounded
from tests.models import SMALL, small_model

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
    model.zero_grad()
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
    plain = prepare(copy.deepcopy(model))
    expected, *moved = values(plain, batch, step), *rounded(lambda: values(plain, batch, step))
    before = names_of_attention(model)
    kernels = apply_npu_kernels(model, ops=["varlen_attention"])
    actual = values(prepare(model), batch, step)
    assert names_of_attention(model) == before
    for name, value in actual.items():
        exact, reference = truth[name], expected[name]
        assert (value is None) == (exact is None), name
        if value is not None and exact is not None and reference is not None:
            assert_as_close(value, reference, exact, name, [m[name] for m in moved])
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


def of_package(name: str, function: Any) -> Any:
    """A function as if a module of this name had it: code of a known package may keep what it likes, while that of a
    user which keeps its calls is not run for a look (`probe.traces`)."""
    space = {**function.__globals__, "__name__": name}
    return types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
