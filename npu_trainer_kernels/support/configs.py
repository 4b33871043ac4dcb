"""What transformers' configs say of a layer, under the names that they have for it."""

from typing import Any

__all__ = ["EXPERTS", "SLOTS", "rotated_share", "setting"]

# Aria says moe_..., Gemma 4 top_k_experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SLOTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")


def setting(config: Any, *names: str, layer: int = 0) -> Any:
    """The first of these that a config has for a layer; None: it has none of them.

    Where layers differ, as Gemma 4's do, transformers raises when the whole config is asked.
    """
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def rotated_share(config: Any) -> float:
    """The share of a head that a config's first layer rotates."""
    rotation = setting(config, "rope_parameters") or {}
    kinds = setting(config, "layer_types") or [""]
    # By kinds of layers, where these differ; transformers 4 has no such dict.
    share = (rotation.get(kinds[0]) or rotation).get("partial_rotary_factor")
    return float(share or setting(config, "partial_rotary_factor", "rotary_pct") or 1.0)
