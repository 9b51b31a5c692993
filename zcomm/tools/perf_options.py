"""What `zcomm perf` was asked: sizes, codecs, hops and the rest, read and checked before any rank is joined."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from zcomm.errors import ZcommError
from zcomm.tools.link import Link
from zcomm.tools.output_file import why_not_writable
from zcomm.tools.perf_formulas import COLLECTIVES
from zcomm.wire.registry import codec as parse_codec

DEVICES = ("cpu", "cuda")
FEWEST_CALLS = 3  # whatever the budget says, unless fewer were asked for
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)(?:I?B)?", re.IGNORECASE)


class PerfError(ZcommError, ValueError):
    """A measurement that cannot be made as asked."""


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked."""

    collectives: tuple[str, ...]
    codecs: tuple[str, ...]
    sizes_bytes: tuple[int, ...]  # of the whole float32 tensor
    hops: tuple[int, ...]
    calls: int  # counted, of each form at each size, at most
    budget_s: float  # of those calls together; FEWEST_CALLS are made in any case, unless fewer are asked for
    link: Link | None  # None: not told
    device: str
    json: Path | None
    plot: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `zcomm perf`."""
    parser.description = (
        "Time collectives by codec, size and hops beside every uncompressed form, and check every element. "
        "Started by zcomm cluster, torchrun or mpiexec."
    )
    parser.add_argument("collectives", nargs="+", metavar="COLLECTIVE", help=", ".join(COLLECTIVES))
    parser.add_argument(
        "--codec",
        default="raw,bf16,int8,int4",
        help="which codecs, with commas; raw and bf16 are measured in any case (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        default="64K:64M",
        help="bytes of the whole float32 tensor: a list 64K,1M or a range 64K:64M in steps of 4 times, 64K:64M:2 of 2 "
        "(default: %(default)s; K, M, G are powers of 2)",
    )
    parser.add_argument("--hops", default="1,2", help="1: flat, 2: two hops, where nodes allow it (default: 1,2)")
    parser.add_argument(
        "--calls", default="100", metavar="N", help="most counted calls of a form at a size (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        default="2",
        metavar="S",
        help=f"time that these calls may take; {FEWEST_CALLS} are made in any case (default: %(default)s)",
    )
    parser.add_argument(
        "--link", metavar="RATE", help="the rate of each node's link, if known: adds the time the wire alone would take"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: torch and NCCL (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture here, e.g. perf.png")


def read_options(args: argparse.Namespace) -> Options:
    """Turn arguments into options. Raises one of zcomm's errors for the first that makes no sense."""
    for name in args.collectives:
        if name not in COLLECTIVES:
            raise PerfError(f"no collective is called {name!r} here; expected {', '.join(COLLECTIVES)}")
    if not args.calls.isdecimal() or int(args.calls) < 1:
        raise PerfError(f"--calls must be a whole number of at least 1, got {args.calls!r}")
    try:
        budget_s = float(args.seconds)
    except ValueError:
        budget_s = math.nan
    if not 0 <= budget_s < math.inf:
        raise PerfError(f"--seconds must be a time of 0 or more, got {args.seconds!r}")
    if args.device not in DEVICES:
        raise PerfError(f"--device must be {' or '.join(DEVICES)}, got {args.device!r}")
    hops = _listed("--hops", args.hops)
    for word in hops:
        if word not in ("1", "2"):
            raise PerfError(f"--hops are 1, 2 or 1,2, got {args.hops!r}")
    codecs = _listed("--codec", args.codec)
    sizes_bytes = read_sizes(args.sizes)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sizes_bytes[-1] > memory_bytes:
        raise PerfError(f"--sizes goes up to {sizes_bytes[-1]} bytes; the memory of this machine has {memory_bytes}")
    return Options(
        collectives=tuple(dict.fromkeys(args.collectives)),
        codecs=tuple(dict.fromkeys(str(parse_codec(word)) for word in codecs)),
        sizes_bytes=sizes_bytes,
        hops=tuple(sorted({int(word) for word in hops})),
        calls=int(args.calls),
        budget_s=budget_s,
        link=None if args.link is None else Link.parse(args.link),
        device=args.device,
        json=args.json,
        plot=args.plot,
    )


def read_sizes(text: str) -> tuple[int, ...]:
    """Read "64K,1M", "64K:64M" or "64K:64M:2", ascending."""
    sizes: set[int] = set()
    for word in _listed("--sizes", text):
        first, *rest = word.split(":")
        least = _size(first)
        if not rest:
            sizes.add(least)
            continue
        if len(rest) > 2 or (len(rest) == 2 and not (rest[1].isdecimal() and int(rest[1]) > 1)):
            raise PerfError(f"--sizes has {word!r}; expected FIRST:LAST or FIRST:LAST:FACTOR, as in 64K:64M:2")
        most, factor = _size(rest[0]), int(rest[1]) if len(rest) == 2 else 4
        if most < least:
            raise PerfError(f"--sizes has {word!r}, which ends before it begins")
        while least <= most:
            sizes.add(least)
            least *= factor
    return tuple(sorted(sizes))


def check_files(options: Options) -> str | None:
    """Why a file that is to be written cannot be, or None. Leaves nothing behind."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib; pip install 'zcomm-collectives[tools]'"
    return why_not_writable("--json", options.json) or why_not_writable("--plot", options.plot)


def _listed(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise PerfError(f"{option} {text!r} has an empty place; expected words with commas between")
    return words


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise PerfError(f"--sizes has {text!r}; expected bytes, as in 65536, 64K, 16M or 1G")
    return int(found[1]) * _UNITS[found[2].upper()]
