"""Finds the models that a Trainer has besides the one it trains: reference, teacher, reward and value models.

They are found by the values of the Trainer's attributes, not by their names, so this works for unknown trainers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import Trainer

__all__ = ["held_models"]


def _modules(name: str, value: Any) -> Iterable[tuple[str, nn.Module]]:
    """Yields the modules of an attribute: itself, or those in a list, tuple or mapping."""
    if isinstance(value, nn.Module):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            if isinstance(each, nn.Module):
                yield f"{name}[{index}]", each
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(each, nn.Module):
                yield f"{name}[{key!r}]", each


def held_models(trainer: Trainer) -> dict[str, nn.Module]:
    """Returns by name every model with parameters in a Trainer's attributes that is no part of the trained one.

    Wrappers for data parallelism are removed. A model in two attributes has the name of the first.
    """
    trained = extract_model_from_parallel(trainer.model)
    known = {id(module) for module in trained.modules()}
    found: dict[str, nn.Module] = {}
    for attribute, value in list(vars(trainer).items()):
        for name, wrapped in _modules(attribute, value):
            model = extract_model_from_parallel(wrapped)
            # The trained model may be in a wrapper that accelerate does not remove.
            whole = {id(module) for module in model.modules()}
            if known & whole or not any(True for _ in model.parameters()):
                continue
            found[name] = model
            known |= whole
    return found
