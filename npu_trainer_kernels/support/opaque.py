"""What `torch.compile` must call and not trace, and what it may trace again inside of that.

Dynamo, which traces, is a callback that the interpreter asks before it runs a frame, on each thread. `opaque` takes it
away for the length of a call, and `traced` gives it back. torch's own `torch.compiler.disable` does the first alone,
keeps the callback to itself, and imports Dynamo (and with it Triton, seconds long) before anything is compiled.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

__all__ = ["opaque", "paused", "starts_no_graph", "traced"]

_F = TypeVar("_F", bound=Callable[..., Any])

# What an opaque function that is running has taken away.
_paused: contextvars.ContextVar[Any] = contextvars.ContextVar("npu_kernels_paused", default=None)


def starts_no_graph(fn: _F) -> _F:
    """Marks a function that is run as it stands where Dynamo would begin a graph with it; what it calls is traced, and
    so is the function itself inside of a graph that something else has begun."""
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return fn


def _in_full_graph() -> bool:
    """Whether the graph that is being traced may not be broken (`fullgraph=True`); asked by what is traced alone."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().output.root_tx.one_graph)


# Dynamo calls it where it is traced, and takes the answer for a constant.
_in_full_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def opaque(fn: _F, in_full_graphs: Callable[..., Any] | None = None) -> _F:
    """Marks a function that is called and not traced, with all that it calls: a break of the graph.

    Args:
        fn: the function.
        in_full_graphs: what is traced instead where no break is allowed; without it that is torch's error.
    """

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        tracing = set_eval_frame(None)
        if tracing is None:
            return fn(*args, **kwargs)
        token = _paused.set(tracing)
        try:
            return fn(*args, **kwargs)
        finally:
            _paused.reset(token)
            set_eval_frame(tracing)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    called._torchdynamo_disable_msg = "npu_trainer_kernels runs it outside of graphs"  # type: ignore[attr-defined]
    starts_no_graph(called)
    if in_full_graphs is None:
        return called  # type: ignore[return-value]

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and _in_full_graph():
            return in_full_graphs(*args, **kwargs)
        return called(*args, **kwargs)

    return starts_no_graph(wrapper)  # type: ignore[return-value]


def paused() -> bool:
    """Whether an opaque function is running that something compiled has called."""
    return _paused.get() is not None


def traced(fn: _F) -> _F:
    """Marks a function that is traced again although it is called inside of an opaque one."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or (tracing := _paused.get()) is None:
            return fn(*args, **kwargs)
        token = _paused.set(None)
        set_eval_frame(tracing)
        try:
            return fn(*args, **kwargs)
        finally:
            set_eval_frame(None)
            _paused.reset(token)

    return wrapper  # type: ignore[return-value]
