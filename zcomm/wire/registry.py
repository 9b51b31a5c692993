"""Codecs by their spelling: `codec("int4:64")` is `IntBlock(bits=4, block=64)`, whose `str` is "int4:64".

A spelling is a name and, after colons, its options; "hadamard:" may stand before it. A new codec is one row here and
one file beside this one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import lru_cache

from zcomm.errors import CodecError
from zcomm.wire import cast, fp8_block, int_asym, int_block, mx_block, nvfp4, raw
from zcomm.wire.codec import Codec
from zcomm.wire.hadamard import Hadamard


def _parse_int(head: str, options: list[str]) -> Codec:
    return (int_asym if "asym" in options else int_block).parse(head, options)


_PARSERS: dict[str, Callable[[str, list[str]], Codec]] = {  # sorted by name
    "bf16": cast.parse,
    "fp16": cast.parse,
    "fp8_e4m3": fp8_block.parse,
    "fp8_e5m2": fp8_block.parse,
    "int2": _parse_int,
    "int3": _parse_int,
    "int4": _parse_int,
    "int5": _parse_int,
    "int6": _parse_int,
    "int7": _parse_int,
    "int8": _parse_int,
    "mxfp4": mx_block.parse,
    "mxfp8": mx_block.parse,
    "nvfp4": nvfp4.parse,
    "raw": raw.parse,
}
NAMES = tuple(_PARSERS)
_MEANT = {  # names that others use
    "bfloat16": "bf16",
    "double": "raw",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "float": "raw",
    "float16": "fp16",
    "float32": "raw",
    "float64": "raw",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "fp32": "raw",
    "fp4": "mxfp4",
    "fp64": "raw",
    "fp8": "fp8_e4m3",
    "half": "fp16",
    "identity": "raw",
    "none": "raw",
    "off": "raw",
}
_CODECS: set[type] = set()  # types of codecs met so far: it takes Python long to compare one with the protocol


def codec(spec: str | Codec) -> Codec:
    """The codec a spelling stands for; a codec stands for itself. Raises CodecError for anything else.

    "int8" scales blocks of 256 elements, "int8:64" of 64; "int4:128:stochastic" rounds without bias, "hadamard:int4"
    rotates first; "bf16" only casts, "raw" sends elements as they are. docs/codecs.md has all, and when to use which.
    `codec("int8").nbytes(n)` is what n elements take on the wire.
    """
    if isinstance(spec, str):
        return _parse(spec)
    if type(spec) in _CODECS:
        return spec
    if isinstance(spec, Codec) and not isinstance(spec, type):
        _CODECS.add(type(spec))
        return spec
    raise CodecError(f"a codec is a spelling ({', '.join(NAMES)}) or a codec object, got {spec!r}")


@lru_cache(maxsize=256)
def _parse(spec: str) -> Codec:
    head, *options = spec.split(":")
    if head == "hadamard":
        if options[:1] == ["hadamard"]:
            inner = ":".join(options)[:100]
            raise CodecError(f"hadamard wraps a codec with blocks, got {inner}; use hadamard:int4 or the like")
        return Hadamard(_parse(":".join(options)))
    parser = _PARSERS.get(head)
    if parser is None:
        raise CodecError(
            f"no codec is spelled {spec!r}{_did_you_mean(head)}; known: {', '.join(NAMES)}, with a block as in "
            "int8:512, and hadamard: before one that has blocks; raw sends elements as they are"
        )
    return parser(head, options)


def _did_you_mean(name: str) -> str:
    """A question that a message can hold, or nothing."""
    name = name.strip().lower().removeprefix("torch.")
    as_wide = [known for known in NAMES if re.sub(r"\D", "", known) == re.sub(r"\D", "", name)]
    close = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, as_wide, n=1, cutoff=0.75)
    return f", did you mean {close[0]}" if close else ""
