"""What the Trainer repeats on the host, in fewer steps: `model.train()` and the count of the parameters for each
micro-batch, and `model.zero_grad()` for each step of the optimizer.

Each of them walks over all modules with nested generators, and `train` sets each flag through `nn.Module.__setattr__`.
LoRA turns a few hundred modules into thousands. Here a plain walk over the modules' dictionaries visits the same
modules in the same order. Between two calls this module remembers only the number of the model's parameters, together
with all values from which it was counted, so it cannot miss a change of the model. A method that a class or an instance
defines itself is called as it is.

No module keeps an attribute: a method is lent to an instance just before the Trainer calls it, and the call itself
takes it away. So no pickle and no copy of the model has one.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..patching.undo import Undo

__all__ = ["Repeats"]

# The names that torch's `train` and walks read. A version of torch in which they read other names is left alone.
_TORCHS = {
    "train": {"isinstance", "bool", "ValueError", "training", "children", "train"},
    "children": {"named_children"},
    "named_children": {"set", "_modules", "items", "add"},
    "named_modules": {"set", "add", "_modules", "items", "named_modules"},
    "parameters": {"named_parameters"},
    "named_parameters": {"_named_members", "_parameters", "items"},
    "_named_members": {"set", "named_modules", "add"},
    "zero_grad": {
        "getattr", "warnings", "warn", "parameters", "grad", "grad_fn", "detach_", "requires_grad_", "zero_",
    },
}  # fmt: skip
# The names that transformers' count of parameters reads, in all of its versions. `_counted` covers each of them.
_COUNTS = {
    "named_modules", "isinstance", "nn", "Embedding", "named_parameters", "parameters", "list", "getattr", "hasattr",
    "bitsandbytes", "is_bitsandbytes_available", "ValueError", "Params4bit", "requires_grad", "element_size",
    "quant_storage", "itemsize", "numel", "append", "sum",
}  # fmt: skip
_SETS_TRAINING = ("train", "children", "named_children")
_WALKS = ("parameters", "named_parameters", "_named_members", "named_modules")


def _names(code: Any) -> set[str]:
    """Returns the names that a function reads, and those that the functions within it read."""
    inner = (_names(each) for each in code.co_consts if hasattr(each, "co_names"))
    return set(code.co_names).union(*inner)


def _is_torchs(name: str) -> bool:
    """Whether a method of `nn.Module` does what it does in the torch that this was written for: a later torch may do
    more, and other code may have replaced it."""
    code = getattr(getattr(nn.Module, name), "__code__", None)
    return code is not None and _names(code) == _TORCHS[name]


def _inherits(cls: type, names: Iterable[str]) -> bool:
    """Whether a class has the methods of `nn.Module` itself."""
    return all(getattr(cls, name, None) is getattr(nn.Module, name) for name in names)


class _Lent:
    """A method that an instance has of its own until it is called or taken back."""

    def __init__(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        self._own, self._name, self._function = vars(target), name, function
        self._own[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.take_back()
        return self._function(*args, **kwargs)

    def take_back(self) -> None:
        """Removes the method, unless it is gone."""
        if self._own.get(self._name) is self:
            del self._own[self._name]


def _is_plain(cls: type) -> bool:
    """Whether `train` of a module of a class does no more than to set `training`, and to go on with the children."""
    return (
        _inherits(cls, (*_SETS_TRAINING, "__setattr__", "__getattribute__"))
        # A property of that name would be set instead.
        and not any("training" in vars(each) for each in cls.__mro__)
    )


def _set_training(module: Any, mode: bool, plain: dict[type, bool]) -> None:
    """Does `module.train(mode)`. `plain` caches `_is_plain` by class, for one walk: calls may change classes."""
    cls = type(module)
    known = plain.get(cls)
    if known is None:
        known = plain[cls] = _is_plain(cls)
    if known:
        own = module.__dict__
        if "training" in own and not ("train" in own or "children" in own or "named_children" in own):
            own["training"] = mode
            if own["_modules"]:
                # A child that has two names is called once by torch, too.
                for child in dict.fromkeys(own["_modules"].values()):
                    if child is not None:
                        _set_training(child, mode, plain)
            return
    # The module's own `train` runs, and reaches the children sooner or later, whose walks are the long ones.
    children = vars(module).get("_modules", {}).values() if isinstance(module, nn.Module) else ()
    lent = [_lend_train(child) for child in children if isinstance(child, nn.Module) and child._modules]
    try:
        module.train(mode)
    finally:
        for each in lent:
            if each is not None:
                each.take_back()


def _lend_train(module: nn.Module) -> _Lent | None:
    """Makes the next `module.train` the plain walk, unless the instance has a `train` of its own."""
    if "train" in vars(module):
        return None

    def train(mode: bool = True) -> nn.Module:
        if not isinstance(mode, bool):
            return module.train(mode)  # raises
        _set_training(module, mode, {})
        return module

    return _Lent(module, "train", train)


def _all_modules(model: nn.Module) -> list[nn.Module] | None:
    """Returns the modules of `model.named_modules`, in its order; None if a module may define that method itself."""
    plain: dict[type, bool] = {}
    found: dict[nn.Module, None] = {}

    def walk(module: Any) -> bool:
        cls = type(module)
        known = plain.get(cls)
        if known is None:
            known = plain[cls] = _inherits(cls, ("named_modules", "__getattribute__"))
        own = module.__dict__
        if not known or "named_modules" in own:
            return False
        found[module] = None
        if own["_modules"]:
            for child in own["_modules"].values():
                if child is not None and child not in found and not walk(child):
                    return False
        return True

    walks = _inherits(type(model), _WALKS) and not any(name in vars(model) for name in _WALKS)
    return list(found) if walks and walk(model) else None


def _counted(model: nn.Module) -> tuple[Any, ...] | None:
    """Returns the values from which transformers counts a model's parameters: equal values have the same count. None if
    a module may define itself how modules or parameters are named.

    Which name a module has makes no difference: embeddings are told by their class, and no two modules share a name.
    """
    modules = _all_modules(model)
    if modules is None:
        return None
    found: list[Any] = []
    for place, module in enumerate(modules):
        parameters = module.__dict__["_parameters"]
        if parameters:
            for name, each in parameters.items():
                if each is not None:
                    # The identity tells which of them are one.
                    found += place, name, id(each), type(each), each.numel(), each.dtype, each.requires_grad
    return getattr(model, "is_loaded_in_4bit", False), list(map(type, modules)), found


class _Count:
    """`num_parameters` of a model, which counts again when anything has changed that it counts."""

    def __init__(self) -> None:
        self._key: Any = None
        self._number: Any = None

    @staticmethod
    def applies_to(method: Any) -> bool:
        """Whether a bound method is transformers' count, and reads only what `_counted` covers."""
        function = getattr(method, "__func__", None)
        code = getattr(function, "__code__", None)
        return (
            code is not None
            and isinstance(method.__self__, nn.Module)
            and function.__module__ == "transformers.modeling_utils"
            and _names(code) <= _COUNTS
            and all(_is_torchs(name) for name in _WALKS)
        )

    def number(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns `method(*args, **kwargs)`."""
        counted = _counted(method.__self__)
        if counted is None:
            return method(*args, **kwargs)
        key = (method.__func__, args, kwargs, counted)
        if key != self._key:
            self._key, self._number = key, method(*args, **kwargs)
        return self._number


def _zero(model: nn.Module, set_to_none: bool = True) -> None:
    """Does `model.zero_grad(set_to_none)`."""
    modules = _all_modules(model) if set_to_none and not getattr(model, "_is_replica", False) else None
    if modules is None:
        return model.zero_grad(set_to_none)
    for module in modules:
        for each in module.__dict__["_parameters"].values():
            if each is not None and each.grad is not None:
                each.grad = None
    return None


class Repeats:
    """Makes the walks of a trainer over its model short, once started.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._count = _Count()
        self._model: Any = None  # in a micro-batch and until the optimizer's step has ended
        self._stepped = False
        self._zeroing: _Lent | None = None

    def start(self, undo: Undo) -> None:
        """Makes them short until `undo` restores."""
        trainer = self._trainer
        train, count, rate = trainer.training_step, trainer.floating_point_ops, trainer._get_learning_rate

        @functools.wraps(train)
        def training_step(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._model = model
            walks = isinstance(model, nn.Module) and all(_is_torchs(name) for name in _SETS_TRAINING)
            lent = _lend_train(model) if walks else None
            try:
                return train(model, *args, **kwargs)
            finally:
                if lent is not None:
                    lent.take_back()

        @functools.wraps(count)
        def floating_point_ops(*args: Any, **kwargs: Any) -> Any:
            method: Any = getattr(trainer.model, "num_parameters", None)
            if not _Count.applies_to(method):
                return count(*args, **kwargs)
            lent = _Lent(method.__self__, "num_parameters", functools.partial(self._count.number, method))
            try:
                return count(*args, **kwargs)
            finally:
                lent.take_back()

        @functools.wraps(rate)
        def learning_rate(*args: Any, **kwargs: Any) -> Any:
            if self._stepped:
                self._lend_zero_grad()
            return rate(*args, **kwargs)

        undo.add(self.step_ended)
        undo.set_attribute(trainer, "training_step", training_step)
        undo.set_attribute(trainer, "floating_point_ops", floating_point_ops)
        undo.set_attribute(trainer, "_get_learning_rate", learning_rate)

    def optimizer_stepped(self) -> None:
        """The Trainer asks for the learning rate next, and then zeroes the gradients. Other callbacks, which may copy
        or save the model, come before that."""
        self._stepped = True

    def step_ended(self) -> None:
        """Takes `zero_grad` back if it was not called."""
        if self._zeroing is not None:
            self._zeroing.take_back()
        self._stepped, self._zeroing, self._model = False, None, None

    def _lend_zero_grad(self) -> None:
        self._stepped = False
        model = self._model
        if (
            isinstance(model, nn.Module)
            and _inherits(type(model), ("zero_grad",))
            and "zero_grad" not in vars(model)
            and all(_is_torchs(name) for name in ("zero_grad", *_WALKS))
        ):
            self._zeroing = _Lent(model, "zero_grad", functools.partial(_zero, model))
