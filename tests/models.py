"""Small models of the families that the tests patch: every number odd where it may be, random weights, fp32."""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.closeness import assert_as_close, rounded_if_needed

# Of the environments for the ends of the supported ranges (tox.ini) one has no TRL, and two an older one.
TRL = next((Version(d.version) for d in metadata.distributions(name="trl")), None)
HAS_TRL_HEAD = TRL is not None and Version("1.15") <= TRL


def module_of(family: str) -> Any:
    """The family's modules; None where the installed transformers is from before it, by its own list. What a module
    imports in vain is an error."""
    if family not in transformers.CONFIG_MAPPING:
        return None
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


SMALL: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
# name -> (config class, model class, what differs from SMALL)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "output_router_logits": True,
            "experts_implementation": "eager",
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "experts_implementation": "eager",
        },
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 8.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.0625}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    ),
}
# A module with a state, then attention.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA_RULE = {
    **_HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# Bodies whose state runs along a row, with the functions that are recognised.
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_DELTA_RULE, "tie_word_embeddings": True}),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_DELTA_RULE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            "experts_implementation": "eager",
        },
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_HYBRID,
            # No experts, and no loss of theirs: TRL 1.16 would read the configuration's number of them by another name.
            "num_local_experts": 0,
            "router_aux_loss_coef": 0.0,
            "shared_intermediate_size": 80,
            "mamba_n_heads": 8,
            "mamba_d_head": "auto",
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_chunk_size": 16,
            "logits_scaling": 8.0,
        },
    ),
}
if all(hasattr(transformers, config) for config, _, _ in HYBRIDS.values()):
    FAMILIES |= HYBRIDS


@functools.cache
def _classes(name: str) -> tuple[Any, Any]:
    config, model, _ = FAMILIES[name]
    return getattr(transformers, config), getattr(transformers, model)


def small_model(name: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A new model of a family, the same weights for the same seed, in training mode."""
    config, kind = _classes(name)
    torch.manual_seed(seed)
    model = kind(config(**{**SMALL, **FAMILIES[name][2], **overrides})).train()
    if name in HYBRIDS:
        _remember(model)
    return model


def _remember(model: torch.nn.Module) -> None:
    """Draws the steps of modules with a state from 0.001 to 0.1, as Mamba does. transformers begins with ones: a state
    is then forgotten within tokens, and transformers' formula loses the gradient of its gate in differences of sums."""
    for name, bias in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
            with torch.no_grad():
                bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def since(version: str, family: str, name: str) -> list[Any]:
    """A class that transformers has from a version on, and then must have; nothing with one before."""
    if Version(transformers.__version__) < Version(version):
        return []
    return [getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)]


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, padding and an end: needs no file and no hub."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({name: i for i, name in enumerate(["<pad>", "<eos>", *letters])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def batch(rows: int = 2, length: int = 17, ignored: int = 4) -> dict[str, torch.Tensor]:
    """Token ids with labels, the first few of each row ignored."""
    ids = torch.randint(3, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A model's loss, and the gradient of each of its parameters."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_trains_alike(found: Sequence[torch.Tensor], make: Callable[[], torch.nn.Module]) -> None:
    """Holds what `loss_and_gradients` returns for `batch()` to the accuracy rule; `make` makes the unpatched model."""
    plain, exact = make(), make().double()
    with in_double():
        truth = loss_and_gradients(exact, batch())
    expected = loss_and_gradients(plain, batch())
    assert_outcome_close(plain, found, expected, truth, lambda: loss_and_gradients(plain, batch()))


def assert_outcome_close(
    model: torch.nn.Module, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor], again: Callable[[], Sequence[torch.Tensor]],
) -> None:  # fmt: skip
    """Compares what `loss_and_gradients` returns of a model by the one accuracy rule.

    `again` computes what is expected once more, with the unpatched model; its rounding is changed if that is needed.
    """
    names, moved = ["loss", *(name for name, _ in model.named_parameters())], rounded_if_needed(again)
    for i, (actual, reference, exact, name) in enumerate(zip(found, expected, truth, names, strict=True)):
        assert_as_close(actual, reference, exact, name, moved(i))


class InDouble(TorchFunctionMode):
    """Computes in fp64 what a model wants in fp32: the truth must not be rounded by a norm's own cast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def doubled(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*tree_map(doubled, args), **tree_map(doubled, kwargs or {}))


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
