"""Runs any training command with the kernels, unmodified: every Trainer in it gets them, also in the processes that it
starts. Signals reach the command directly, and its exit code is returned.

    npu-kernels run train.py --lr 1e-4                   a .py file or -m MODULE runs under this Python
    npu-kernels run trl grpo --config grpo.yaml          any other command runs as it is
    npu-kernels run --ops rms_norm,swiglu torchrun --nproc_per_node 8 train.py
    eval "$(npu-kernels run --print-env)"                all following commands of this shell get the kernels

With NPU_KERNELS_RUN=0 the command runs without the kernels. Each option is also an environment variable: see
--print-env.

Exit codes: those of the command; 2 wrong usage, 126 the command cannot be executed, 127 it is not found.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..support.switch import RUN, switch
from ._reach import unreachable
from .output import FINE, UsageError

__all__ = ["HELP", "NAME", "OPTIONS", "add_arguments", "run", "split"]

NAME = "run"
HELP = "run any training command with the kernels, unmodified"
USAGE = "npu-kernels run [options] [--] COMMAND..."
FOLDER = Path(__file__).resolve().parents[1] / "on_path"
PID = "NPU_KERNELS_RUN_PID"

# The options by their environment variables, which `NpuKernelsArguments` reads: name, value of a flag, help.
OPTIONS = {
    "NPU_KERNELS_OPS": ("--ops", None, "which ops to use, as 'rms_norm,swiglu'; all that apply by default"),
    "NPU_KERNELS_BACKEND": ("--backend", None, "'torch', or 'rms_norm=torch,linear_logprob=triton'"),
    "NPU_KERNELS_STRICT": ("--strict", "1", "stop when a kernel or a model fails; otherwise go on without it"),
    "NPU_KERNELS_TILED_MLP": ("--tiled-mlp", None, "gated MLPs compute at most so many tokens at once; otherwise all"),
    "NPU_KERNELS_CAPTURE": ("--capture", None, "the body as captured graphs: 'auto' (default), 'on' or 'off'"),
    "NPU_KERNELS_ROLLOUTS": ("--rollouts", None, "completions by captured steps: 'auto' (default), 'on' or 'off'"),
    "NPU_KERNELS_REPORT": ("--report", None, "what is printed when training begins: 'short' (default) or 'full'"),
    "NPU_KERNELS_AUDIT": ("--audit", None, "when it is compared with the model's own code: 'first', 'off', or steps"),
    "NPU_KERNELS_WARM_UP": ("--no-warm-up", "0", "compile kernels when they are first used, not before the first step"),
    "NPU_KERNELS_BALANCE": ("--no-balance", "0", "GRPO: no row changes its rank, and no length is looked at"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    for variable, (option, const, text) in OPTIONS.items():
        if const is None:
            parser.add_argument(option, dest=variable, metavar=option.strip("-").upper(), help=text)
        else:
            parser.add_argument(option, dest=variable, action="store_const", const=const, help=text)
    parser.add_argument("--print-env", action="store_true", help="print what would be set, for a shell")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into our options and the command, which follows `--`, or begins with `-m` or with the first word
    that belongs to no option."""
    valued = [option for option, const, _ in OPTIONS.values() if const is None]
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("--", "-m"):
        at += 2 if arguments[at] in valued else 1
    return list(arguments[:at]), list(arguments[at:][1:] if arguments[at : at + 1] == ["--"] else arguments[at:])


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Replaces this process by the command, or prints the environment."""
    given = {variable: value for variable in OPTIONS if (value := getattr(args, variable)) is not None}
    if not command and not args.print_env:
        raise UsageError(f"what is to be run is missing: {USAGE} (--help has examples)")
    if command and args.print_env:
        raise UsageError(f"--print-env runs nothing; leave out {shlex.join(command)!r}")
    _check(given)
    environment = {**given, RUN: "1", "PYTHONPATH": _python_path()}
    if args.print_env:
        for variable, value in environment.items():
            print(f"export {variable}={shlex.quote(value)}")
        return FINE
    if _is_on():
        if (reason := unreachable(command)) is not None:
            raise UsageError(f"{reason}, so that the kernels do not reach the command; {RUN}=0 runs it without them")
        os.environ.update(environment, **{PID: str(os.getpid())})
    else:
        print(f"npu-kernels run: {RUN}={os.environ[RUN]}, so the command runs without the kernels", file=sys.stderr)
    _execute(command)


def _is_on() -> bool:
    try:
        return switch(RUN, default=True)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check(given: dict[str, str]) -> None:
    """Raises `UsageError` for values that every process of the command would reject later."""
    if not given and not any(os.environ.get(variable) for variable in OPTIONS):
        return
    os.environ.update(given)
    from ..arguments import NpuKernelsArguments

    try:
        NpuKernelsArguments.from_environment()
    except ValueError as error:
        message = str(error)
        for variable, (option, *_) in OPTIONS.items():
            message = message.replace(variable.lower(), option if variable in given else variable)
        raise UsageError(message) from error


def _python_path() -> str:
    """Returns PYTHONPATH with our folder first. Other entries stay: Ascend's toolkit, for example, needs its own."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(FOLDER)]
    return os.pathsep.join([str(FOLDER), *others] if any(others) else [str(FOLDER)])


def _execute(command: list[str]) -> NoReturn:
    if command[0] == "-m" or command[0].endswith(".py"):
        command = [sys.executable, *command]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        do = "is it installed in this environment, and spelt as in a shell?"
        if not missing:
            do = f"a script that is not executable runs by its interpreter, as in `python {command[0]}`"
        print(f"npu-kernels run: {command[0]}: {error.strerror}; {do}", file=sys.stderr)
        sys.exit(127 if missing else 126)
