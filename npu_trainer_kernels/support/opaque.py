"""Marks functions that `torch.compile` must call without tracing, and functions inside them that it may trace again.

Dynamo traces through a callback that the interpreter calls, on each thread, before it runs a frame. `opaque` removes
the callback for the duration of a call, and `traced` restores it. `torch.compiler.disable` only removes it, does not
expose it for restoring, and imports Dynamo (and with it Triton, which takes seconds) before anything is compiled.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

__all__ = ["opaque", "paused", "starts_no_graph", "traced"]

_F = TypeVar("_F", bound=Callable[..., Any])

# The callback that the running opaque function has removed.
_paused: contextvars.ContextVar[Any] = contextvars.ContextVar("npu_kernels_paused", default=None)


def starts_no_graph(fn: _F) -> _F:
    """Marks a function with which Dynamo must not begin a graph; it runs as plain Python then. Dynamo still traces the
    functions that it calls, and traces the function itself inside a graph that has already begun."""
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return fn


def _in_full_graph() -> bool:
    """Whether the current graph must not break (`fullgraph=True`). Only traced code may call this."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().output.root_tx.one_graph)


# Dynamo calls this function while tracing and treats the result as a constant.
_in_full_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def opaque(fn: _F, in_full_graphs: Callable[..., Any] | None = None) -> _F:
    """Marks a function that Dynamo calls without tracing it or the functions that it calls. The call breaks the graph.

    Args:
        fn: the function.
        in_full_graphs: a function that is traced instead if the graph must not break; without it torch raises then.
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
    """Whether an opaque function is running that compiled code has called."""
    return _paused.get() is not None


def traced(fn: _F) -> _F:
    """Marks a function that Dynamo traces even if an opaque function calls it."""

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
