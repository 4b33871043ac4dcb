"""The models that a Trainer holds beside the one it trains: reference, teacher, reward and value models.

They are found by what the Trainer has, not by the names of its attributes, so that trainers nobody has thought of are
served as well.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import Trainer

__all__ = ["held_models"]


def _modules(name: str, value: Any) -> Iterable[tuple[str, nn.Module]]:
    """The modules that an attribute holds: itself, or in a list, tuple or mapping."""
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
    """Every model with parameters that a Trainer's attributes hold and that is no part of the trained one, by name.

    Wrappers for data parallelism are taken off. A model that stands under two names has the first.
    """
    trained = extract_model_from_parallel(trainer.model)
    known = {id(module) for module in trained.modules()}
    found: dict[str, nn.Module] = {}
    for attribute, value in list(vars(trainer).items()):
        for name, wrapped in _modules(attribute, value):
            model = extract_model_from_parallel(wrapped)
            # The trained model may stand in a wrapper that is none of accelerate's.
            whole = {id(module) for module in model.modules()}
            if known & whole or not any(True for _ in model.parameters()):
                continue
            found[name] = model
            known |= whole
    return found
