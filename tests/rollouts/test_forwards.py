"""Forwards whose signatures do not say which arguments they take, as a class between a family's and a user's has."""

from typing import Any

import torch

from npu_trainer_kernels import apply_npu_kernels, completions, serve_rollouts
from tests.models import small_model

from .common import alone, greedy, prompts


def handing_on(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a class that hands all arguments on."""

    class HandingOn(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model.__class__ = HandingOn
    return model


def test_they_are_given_the_cache_by_the_name_of_the_installed_version():
    model = handing_on(small_model("llama").eval())
    expected = alone(model, prompts(), greedy())
    kernels = apply_npu_kernels(model, backend="torch")
    serve_rollouts(kernels)
    assert completions(model, prompts(), greedy())[0] == expected
