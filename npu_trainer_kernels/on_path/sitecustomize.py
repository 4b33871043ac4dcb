"""Python runs this file when it starts, since `npu-kernels run` puts its folder first in PYTHONPATH.

Every Python process of a command runs it: launchers, ranks, workers, tools, also those of other versions and
environments. It imports neither torch nor transformers, and never raises: a problem is one line on stderr. When code
imports `transformers.trainer`, it calls `npu_trainer_kernels.run`. If NPU_KERNELS_RUN is unset or off, it does nothing.
"""

import atexit
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from typing import Any

TRAINER = "transformers.trainer"
# Set by `npu-kernels run` to the id of the command's first process, which warns at its end if no process of the command
# had a Trainer.
PID = "NPU_KERNELS_RUN_PID"
# The path of a file that a command's first Python process shares with its descendants: the file exists when one of them
# has imported `transformers.trainer`, and is not empty when one of them has built a Trainer.
SEEN = "NPU_KERNELS_RUN_SEEN"
_NONE = (
    "no Trainer of transformers was built, so that no kernels were used: if the command failed, its own message is "
    "above; a training loop without a Trainer needs apply_npu_kernels(model)"
)
_ASKING = frozenset(("-h", "--help", "--version"))
# The possible cause that is named if there was no Trainer, but there were other processes.
_LOST = (
    "; if a process that it has started trained, the environment did not reach that process (PYTHONPATH, "
    "NPU_KERNELS_RUN): it was cleared, or Python had the option -I, -E or -S"
)


def _warn(text: str) -> None:
    # stderr may be closed, or missing.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("npu-kernels run: " + text + "\n")


def _run_next() -> None:
    """Runs the sitecustomize that this one hides, if there is one, under its usual name."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _is_on() -> bool:
    if not os.environ.get("NPU_KERNELS_RUN"):
        return False
    try:
        from npu_trainer_kernels.support.switch import switch
    except ImportError:
        # This Python lacks the package. It warns only if it trains, since it may be a tool of another environment.
        return True
    try:
        return switch("NPU_KERNELS_RUN")
    except ValueError as error:
        _warn("%s; the kernels stay off" % error)  # noqa: UP031
        return False


class _Finder:
    """An import hook that lets the other finders find `transformers.trainer`, and changes the module after its
    import."""

    looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != TRAINER or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _call_after(spec.loader, _put_into)
        return spec


def _call_after(loader: Any, action: Any) -> None:
    """Makes a loader call `action` with the module that it has executed."""
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        original(module)
        action(module)

    loader.exec_module = exec_module


def _put_into(module: Any) -> None:
    if not _is_on():  # a program that applies the kernels itself may have switched it off
        return
    _note("")
    try:
        from npu_trainer_kernels import run

        run.put_into(module, functools.partial(_note, "a Trainer was built"))
    except Exception as error:  # noqa: BLE001
        # Whatever the error is, the command trains without the kernels.
        _warn(
            "trains without the kernels: npu_trainer_kernels cannot be used by %s (%s: %s)"  # noqa: UP031
            % (sys.executable, type(error).__name__, error)
        )
        _note("that was said")


def _note(text: str) -> None:
    """Appends to the file for the command's first Python process, see SEEN."""
    file = os.environ.get(SEEN)
    if file:
        with contextlib.suppress(OSError), open(file, "a", encoding="ascii") as opened:
            opened.write(text)


def _watch() -> None:
    """Makes the first Python process of a command warn at its end if there was no Trainer."""
    if SEEN in os.environ:
        return
    os.environ[SEEN] = os.path.join(tempfile.gettempdir(), "npu-kernels-run-" + os.urandom(8).hex())
    atexit.register(_say_if_none, os.environ[SEEN], os.getpid())


def _say_if_none(file: str, pid: int) -> None:
    if os.getpid() != pid:  # forked
        return
    # A command that shows its help or its version trains nothing.
    asked = not _ASKING.isdisjoint(sys.orig_argv)
    try:
        built = os.stat(file).st_size > 0
        os.remove(file)
    except OSError:
        # No process has imported a Trainer. This needs a warning only in the command of `npu-kernels run`; other
        # processes may be any tool in a shell script (`--print-env`).
        built = os.environ.get(PID) != str(pid)
    if not built and not asked:
        _warn(_NONE + (_LOST if _had_children() else ""))


def _had_children() -> bool:
    """Whether this process has started others, and waited for one of them."""
    try:
        import resource
    except ImportError:  # not on every system
        return False
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


try:
    _run_next()
finally:
    if _is_on():
        sys.meta_path.insert(0, _Finder())
        _watch()
