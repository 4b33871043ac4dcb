"""Decorators of a forward are looked through where they leave its calls as they are."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.probe import plain_forward, rewritten_forward
from npu_trainer_kernels.patching.probe.wrappers import looked_through
from tests.closeness import assert_as_close, rounded
from tests.models import assert_trains_alike, batch, in_double, loss_and_gradients, small_model

Forward = Callable[..., Any]


def wrapping(call: Callable[..., Any]) -> Callable[[Forward], Forward]:
    """Returns a decorator whose wrapper is `call` of the forward and its arguments."""

    def decorator(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(forward, *args, **kwargs)

        return wrapper

    return decorator


def not_named(forward: Forward) -> Forward:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


def doubling(forward: Forward) -> Forward:
    def wrapper(self: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return forward(self, 2 * x, **kwargs)

    return wrapper


def with_keyword(forward: Forward, self: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("use_cache", bool(self.training))
    return forward(self, *args, **kwargs)


def known_alone(forward: Forward) -> Forward:
    """Drops what the forward has no parameter for; Llama's takes anything."""
    names = forward.__code__.co_varnames[: forward.__code__.co_argcount]

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{name: value for name, value in kwargs.items() if name in names})

    return wrapper


def counting(forward: Forward) -> Forward:
    calls = 0

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    return wrapper


