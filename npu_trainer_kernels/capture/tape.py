"""What a device's graph may hold, checked operator by operator, and a tape that stands in for a graph on the CPU.

A graph replays kernels with the addresses that they were captured with. It remembers nothing else: a number that the
host has read, a tensor that Python has made, a draw of random numbers whose state is elsewhere would be those of the
capture for ever. `Watch` sees every operator (it is a dispatch mode) and refuses such an operator by name. A `Tape`
keeps the operators that it sees and runs them again into the same storages, so that a buffer that was not filled, or a
result that a later replay overwrites, shows on a CPU as it would on a device.
"""

from __future__ import annotations

import functools
import operator
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
    """A computation that cannot be captured; the message says why, as a part of a sentence."""


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


class _Operator:
    """What an operator's schema says of it.

    Attributes:
        name: its name.
        by_mask: whether it reads numbers on the host if an index is a mask.
        reads: whether it always does: its result, or the size of it, is known when the device has computed its inputs.
        draws: whether it draws random numbers, unless `drops` is 0.
        drops: the place and the name of the argument by which attention drops; None: it has none.
        written: the places and names of the arguments that it writes to.
    """

    def __init__(self, func: Any) -> None:
        schema, tags = func._schema, func.tags
        self.name: str = schema.name.removeprefix("aten::")
        self.by_mask = schema.name in _BY_MASK
        self.reads = not self.by_mask and (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        )
        self.draws = torch.Tag.nondeterministic_seeded in tags
        named = [(i, argument) for i, argument in enumerate(schema.arguments)]
        self.drops = next(((i, each.name) for i, each in named if each.name == "dropout_p"), None)
        self.written = [(i, each.name) for i, each in named if each.alias_info is not None and each.alias_info.is_write]
        self.mutable: bool = schema.is_mutable

    def draws_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of one that draws random numbers does; attention that drops nothing does not."""
        return self.drops is None or bool(_argument(self.drops, args, kwargs))


_known_operators: dict[int, tuple[Any, _Operator]] = {}


def _operator(func: Any) -> _Operator:
    known = _known_operators.get(id(func))
    if known is None:
        known = _known_operators[id(func)] = func, _Operator(func)
    return known[1]


def _argument(place: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    i, name = place
    return args[i] if i < len(args) else kwargs.get(name)


# They take no Python function of their own: a look (`reads`) sees each one that is called for each operator.
_IS_TENSOR = functools.partial(type.__instancecheck__, torch.Tensor)
_IS_LIST, _IS_TUPLE = (functools.partial(type.__instancecheck__, kind) for kind in (list, tuple))
_DEVICE, _ADDRESS = operator.attrgetter("device"), operator.attrgetter("_cdata")


_NO_TENSORS = frozenset((
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip
"""Classes of arguments that have no tensors in them."""


def _tensors_of(values: Any) -> list[torch.Tensor]:
    """Returns the tensors among arguments or results of an operator, which are values or lists of values."""
    found = [*filter(_IS_TENSOR, values)]
    if len(found) < len(values):
        for each in (*filter(_IS_LIST, values), *filter(_IS_TUPLE, values)):
            found += _tensors_of(each)
    return found


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns the addresses of their storages."""
    return [*map(_ADDRESS, map(torch.Tensor.untyped_storage, tensors))]


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


class Watch(TorchDispatchMode):
    """Checks every operator, and writes those that run while `target` is a tape to it.

    Autograd restores dispatch modes after each of its nodes, so the mode stays on from the first operator of a forward
    to the last one of its backward, and `target` says which part is recorded.

    Args:
        known: the tensors that a graph may read: the inputs, which are filled before each replay, and parameters and
            buffers, whose addresses are compared before each replay.
        fixed: those of them that must not be written to.

    Attributes:
        target: the tape that is written to, or `Nothing`; None: operators are not looked at.
    """

    def __init__(self, known: Iterable[torch.Tensor], fixed: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.target: Tape | Nothing | None = None
        self._fixed = {_storage(part) for t in fixed for part in parts_of(t)}
        self._known = {_storage(t) for t in known} | self._fixed
        # A storage that is freed would give its address to another one. A weak reference keeps the address alone.
        self._places: list[StorageWeakRef] = []
        self._on_the_host = _OnTheHost(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps the method below so that it is not compiled, which costs ten calls for each operator."""
        return False

    def __enter__(self) -> Watch:
        self._on_the_host.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._on_the_host.__exit__(*error)

    def knows(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds inputs: gradients that a backward begins with, and what operators make."""
        for each in tensors:
            storage = each.untyped_storage()
            if storage._cdata not in self._known:
                self._known |= {storage._cdata}
                self._places += (StorageWeakRef(storage),)

    # A look (`reads`) sees each call that is made for each operator, and there are some hundred operators for a layer.
    # So loops stand here where calls would be shorter.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, target = kwargs or {}, self.target
        if target is None:
            return func(*args, **kwargs)
        of = _operator(func)
        tensors: list[torch.Tensor] = []
        for each in (*args, *kwargs.values()) if kwargs else args:
            kind = type(each)
            if kind is torch.Tensor:
                tensors += (each,)
            elif kind not in _NO_TENSORS:
                tensors += _tensors_of((each,))
        if of.reads or (of.by_mask and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])):
            raise Refused(f"it reads numbers of the device on the host ({of.name})")
        if of.draws and of.draws_now(args, kwargs):
            raise Refused(f"it draws random numbers ({of.name})")
        for tensor in tensors:
            if tensor.untyped_storage()._cdata not in self._known:
                raise Refused(f"it reads a tensor that is no input, parameter or buffer of it ({of.name})")
        for place in of.written:
            if not self._fixed.isdisjoint(_addresses(_tensors_of((_argument(place, args, kwargs),)))):
                raise Refused(f"it writes to a parameter or a buffer ({of.name})")
        out = func(*args, **kwargs)
        results = [out] if type(out) is torch.Tensor else _tensors_of((out,))
        where = tensors[0].device if tensors else None
        for tensor in (*tensors, *results):
            if tensor.device != where:
                self._stays_on_a_device(of, tensors, results)
        self.knows(results)
        if type(target) is Tape:
            target.add(func, args, kwargs, out)
        return out

    def _stays_on_a_device(self, of: _Operator, given: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Raises Refused if numbers have gone from a device to another one."""
        devices = set(map(_DEVICE, given))
        if devices and (len(devices) > 1 if of.name == "copy_" else not devices.issuperset(map(_DEVICE, results))):
            raise Refused(f"it copies numbers from a device to another one ({of.name})")
