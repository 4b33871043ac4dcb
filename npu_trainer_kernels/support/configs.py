"""Reads settings of a layer from transformers' configs, whose names for them differ."""

import math
from typing import Any

__all__ = ["EXPERTS", "SLOTS", "rotated_share", "setting", "short_convolution"]

# Aria uses moe_..., Gemma 4 top_k_experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SLOTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")


def setting(config: Any, *names: str, layer: int = 0) -> Any:
    """Returns the first of these settings that a config has for a layer, or None.

    If layers differ, as in Gemma 4, transformers raises unless the config of one layer is read.
    """
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def rotated_share(config: Any) -> float:
    """Returns the fraction of a head that the first layer of a config rotates."""
    rotation = setting(config, "rope_parameters") or {}
    kinds = setting(config, "layer_types") or [""]
    # If kinds of layers differ, the dict has an entry for each; transformers 4 has no such dict.
    share = (rotation.get(kinds[0]) or rotation).get("partial_rotary_factor")
    return float(share or setting(config, "partial_rotary_factor", "rotary_pct") or 1.0)


# The number of taps in the configs of Qwen3-Next and its kin, LFM2, Mamba 2, and its hybrids.
_TAPS = ("linear_conv_kernel_dim", "conv_L_cache", "conv_kernel", "mamba_d_conv")


def short_convolution(config: Any) -> tuple[int, int]:
    """Returns the channels and taps of the short convolution in layers with a state, (0, 0) where a config has none
    whose channels its settings give."""
    taps = setting(config, *_TAPS)
    if type(taps) is not int:
        return 0, 0

    def product(*names: tuple[str, ...]) -> int:
        sizes = [setting(config, *each) for each in names]
        return math.prod(size if type(size) is int else 0 for size in sizes)

    hidden = setting(config, "hidden_size") or 0
    if setting(config, "conv_L_cache") is not None:
        return hidden, taps
    # Queries and keys, and values; or the state's inputs, and those of both of its products.
    channels = 2 * product(("linear_num_key_heads",), ("linear_key_head_dim",))
    channels += product(("linear_num_value_heads",), ("linear_value_head_dim",))
    if not channels:
        heads = product(
            ("mamba_n_heads", "mamba_num_heads", "num_heads"), ("mamba_d_head", "mamba_head_dim", "head_dim")
        )
        state = product(("mamba_n_groups", "n_groups"), ("mamba_d_state", "ssm_state_size", "state_size"))
        channels = heads + 2 * state if heads and state else 0
    return (channels, taps) if channels else (0, 0)
