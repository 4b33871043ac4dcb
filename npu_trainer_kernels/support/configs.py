"""Reads settings of a layer from transformers' configs, whose names for them differ."""

from typing import Any

__all__ = ["EXPERTS", "SLOTS", "rotated_share", "setting"]

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
