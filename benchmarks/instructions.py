"""Counts the instructions that the host executes for a function: by hardware counters, or by single steps.

Hardware counters are exact and cost nothing, but a virtual machine seldom has them. Single steps need no hardware: a
second process stops the calling thread after every instruction (ptrace), which takes about 20 microseconds each. Both
count instructions in user mode; a system call is one. Python's garbage collector rests while steps are counted, since a
collection that falls into one call would be counted whole.
"""

import ctypes
import errno
import gc
import mmap
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["COUNTERS", "Counter", "Hardware", "Steps", "counter_of"]

# The number of perf_event_open, and where PTRACE_PEEKUSER finds the address of the next instruction. Only x86 needs it:
# a step there is one repetition of a string instruction (`rep movsb`), which counts once however often it repeats.
_MACHINES: dict[str, tuple[int, int | None]] = {"x86_64": (298, 128), "aarch64": (241, None)}
_PEEKUSER, _SINGLESTEP, _DETACH, _SEIZE, _INTERRUPT = 3, 9, 17, 0x4206, 0x4207
_PR_SET_PTRACER = 0x59616D61
_BEFORE, _COUNTED, _DONE = range(3)
_ANSWER = struct.Struct("q")


class Counter(Protocol):
    """A way to count.

    Attributes:
        name: what counts, for reports.
        calls: the number of calls after which a mean is reproducible within a hundredth, at a bearable cost.
    """

    name: str
    calls: int

    def count(self, function: Callable[[], Any]) -> tuple[Any, int]:
        """Returns the function's result and the number of its instructions."""


def _machine(what: str) -> tuple[int, int | None]:
    found = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if found is None:
        raise OSError(errno.ENOSYS, f"no {what} are known on {sys.platform} {platform.machine()}")
    return found


class Hardware:
    """Counts the user-mode instructions of this process, including threads that start later.

    Raises:
        OSError: this machine does not count them.
    """

    name, calls = "hardware counters", 200

    def __init__(self) -> None:
        number, _ = _machine("hardware counters")
        # perf_event_attr: hardware counter 1 (instructions), with children, without the kernel and the hypervisor.
        attributes = struct.pack("=IIQQQQQ", 0, 112, 1, 0, 0, 0, 1 << 1 | 1 << 5 | 1 << 6).ljust(112, b"\0")
        self._file = ctypes.CDLL(None, use_errno=True).syscall(number, attributes, 0, -1, -1, 0)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "perf_event_open counts no instructions here")

    def _now(self) -> int:
        found: int = _ANSWER.unpack(os.read(self._file, 8))[0]
        return found

    def count(self, function: Callable[[], Any]) -> tuple[Any, int]:
        """Returns the function's result and the number of its instructions."""
        begun = self._now()
        result = function()
        return result, self._now() - begun


class Steps:
    """Counts the instructions of the main thread, which must be the caller, by single steps of it, by a process forked
    for each count.

    Other threads run on uncounted. A backward of CPU tensors is counted whole, since autograd runs it on the thread
    that asks for it. Signals reach the thread as ever, and the instructions of their handlers are counted.

    Raises:
        OSError: this process may not be traced, is traced already (by a debugger, say), or has lost its tracer.
    """

    name, calls = "single steps", 1

    def __init__(self) -> None:
        self._place = _machine("single steps")[1]
        self._own = 0
        _, self._own = self.count(lambda: None)

    def count(self, function: Callable[[], Any]) -> tuple[Any, int]:
        """Returns the function's result and the number of its instructions."""
        thread, phase = os.getpid(), mmap.mmap(-1, 1)
        ours, theirs = socket.socketpair()
        cpus, collects = os.sched_getaffinity(0), gc.isenabled()
        # A tracer that is killed leaves its last step behind, a trap that would end this process.
        trapped = signal.signal(signal.SIGTRAP, lambda number, frame: None)
        # The two processes run by turns. On two CPUs each turn would wait for the other CPU to wake up.
        os.sched_setaffinity(0, {min(cpus)})
        gc.disable()
        tracer = os.fork()
        if tracer == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Control-C is for the traced process, which ends both
                ours.close()
                theirs.send(_ANSWER.pack(_trace(thread, self._place, theirs, phase)))
            finally:
                os._exit(0)
        theirs.close()
        try:
            # Yama lets a process trace only its descendants, unless these ask for another tracer. Without Yama: EINVAL.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, tracer, 0, 0, 0)
            ours.send(b"1")
            _answer(ours)
            try:
                phase[0] = _COUNTED
                result = function()
            finally:
                phase[0] = _DONE
            return result, _answer(ours) - self._own
        finally:
            os.waitpid(tracer, 0)
            ours.close()
            os.sched_setaffinity(0, cpus)
            signal.signal(signal.SIGTRAP, trapped)
            if collects:
                gc.enable()


def _answer(channel: socket.socket) -> int:
    """Returns the tracer's number; a negative one is the number of its error."""
    answer = channel.recv(_ANSWER.size)
    if len(answer) < _ANSWER.size:
        raise OSError(errno.ESRCH, "the process that counts single steps has died")
    number: int = _ANSWER.unpack(answer)[0]
    if number < 0:
        raise OSError(-number, f"ptrace counts no single steps here ({os.strerror(-number)})")
    return number


def _ptrace(libc: Any, request: int, thread: int, address: int = 0, data: int = 0) -> int:
    """Calls ptrace, and raises OSError where that fails."""
    found: int = libc.ptrace(request, thread, address, data)
    if found == -1:
        raise OSError(ctypes.get_errno(), "ptrace")
    return found


def _signal_of(status: int) -> int:
    """Returns the signal whose delivery has stopped a traced thread; 0 where a step or the tracer has stopped it."""
    stopped = status >> 8
    return 0 if stopped == signal.SIGTRAP or stopped > 0xFF else stopped


def _trace(thread: int, place: int | None, channel: socket.socket, phase: mmap.mmap) -> int:
    """Steps a thread until the phase is `_DONE`. Returns the instructions of `_COUNTED`, or minus an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    try:
        channel.recv(1)  # the thread has allowed it
        _ptrace(libc, _SEIZE, thread)
        _ptrace(libc, _INTERRUPT, thread)
        pending = _signal_of(os.waitpid(thread, 0)[1])
        channel.send(_ANSWER.pack(0))
        count = before = 0
        while (now := phase[0]) != _DONE:
            _ptrace(libc, _SINGLESTEP, thread, 0, pending)
            pending = _signal_of(os.waitpid(thread, 0)[1])
            if now == _COUNTED and not pending:
                at = 0 if place is None else _ptrace(libc, _PEEKUSER, thread, place)
                count += place is None or at != before
                before = at
        _ptrace(libc, _DETACH, thread, 0, pending)
    except OSError as error:
        return -(error.errno or errno.EIO)
    return count


COUNTERS: dict[str, Callable[[], Counter]] = {"hardware": Hardware, "steps": Steps}


def counter_of(name: str) -> Counter:
    """Returns the counter `"hardware"` or `"steps"`; for `"auto"` the first of them that this machine has.

    Raises:
        OSError: there is none; the message says why, of each that was asked for.
    """
    refused = []
    for make in COUNTERS.values() if name == "auto" else (COUNTERS[name],):
        try:
            return make()
        except OSError as error:
            refused.append(error)
    raise OSError(refused[-1].errno, "; ".join(str(error.strerror) for error in refused))
