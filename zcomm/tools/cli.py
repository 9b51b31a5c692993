"""The command `zcomm`: a table of subcommands, each a module with add_arguments(parser) and run(args) -> exit status.

A module is imported only when its subcommand is called. An error of zcomm's own is one line and exit status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zcomm.errors import ZcommError
from zcomm.version import __version__

USAGE_ERROR = 2
CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True)
class Subcommand:
    """One program of zcomm."""

    module: str  # with add_arguments and run
    help: str


SUBCOMMANDS = {
    "cluster": Subcommand("zcomm.tools.cluster_command", "run a program on an emulated slow cluster"),
    "demo": Subcommand("zcomm.tools.demo", "train a small GPT over a slow link, plain and compressed"),
    "info": Subcommand("zcomm.tools.info", "what of zcomm works on this machine, and why not"),
    "plan": Subcommand("zcomm.tools.planner", "predict an FSDP step by recipe, before a cluster is rented"),
    "perf": Subcommand("zcomm.tools.perf", "time collectives by codec and size, beside every uncompressed form"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zcomm arguments...`; returns the exit status."""
    _open_what_is_closed()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # zcomm/__main__.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except ZcommError as problem:
        print(f"zcomm: {problem}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # whoever read our output has gone, as in: zcomm ... | head
        _drop_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as problem:
        if problem.errno not in CANNOT_BE_WRITTEN:
            raise
        _drop_output()
        with contextlib.suppress(OSError):
            where = problem.filename or "standard output"
            print(f"zcomm: {where} cannot be written: {problem.strerror}", file=sys.stderr)
        return USAGE_ERROR


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="zcomm",
        description="Collectives that send block-quantized bytes: what to try, plan and measure them with.",
    )
    parser.add_argument("--version", action="version", version=f"zcomm {__version__}")
    subparsers = parser.add_subparsers(title="programs", metavar="PROGRAM", required=True)
    chosen = words[0] if words else None
    for name, subcommand in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=subcommand.help)
        if name == chosen:
            module = importlib.import_module(subcommand.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(words)
    status: int = args.run(args)
    sys.stdout.flush()
    return status


def _open_what_is_closed() -> None:
    """Let a standard stream that was closed lead nowhere; else the next file or socket would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _drop_output() -> None:
    """Let standard output lead nowhere, so that Python does not try to write it again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
