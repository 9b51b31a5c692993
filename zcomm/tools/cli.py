"""The command `zcomm`: a table of subcommands, each a module with add_arguments(parser) and run(args) -> exit
status.

A module is imported only when its subcommand is called. An error of zcomm's own is one line and exit status
2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zcomm.errors import ZcommError
from zcomm.version import __version__

USAGE_ERROR = 2


@dataclass(frozen=True)
class Subcommand:
    """One program of zcomm."""

    module: str
    run: str  # the function of module that takes the parsed arguments
    help: str


SUBCOMMANDS = {
    "cluster": Subcommand("zcomm.tools.cluster", "run_command", "run a program on an emulated slow cluster"),
    "demo": Subcommand("zcomm.tools.demo", "run", "train a small GPT over a slow link, plain and compressed"),
    "info": Subcommand("zcomm.tools.info", "run", "what of zcomm works on this machine, and why not"),
    "perf": Subcommand("zcomm.tools.perf", "run", "time collectives by codec and size, beside every uncompressed form"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zcomm arguments...`; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="zcomm", description="Collectives that send block-quantized bytes: programs for people."
    )
    parser.add_argument("--version", action="version", version=f"zcomm {__version__}")
    subparsers = parser.add_subparsers(title="programs", metavar="PROGRAM", required=True)
    chosen = words[0] if words else None
    for name, subcommand in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=subcommand.help)
        if name == chosen:
            module = importlib.import_module(subcommand.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=getattr(module, subcommand.run))
    try:
        args = parser.parse_args(words)
        status: int = args.run(args)
        sys.stdout.flush()
    except ZcommError as problem:
        print(f"zcomm: {problem}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # whoever read our output has gone, as in: zcomm ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
