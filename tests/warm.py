"""Programs in processes of their own, which find torch, transformers and TRL imported.

Importing those takes five seconds, most of such a test. One process for all of a session, multiprocessing's server, has
imported them, nothing of this package, and done nothing else; each program is a fork of it, with its own arguments,
environment, folder and output, and without Triton's interpreter. What is tested is the program: tests of how a command
starts start it as a user does.
"""

import contextlib
import multiprocessing.connection
import os
import runpy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

__all__ = ["Ended", "context", "run", "run_ranks"]

_IMPORTED = [
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers.trainer", "datasets",
    "accelerate", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
    "trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer",
]  # fmt: skip
_ROOT = Path(__file__).parents[1]


class Ended:
    """What a program that has ended printed, stderr in between, and its exit status."""

    def __init__(self, returncode: int, output: str) -> None:
        self.returncode, self.output = returncode, output


def context() -> ForkServerContext:
    """The start method of these processes, whose server has begun: a process of it begins at once."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_IMPORTED)
    before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS")}
    # Triton reads the one when it is imported; the other keeps a fork from missing the threads of its parent.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return made


def _program(name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [name, *arguments]
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _started(
    name: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, output: Path
) -> Iterator[list[ForkServerProcess]]:
    common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    begin, started = context().Process, []
    for more in environments:
        given = {key: value for key, value in {**common, **more}.items() if key != "TRITON_INTERPRET"}
        started.append(begin(target=_program, args=(name, arguments, given, folder, output)))
    try:
        for process in started:
            process.start()
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def _ended(processes: Sequence[ForkServerProcess], output: Path, timeout: float) -> Ended:
    """When all have, or as soon as one has failed, or the time is over (a status of -9, as of a killed process)."""
    end = time.monotonic() + timeout
    while True:
        found = [process.exitcode for process in processes]
        left = end - time.monotonic()
        if None not in found or any(found) or left <= 0:
            status = next((code for code in found if code), 0 if None not in found else -9)
            return Ended(status, output.read_text(errors="replace") if output.exists() else "")
        running = [process.sentinel for process, code in zip(processes, found, strict=True) if code is None]
        multiprocessing.connection.wait(running, left)


def run(name: str, *arguments: str, folder: Path, output: Path, timeout: float = 300, **environment: str) -> Ended:
    """Runs a module or a script (a path that ends in .py) in a folder; what it prints goes to the file `output`."""
    with _started(name, arguments, [environment], folder, output) as started:
        return _ended(started, output, timeout)


def run_ranks(number: int, name: str, *arguments: str, output: Path, timeout: float = 300) -> Ended:
    """Runs a module on ranks of one host, as torchrun does: this process has the store in which they meet."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, number, is_master=True, wait_for_workers=False)
    whole = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(number))
    each = [{**whole, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    with _started(name, arguments, each, _ROOT, output) as started:
        return _ended(started, output, timeout)
