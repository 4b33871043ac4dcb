"""`npu-kernels`: run, doctor, tune, compile, fit, verify, compare, prove, bench.

    npu-kernels COMMAND --help

Every command works without an accelerator. With `--json` every command except `run` writes one JSON object to stdout,
and nothing else. Exit codes: 0 fine, 1 something was found or failed, 2 wrong usage or a missing package, 130 stopped
by Ctrl-C. `bench` also has 3, the device was lost. `run` exits with the code of its command.

This module imports no package that may be broken: a command imports torch, Triton and transformers when it needs them,
and `doctor` first checks them in other processes.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from ..support.switch import switch_off_run
from . import _bench, _compare, _compile, _doctor, _fit, _prove, _run, _tune, _verify
from .output import FINE, STOPPED, USAGE, Output, UsageError

__all__ = ["main", "make_parser"]

# The module of each command, with NAME, HELP, add_arguments(parser) and run(args, output) -> exit code.
_COMMANDS = (_doctor, _tune, _compile, _fit, _verify, _compare, _prove)


def _version() -> str:
    try:
        return metadata.version("npu_trainer_kernels")
    except metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="npu-kernels",
        description="Fused kernels for Hugging Face Trainer and TRL: look at an installation, measure it, check it.",
        epilog="Exit codes: 0 fine, 1 something was found or failed, 2 wrong usage or something to install first, "
        "130 stopped by Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"npu-kernels {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    # `main` splits off the command that follows these options.
    launcher = commands.add_parser(
        _run.NAME, help=_run.HELP, description=_run.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _run.add_arguments(launcher)
    launcher.set_defaults(refuse=launcher.error)
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME, help=module.HELP, description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
        command.set_defaults(run=module.run, refuse=command.error)
    # The benchmark runner parses the options of `bench`, see `main`.
    commands.add_parser(_bench.NAME, help=_bench.HELP, add_help=False)
    return parser


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """Parses like `parse_args`, but reports an unknown option with the usage of the subcommand."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None:
        beside = f" beside {' '.join(unknown)}" if unknown else ""
        parser.error(f"a COMMAND is needed{beside}; --help says which there are")
    if unknown:
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] != [_run.NAME]:
        switch_off_run()
    if arguments[:1] == [_bench.NAME]:
        return _bench.run(arguments[1:])
    if arguments[:1] == [_run.NAME]:
        ours, command = _run.split(arguments[1:])
        args = _parsed([_run.NAME, *ours])
        args.json, args.run = False, lambda args, _: _run.run(args, command)
    else:
        args = _parsed(arguments)
    with Output(args.json) as output:
        try:
            code: int = args.run(args, output)
        except UsageError as error:
            output.fail(f"npu-kernels {args.command}: {error}")
            return USAGE
        except KeyboardInterrupt:
            output.fail(f"npu-kernels {args.command}: stopped")
            return STOPPED
    assert code >= FINE
    return code
