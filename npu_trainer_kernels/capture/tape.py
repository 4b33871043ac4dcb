"""What a device's graph may hold, checked operator by operator, and a tape that stands in for a graph on the CPU.

A graph replays kernels with the addresses that they were captured with. It remembers nothing else: a number that the
host has read, a tensor that Python has made, a draw of random numbers whose state is elsewhere would be those of the
capture for ever. `Watch` sees every operator (it is a dispatch mode) and refuses such an operator by name. A `Tape`
keeps the operators that it sees and runs them again into the same storages, so that a buffer that was not filled, or a
result that a later replay overwrites, shows on a CPU as it would on a device.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Nothing", "Refused", "Tape", "Watch", "parts_of"]


class Refused(Exception):
    """A computation that cannot be captured; the message says why, as a part of a sentence.

    Attributes:
        unknown: the storages of tensors that it reads and a graph may not read.
    """

    def __init__(self, reason: str, unknown: Iterable[int] = ()) -> None:
        super().__init__(reason)
        self.unknown = frozenset(unknown)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


_DEPTH = 3
"""How deep `parts_of` looks for tensors in the objects that a tensor has as attributes."""


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor, and those that it is made of if its class is not torch's own: the integers and scales of a
    quantised weight, which may be tensors inside of it, or attributes of it."""
    yield tensor
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    held, seen = [tensor], {id(tensor)}
    for _ in range(_DEPTH):
        held = [each for owner in held for each in getattr(owner, "__dict__", {}).values() if id(each) not in seen]
        held = [each for each in held if not isinstance(each, type | types.ModuleType | torch.nn.Module)]
        seen.update(map(id, held))
        yield from (each for each in held if isinstance(each, torch.Tensor))


_BY_MASK = frozenset(("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index",
                      "aten::_index_put_impl_"))  # fmt: skip


def _reads_the_host(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an operator's result, or the size of it, is known only when the device has computed its inputs."""
    name = func._schema.name
    if name in _BY_MASK:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


_WITHOUT_OPERATOR: dict[Any, str] = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__repr__: "__repr__",
    torch.Tensor.__format__: "__format__",
}
"""What reads numbers of a tensor on the CPU without an operator; on a device it copies the tensor to the host."""


class _OnTheHost(TorchFunctionMode):
    """Sees the calls that dispatch modes do not see."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        # Weak: a cycle would keep the watch's weak references to storages until Python's collector runs, and the C
        # library's heap would meanwhile grow by what each recording frees below them.
        self._watch = weakref.ref(watch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch = self._watch()
        if func in _WITHOUT_OPERATOR and watch is not None and watch.target is not None:
            raise Refused(f"it reads numbers of the device on the host ({_WITHOUT_OPERATOR[func]})")
        return func(*args, **kwargs or {})


@dataclass
class Tape:
    """Operators with their arguments and results, in order.

    `begin` and `end` do nothing: a `Watch` writes to the tape that is its `target`.
    """

    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = field(default_factory=list)

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Keeps an operator, unless its result is a view of its arguments, which stays one.

        Tensors are kept as aliases (`detach`), so that the tape keeps storages alive and no autograd graph.
        """
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        writes = func._schema.is_mutable
        if not writes and results and all(_storage(t) in given for t in results):
            return
        args, kwargs, results = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, results))
        self.steps.append((func, args, kwargs, [] if writes else results))

    def replay(self) -> None:
        """Runs the operators again; every result is written to where it was recorded."""
        with torch.no_grad():
            for func, args, kwargs, results in self.steps:
                out = func(*args, **kwargs)
                for before, now in zip(
                    results, (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)), strict=False
                ):
                    before.copy_(now)


class Nothing:
    """Stands in the place of a tape while operators are checked and not kept, so that their results can be freed."""

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Keeps nothing."""


class Watch(TorchDispatchMode):
    """Checks every operator, and writes those that run while `target` is a tape to it.

    Autograd restores dispatch modes after each of its nodes, so the mode stays on from the first operator of a forward
    to the last one of its backward, and `target` says which part is recorded.

    Args:
        known: the tensors that a graph may read: the inputs, which are filled before each replay, and parameters and
            buffers, whose addresses are compared before each replay.
        fixed: those of them that must not be written to.

    Attributes:
        target: the tape that is written to, or `Nothing`; None: operators are not looked at (attention between two
            pieces).
    """

    def __init__(self, known: Iterable[torch.Tensor], fixed: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.target: Tape | Nothing | None = None
        self._fixed = {_storage(part) for t in fixed for part in parts_of(t)}
        self._known = {_storage(t) for t in known} | self._fixed
        # A storage that is freed would give its address to another one. A weak reference keeps the address alone.
        self._places: list[StorageWeakRef] = []
        self._on_the_host = _OnTheHost(self)

    def __enter__(self) -> Watch:
        self._on_the_host.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._on_the_host.__exit__(*error)

    def knows(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds inputs: what attention returns between two pieces, gradients that a backward begins with."""
        for tensor in tensors:
            self._known.add(_storage(tensor))
            self._places.append(StorageWeakRef(tensor.untyped_storage()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.target is None:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if _reads_the_host(func, tensors):
            raise Refused(f"it reads numbers of the device on the host ({name})")
        if _draws(func, args, kwargs):
            raise Refused(f"it draws random numbers ({name})")
        unknown = [at for at in map(_storage, tensors) if at not in self._known]
        if unknown:
            raise Refused(f"it reads a tensor that is no input, parameter or buffer of it ({name})", unknown)
        if func._schema.is_mutable:
            written = [
                value for argument, value in _by_argument(func, args, kwargs)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]  # fmt: skip
            for tensor in tree_leaves(written):
                if isinstance(tensor, torch.Tensor) and _storage(tensor) in self._fixed:
                    raise Refused(f"it writes to a parameter or a buffer ({name})")
        out = func(*args, **kwargs)
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        devices = {t.device for t in tensors}
        if devices and (len(devices) > 1 if name == "copy_" else any(t.device not in devices for t in results)):
            raise Refused(f"it copies numbers from a device to another one ({name})")
        self.knows(results)
        self.target.add(func, args, kwargs, out)
        return out


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention that drops nothing does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    drops = any(argument.name == "dropout_p" for argument in func._schema.arguments)
    return not drops or any(a.name == "dropout_p" and bool(value) for a, value in _by_argument(func, args, kwargs))


def _by_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
