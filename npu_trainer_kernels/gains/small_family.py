"""A small model of a family, from the default configuration of its model type: what is served of it depends on the
installed versions alone, and on nothing that a user has configured."""

import warnings
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from ..patching.probe import VOCABULARY, miniature, small_config

__all__ = ["small_family"]

_MOST_PARAMETERS = 30_000_000
_DEPTH = 4  # layers of a tower that calls them so
# What default configurations leave to checkpoints, and a model cannot be built without.
_WHEN_UNSET = {"head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_routed_experts": 4}


def _small(config: Any, text: Any) -> Any:
    """Returns a small copy of a configuration, with small copies of the configurations inside."""
    small = small_config(config)
    rotation = vars(config).get("rope_parameters")
    if config is not text and isinstance(rotation, dict) and "rope_type" in rotation:
        # Towers know their own rotation alone.
        small.rope_parameters = {**vars(small)["rope_parameters"], "rope_type": rotation["rope_type"]}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            vars(small)[name] = _small(value, text)
        elif value is None and name in _WHEN_UNSET:
            vars(small)[name] = _WHEN_UNSET[name]
        elif name.endswith("_token_index") and type(value) is int:
            vars(small)[name] = min(value, VOCABULARY - 1)
        elif name == "depth" and type(value) is int:
            vars(small)[name] = min(value, _DEPTH)
    return small


def small_family(kind: str, cls: str) -> Any:
    """Returns a model in evaluation mode: on the CPU with random weights, or without weights where it is too large.

    Args:
        kind: a model type that transformers has a configuration for.
        cls: the name of the class in transformers.

    Raises:
        Exception: whatever the configuration or the class raises: it has no default that a model can be made of.
    """
    made: Any = getattr(transformers, cls)
    config = transformers.CONFIG_MAPPING[kind]()
    if type(config) is not made.config_class:
        config = next((v for v in vars(config).values() if type(v) is made.config_class), config)
    small = _small(config, config.get_text_config())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = made(small).eval()
        if sum(p.numel() for p in model.parameters()) > _MOST_PARAMETERS:
            return model
        return miniature(made, small)
