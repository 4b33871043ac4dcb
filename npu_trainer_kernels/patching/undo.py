"""Every change of an object outside this package goes through this module, so that everything can be restored."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .classes import is_patched_class, original_class

__all__ = ["Undo"]

_ABSENT = object()


def _wraps_attribute_of(value: Any, cls: type) -> bool:
    """Whether a value is a decorator's wrapper of an attribute of `cls`."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
        if any(value is each for each in vars(cls).values()):
            return True
    return False


class Undo:
    """Records replacements; `restore` reverts them in reverse order.

    The records keep no module alive. Attributes that other code has set in the meantime stay.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Callable[[], None]) -> None:
        """Registers a function that undoes a change that was just made."""
        self._steps.append(step)

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Sets an instance attribute (not a class's); undone to the previous instance value, or to none at all."""
        before = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        reference = weakref.ref(target)

        def undo() -> None:
            alive = reference()
            if alive is None or vars(alive).get(name, _ABSENT) is not value:
                return
            if before is _ABSENT:
                delattr(alive, name)
            else:
                setattr(alive, name, before)

        self.add(undo)

    def set_class(self, module: nn.Module, new: type[nn.Module]) -> None:
        """Changes the class of an instance to a subclass of its class.

        A wrapper that meanwhile derives its class from ours (FSDP2 does) keeps it; undoing removes ours from its bases.
        """
        # A copy of a patched model has patched classes already, so `type(module)` may not be the class to restore. The
        # class of a wrapper is.
        before = original_class(module) if is_patched_class(type(module)) else type(module)
        module.__class__ = new
        reference = weakref.ref(module)

        def undo() -> None:
            alive = reference()
            now = type(alive)
            if alive is None:
                return
            if now is new:
                alive.__class__ = before
            elif new in now.__mro__:
                bases = tuple(before if base is new else base for base in now.__bases__)
                # transformers wraps the forward that a subclass inherits, so the wrapped function may be ours.
                namespace = {name: value for name, value in vars(now).items() if not _wraps_attribute_of(value, new)}
                alive.__class__ = type(now.__name__, bases, namespace)

        self.add(undo)

    def silence(self, module: nn.Module) -> None:
        """Removes a module's forward hooks during a probe: those of a sharded module would gather its parameters."""
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            self.set_attribute(module, name, {})

    def restore(self) -> None:
        """Undoes every step once, the last one first, even if some of them fail.

        Raises:
            ExceptionGroup: the errors of the steps that failed, after all the others have been undone.
        """
        errors: list[Exception] = []
        while self._steps:
            step = self._steps.pop()
            try:
                step()
            except Exception as error:  # noqa: BLE001  whatever it is, it is raised below, when nothing is left to undo
                errors.append(error)
        if errors:
            raise ExceptionGroup("not everything could be put back", errors)
