"""Classes that wrappers derive from ours (FSDP2's) stay where something was patched before and after the wrapping."""

from torch import nn

from npu_trainer_kernels.patching.classes import derived
from npu_trainer_kernels.patching.undo import Undo


class _Wrapper:
    """As torch's FSDPModule, a base that is put in front of a module's class."""


def _wrap(module: nn.Module) -> type:
    cls = type(module)
    module.__class__ = type(f"Wrapped{cls.__name__}", (_Wrapper, cls), {})
    return cls


def test_patched_before_and_after_a_wrapper():
    module, undo = nn.Linear(2, 2), Undo()
    undo.set_class(module, derived(type(module), {"first": True}))
    _wrap(module)
    undo.set_class(module, derived(type(module), {"second": True}))
    assert module.first
    assert module.second
    assert isinstance(module, _Wrapper)
    undo.restore()
    assert isinstance(module, _Wrapper)
    assert type(module).__mro__[1:3] == (_Wrapper, nn.Linear)
    assert not hasattr(module, "first")
    assert not hasattr(module, "second")


def test_patched_twice_without_one():
    module, undo = nn.Linear(2, 2), Undo()
    undo.set_class(module, derived(type(module), {"first": True}))
    undo.set_class(module, derived(type(module), {"second": True}))
    undo.restore()
    assert type(module) is nn.Linear