def remembering(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.last = args
        return forward(self, *args, **kwargs)

    return wrapper


def caching(forward: Forward) -> Forward:
    made: list[Any] = []

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(forward(*args, **kwargs))
        return made[0]

    return wrapper


def where_asked(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and getattr(self, "checkpoints_itself", False):
            return checkpoint(functools.partial(forward, self, **kwargs), *args, use_reentrant=False)
        return forward(self, *args, **kwargs)

    return wrapper


class Holder:
    def __init__(self, forward: Forward) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward

    def __get__(self, module: Any, kind: Any) -> Any:
        return self if module is None else functools.partial(self.forward, module)


THROUGH = {
    "handed on": wrapping(lambda forward, *args, **kwargs: forward(*args, **kwargs)),
    "not named": not_named,
    "a keyword is filled in": wrapping(with_keyword),
    "deprecated": deprecate_kwarg("states", version="99.0.0", new_name="hidden_states"),
    "a tuple on request": can_return_tuple,
    "checkpointing": where_asked,
    "twice": lambda forward: deprecate_kwarg("mask", version="99.0.0", new_name="attention_mask")(
        deprecate_kwarg("states", version="99.0.0", new_name="hidden_states")(forward)
    ),
}
NOT = {
    "other values": (
        wrapping(lambda forward, self, x, *args, **kwargs: forward(self, 2 * x, *args, **kwargs)),
        "changes its hidden_states",
    ),
    "another result": (
        wrapping(lambda forward, *args, **kwargs: tuple(forward(*args, **kwargs))),
        "changes its result",
    ),
    "keywords dropped": (known_alone, "keeps back other keywords"),
    "an argument dropped": (
        wrapping(lambda forward, self, x, mask=None, *args, **kwargs: forward(self, x, None, *args, **kwargs)),
        "changes its attention_mask",
    ),
    "another module": (
        wrapping(lambda forward, self, *args, **kwargs: forward(nn.Identity(), *args, **kwargs)),
        "gives it other arguments",
    ),
    "called twice": (
        wrapping(lambda forward, *args, **kwargs: (forward(*args, **kwargs), forward(*args, **kwargs))[1]),
        "calls it 2 times",
    ),
    "no gradients": (torch.no_grad(), "changes the mode that it runs in"),
    "gradients": (torch.enable_grad(), "changes the mode that it runs in"),
    "autocast": (torch.autocast("cpu", torch.bfloat16), "changes the mode that it runs in"),
    "a count": (counting, "keeps a state"),
    "an attribute": (remembering, "keeps a state"),
    "a cache": (caching, "calls it 0 times"),
    "an object": (Holder, "does not hold it as a function holds a variable"),
    "a shape is read": (
        wrapping(lambda forward, self, x, *args, **kwargs: forward(self, x, *args, **kwargs) if x.shape[5] else None),
        "raises IndexError on a stand-in",
    ),
}


def layer(decorator: Callable[[Forward], Any], base: Any = LlamaDecoderLayer) -> Any:
    """Returns a class of decoder layers whose forward is decorated."""
    own = looked_through(LlamaDecoderLayer).function
    return type("Layer", (base,), {"forward": decorator(own)})


def model_of(kind: Any) -> Any:
    model = small_model("llama")
    for each in model.model.layers:
        each.__class__ = kind
    return model


@pytest.mark.parametrize("name", THROUGH)
def test_looked_through(name: str) -> None:
    kind = layer(THROUGH[name])
    expected = loss_and_gradients(model_of(kind), batch())
    with apply_npu_kernels(model := model_of(kind), ops=["add_rms_norm"]) as kernels:
        found = loss_and_gradients(model, batch())
        assert_trains_alike(found, lambda: model_of(kind))
        assert [site.ran for site in kernels.report().sites] == [2]
        # The decorator's own code runs around the rewritten forward, and around nothing else.
        inside = looked_through(kind)
        assert len(inside.wrappers) == (2 if name == "twice" else 1)
    assert all(map(torch.equal, loss_and_gradients(model, batch()), expected))


@pytest.mark.parametrize("name", NOT)
def test_left_alone(name: str) -> None:
    decorator, why = NOT[name]
    found = plain_forward(layer(decorator))
    assert isinstance(found, str)
    assert found.startswith("its forward is decorated by ")
    assert found.endswith(f", which {why}")


def test_an_object_that_is_called() -> None:
    assert plain_forward(layer(functools.partial)) == "its forward is no function, but of type partial"


def test_what_does_not_hand_on_and_names_nothing_is_a_forward_with_a_variable() -> None:
    assert plain_forward(layer(doubling)) == "its forward closes over variables"


def test_old_names_of_arguments_go_on_working() -> None:
    kind = layer(deprecate_kwarg("states", version="99.0.0", new_name="hidden_states"))
    model = model_of(kind)
    x = torch.randn(2, 5, 48)
    given = {"position_embeddings": model.model.rotary_emb(x, torch.arange(5)[None])}
    own = functools.partial(model.model.layers[0], **given)
    expected, moved = own(hidden_states=x), rounded(lambda: own(hidden_states=x))
    exact = copy.deepcopy(model.model.layers[0]).double()
    with in_double():
        truth = exact(hidden_states=x.double(), position_embeddings=[t.double() for t in given["position_embeddings"]])
    with apply_npu_kernels(model, ops=["add_rms_norm"]) as kernels:
        with pytest.warns(FutureWarning, match="deprecated"):
            found = model.model.layers[0](states=x, **given)
        assert_as_close(found, expected, truth, "the layer", moved)
        assert kernels.report().sites[0].ran == 1
    with warnings.catch_warnings(action="error"):
        model.model.layers[0](hidden_states=x, **given)


def test_a_wrapper_that_a_base_class_makes_is_not_put_around_twice() -> None:
    """Two checkpoints of a layer would compute it three times."""
    kind = layer(lambda forward: forward)
    model = model_of(kind)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    calls: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    with apply_npu_kernels(model, ops=["add_rms_norm"]) as kernels:
        found = loss_and_gradients(model, batch())
        assert kernels.report().sites
    assert len(calls) == 2
    assert_trains_alike(found, lambda: model_of(kind))


class _Made(nn.Module):
    """Its subclasses' forwards are wrapped, and so are the subclasses' subclasses' again."""

    def __init_subclass__(cls) -> None:
        forward = cls.forward

        @functools.wraps(forward)
        def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
            return 2 * forward(self, *args, **kwargs)

        cls.forward = doubled


class _Doubled(_Made):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class _TwiceDoubled(_Doubled):
    pass


def test_wrappers_of_each_subclass_are_left_to_the_next() -> None:
    for kind in (_Doubled, _TwiceDoubled):
        assert isinstance(plain_forward(kind), type(looked_through))
        assert rewritten_forward(kind)(kind(), 3.0) == 4.0


def test_a_function_that_refers_to_itself_refers_to_the_new_one() -> None:
    def decorator(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self).forward is not wrapper and hasattr(type(self), "asks"):
                raise RuntimeError("another function is the class's forward")
            return forward(self, *args, **kwargs)

        return wrapper

    kind = type("Kind", (nn.Module,), {"forward": decorator(looked_through(_Doubled).function)})
    made = rewritten_forward(kind)
    other = type("Other", (nn.Module,), {"forward": made, "asks": True})
    assert other()(3.0) == 4.0
