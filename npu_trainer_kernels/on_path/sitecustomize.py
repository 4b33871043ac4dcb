"""Python runs this file when it starts: `npu-kernels run` puts its folder in front of PYTHONPATH.

So it is read by every Python of a command: launchers, ranks, workers, tools; of other versions and environments, too.
It imports neither torch nor transformers, and it never raises: a problem is one line on stderr. It waits until
something imports `transformers.trainer`, and lets `npu_trainer_kernels.run` do the rest. With NPU_KERNELS_RUN unset or
off it does nothing at all.
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
# Of the command itself, by `npu-kernels run`: it says at its end where there was no Trainer, in whatever process.
PID = "NPU_KERNELS_RUN_PID"
# A file of the first Python of a command, for its descendants: it is there when one of them has imported
# `transformers.trainer`, and not empty when one of them has built a Trainer.
SEEN = "NPU_KERNELS_RUN_SEEN"


def _warn(text: str) -> None:
    # stderr may be closed, or missing.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("npu-kernels run: " + text + "\n")


def _run_next() -> None:
    """The sitecustomize that this one stands in front of, if any, takes its place."""
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
        # A Python without this package: said when it trains, and not by every tool of another environment.
        return True
    try:
        return switch("NPU_KERNELS_RUN")
    except ValueError as error:
        _warn("%s; the kernels stay off" % error)  # noqa: UP031
        return False


class _Finder:
    """Finds nothing itself: it has what others find for `transformers.trainer` changed once it is there."""

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
    """Has `action` called with the module that a loader executes."""
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        original(module)
        action(module)

    loader.exec_module = exec_module


def _put_into(module: Any) -> None:
    if not _is_on():  # switched off since, by a program that says itself which Trainer has the kernels
        return
    _note("")
    try:
        from npu_trainer_kernels import run

        run.put_into(module, functools.partial(_note, "a Trainer was built"))
    except Exception as error:  # noqa: BLE001
        # Whatever it is, the command that was asked for trains all the same.
        _warn(
            "trains without the kernels: npu_trainer_kernels cannot be used by %s (%s: %s)"  # noqa: UP031
            % (sys.executable, type(error).__name__, error)
        )
        _note("that was said")


def _note(text: str) -> None:
    """For the first Python of the command, see SEEN."""
    file = os.environ.get(SEEN)
    if file:
        with contextlib.suppress(OSError), open(file, "a", encoding="ascii") as opened:
            opened.write(text)


def _watch() -> None:
    """The first Python of a command says at its end whether there was no Trainer."""
    if SEEN in os.environ:
        return
    os.environ[SEEN] = os.path.join(tempfile.gettempdir(), "npu-kernels-run-" + os.urandom(8).hex())
    atexit.register(_say_if_none, os.environ[SEEN], os.getpid())


def _say_if_none(file: str, pid: int) -> None:
    if os.getpid() != pid:  # forked
        return
    try:
        built = os.stat(file).st_size > 0
        os.remove(file)
    except OSError:
        # Nobody has imported a Trainer. Where nobody has asked for kernels for this very command, that is no news: it
        # may be any tool in a shell script.
        built = os.environ.get(PID) != str(pid)
    if not built:
        _warn("no Trainer of transformers was built, so that no kernels were used")


try:
    _run_next()
finally:
    if _is_on():
        sys.meta_path.insert(0, _Finder())
        _watch()
