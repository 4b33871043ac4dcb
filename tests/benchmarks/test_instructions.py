"""Single steps: the same code costs the same again, twice the work twice as much, and what stops them is named.

Steps need no hardware, so these tests are not skipped anywhere: where a container forbids ptrace they fail with the
error that the benchmark ends with.
"""

import ctypes
import errno
import gc
import mmap
import os
import platform
import signal

import pytest

from benchmarks import instructions
from benchmarks.instructions import Steps, counter_of

CPUS = os.sched_getaffinity(0)


@pytest.fixture(scope="module")
def steps():
    return Steps()


# Two counts of one function differ by some 300 instructions, probably when Python takes or returns a page of objects.
_PAGE = 500


def _count(steps, function):
    """The count of a function that was warmed up, since Python adapts its bytecode during the first calls."""
    for _ in range(10):
        function()
    return steps.count(function)[1]


def test_a_loop_costs_the_same_again_and_twice_as_much_for_twice_the_items(steps):
    some, twice, thrice = ([1] * length for length in (400, 800, 1200))
    one, two, again, three = (_count(steps, lambda items=items: sum(items)) for items in (some, twice, twice, thrice))
    assert abs(two - again) <= max(0.01 * two, _PAGE)
    assert two - one >= 400 * 5, "an item has more than five instructions"
    assert abs((three - two) - (two - one)) <= max(0.01 * (three - one), 2 * _PAGE)


def _loop(turns):
    for _ in range(turns):
        pass


def test_nothing_costs_nothing(steps):
    assert abs(steps.count(lambda: None)[1]) <= _PAGE


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86-64")
def test_machine_code_is_counted_by_instructions(steps):
    """A loop of 20,001 instructions is so many; `rep stosb` of 4,096 bytes is not as many as it has repetitions."""
    loop = b"\xb9\x10\x27\x00\x00" + b"\xff\xc9" + b"\x75\xfc" + b"\xc3"  # mov ecx, 10000; dec ecx; jnz -4; ret
    fill = b"\xb9\x00\x10\x00\x00" + b"\xf3\xaa" + b"\xc3"  # mov ecx, 4096; rep stosb; ret
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(loop.ljust(64, b"\0") + fill.ljust(64, b"\0") + b"\xc3")
    start, target = ctypes.addressof(ctypes.c_char.from_buffer(code)), ctypes.create_string_buffer(4096)

    def count(place):
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start + place)
        return _count(steps, lambda: function(target))

    loops, fills, empty = count(0), count(64), count(128)
    assert abs(loops - empty - 20_001) <= _PAGE
    assert abs(fills - empty - 2) <= _PAGE


def test_what_a_function_returns_and_raises_comes_through(steps):
    gc.enable()
    assert steps.count(gc.isenabled)[0] is False
    with pytest.raises(KeyError, match="from inside"):
        steps.count(lambda: {}["from inside"])
    assert gc.isenabled()
    assert os.sched_getaffinity(0) == CPUS
    assert steps.count(lambda: 1)[0] == 1, "the next count works"


def test_signals_reach_the_counted_thread(steps):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        steps.count(lambda: (os.kill(os.getpid(), signal.SIGUSR1), _loop(10)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_a_process_that_is_traced_already_says_so(steps):
    reader, told = os.pipe()
    debugged, libc = os.getpid(), ctypes.CDLL(None)
    libc.prctl(instructions._PR_SET_PTRACER, -1, 0, 0, 0)  # any process may
    debugger = os.fork()
    if debugger == 0:
        libc.ptrace(ctypes.c_long(instructions._SEIZE), ctypes.c_long(debugged), None, None)
        os.write(told, b"1")
        os.waitpid(debugged, 0)  # stopped at the signal that the refused tracer has ended
        os._exit(0)
    os.read(reader, 1)
    with pytest.raises(PermissionError, match="ptrace counts no single steps here"):
        Steps()
    os.waitpid(debugger, 0)
    os.close(reader)
    os.close(told)


def test_a_tracer_that_dies_is_an_error(steps, monkeypatch):
    left = 200

    def mortal(libc, *args):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return ptrace(libc, *args)

    ptrace = instructions._ptrace
    monkeypatch.setattr(instructions, "_ptrace", mortal)
    with pytest.raises(OSError, match="the process that counts single steps has died"):
        steps.count(lambda: _loop(1000))


def test_a_machine_with_neither_names_both_ways(monkeypatch):
    def refuse(libc, *args):
        raise OSError(errno.EPERM, "ptrace")

    class NoCounters:
        def __init__(self):
            raise OSError(errno.ENOENT, "perf_event_open counts no instructions here")

    monkeypatch.setattr(instructions, "_ptrace", refuse)
    monkeypatch.setitem(instructions.COUNTERS, "hardware", NoCounters)
    both = (
        r"perf_event_open counts no instructions here; ptrace counts no single steps here \(Operation not permitted\)"
    )
    with pytest.raises(OSError, match=both):
        counter_of("auto")
    with pytest.raises(OSError, match="ptrace counts no single steps here"):
        counter_of("steps")
