"""The one way in which anything outside this package is changed, so that everything can be changed back."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Undo"]

_ABSENT = object()


def _wraps_attribute_of(value: Any, cls: type) -> bool:
    """Whether a function is a decorated one of a class's own."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
        if any(value is each for each in vars(cls).values()):
            return True
    return False


class Undo:
    """Records replaced attributes and classes; `restore` puts them back in reverse order."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Callable[[], None]) -> None:
        """Registers what undoes a change that was just made."""
        self._steps.append(step)

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Sets an instance attribute (not a class's); undone to the previous instance value, or to none at all."""
        before = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        # Weak: what is recorded must not keep a model alive.
        reference = weakref.ref(target)

        def undo() -> None:
            alive = reference()
            if alive is not None and before is _ABSENT:
                delattr(alive, name)
            elif alive is not None:
                setattr(alive, name, before)

        self.add(undo)

    def set_class(self, module: nn.Module, new: type[nn.Module]) -> None:
        """Changes the class of an instance to a subclass of its own.

        Wrappers that subclass on top of ours meanwhile (FSDP2 does) keep their class; ours is taken out from below.
        """
        before = type(module)
        module.__class__ = new

        def undo() -> None:
            now = type(module)
            if now is new:
                module.__class__ = before
            elif new in now.__mro__:
                bases = tuple(before if base is new else base for base in now.__bases__)
                # transformers wraps the forward that a subclass inherits, so that the wrapper may have ours.
                namespace = {name: value for name, value in vars(now).items() if not _wraps_attribute_of(value, new)}
                module.__class__ = type(now.__name__, bases, namespace)

        self.add(undo)

    def silence(self, module: nn.Module) -> None:
        """Takes a module's forward hooks off, for a probe: those of a sharded module would gather its parameters."""
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            self.set_attribute(module, name, {})

    def restore(self) -> None:
        """Undoes every step, the last one first. A step is forgotten before it runs: nothing is undone twice."""
        while self._steps:
            self._steps.pop()()
