"""The models whose training steps are measured, with random weights."""

from typing import Any

from . import flash

__all__ = ["MODELS", "build_model", "model_class"]

_QWEN3_4B = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip

# (prefix of the configuration class, its arguments, dtype of the weights)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-1b": (
        "Llama",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    "llama-8b": (
        "Llama",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    "qwen3-14b": (
        "Qwen3",
        {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    "qwen3-0.6b": (
        "Qwen3",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    "qwen2.5-1.5b": (
        "Qwen2",
        {
            "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    "qwen3-4b": ("Qwen3", _QWEN3_4B, "bfloat16"),
    "qwen3-4b-8-layers": ("Qwen3", {**_QWEN3_4B, "num_hidden_layers": 8}, "bfloat16"),
    "gemma3-1b": (
        "Gemma3Text",
        {
            "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
            "tie_word_embeddings": True, "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    # A small Qwen3-30B-A3B. All sizes of mixtures of experts are even, so that two ranks can split them.
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "num_experts": 64, "moe_intermediate_size": 512, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    # Of the size of the Qwen3.5 of 0.8B: three of four layers have a gated delta rule.
    "qwen3.5-0.8b": (
        "Qwen3_5Text",
        {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
            "tie_word_embeddings": True, "max_position_embeddings": 8192,
        },
        "bfloat16",
    ),
    # The models of `examples/`.
    "demo-llama": (
        "Llama",
        {
            "hidden_size": 160, "intermediate_size": 432, "num_hidden_layers": 4, "num_attention_heads": 5,
            "num_key_value_heads": 5, "vocab_size": 8009, "max_position_embeddings": 512,
        },
        "float32",
    ),
    "demo-qwen3": (
        "Qwen3",
        {
            "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 258, "max_position_embeddings": 512,
        },
        "float32",
    ),
    "demo-qwen3-moe": (
        "Qwen3Moe",
        {
            "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "vocab_size": 8010, "max_position_embeddings": 512,
        },
        "float32",
    ),
    "demo-gemma3": (
        "Gemma3Text",
        {
            "hidden_size": 128, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 8009, "sliding_window": 64,
            "tie_word_embeddings": True, "max_position_embeddings": 512,
        },
        "float32",
    ),
    "demo-qwen3.5": (
        "Qwen3_5Text",
        {
            "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "vocab_size": 258, "max_position_embeddings": 512,
        },
        "float32",
    ),
    "tiny-gemma3": (
        "Gemma3Text",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 97, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64,
        },
        "float32",
    ),
    "tiny-qwen3": (
        "Qwen3",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 97, "tie_word_embeddings": True,
            "max_position_embeddings": 64,
        },
        "float32",
    ),
    "tiny-qwen3-moe": (
        "Qwen3Moe",
        {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "vocab_size": 98, "max_position_embeddings": 64,
        },
        "float32",
    ),
    "tiny-llama": (
        "Llama",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64,
        },
        "float32",
    ),
}  # fmt: skip


def _config_class(size: str) -> Any:
    import transformers

    return getattr(transformers, f"{MODELS[size][0]}Config")


def model_class(size: str) -> Any:
    """Returns transformers' class for a model of `MODELS`."""
    import transformers

    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[_config_class(size)]


def build_model(size: str, attention: str | None = None, length: int = 0, seed: int = 0) -> Any:
    """Creates a model of `MODELS` with random weights, in training mode, on the device that training would use.

    Args:
        size: a key of `MODELS`.
        attention: transformers' name for an attention, or `flash.NAME`; None: transformers' default.
        length: the tokens of a row, if the model needs more positions than `MODELS` says.
        seed: of the weights.
    """
    import torch

    from npu_trainer_kernels import device as devices

    _, arguments, dtype = MODELS[size]
    arguments = {**arguments, "max_position_embeddings": max(length, arguments["max_position_embeddings"])}
    config = _config_class(size)(pad_token_id=0, bos_token_id=None, eos_token_id=1, **arguments)
    if attention == flash.NAME:
        flash.register()
    config._attn_implementation = attention
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(devices.accelerator()):
            return model_class(size)(config).train()
    finally:
        torch.set_default_dtype(before)
