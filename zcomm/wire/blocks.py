"""Blocks of elements that share a scale: how a chunk is cut into them, and the bfloat16 scale that most codecs use.

    scale >= max|block| / largest, where `largest` is the largest number that a code stands for

A block with a NaN or an Inf has the scale NaN; one whose magnitudes are all below `tiny` has the scale 0. Same names
in cuda/int_block.cuh. The rules, one by one: docs/wire-format.md, int_block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zcomm.errors import CodecError

MIN_BLOCK, MAX_BLOCK, BLOCK_STEP = 8, 65536, 8

TINY = 0x0F800000  # 2^-96: a block whose largest magnitude is below travels as zeros
LIMIT = 0x7E800000  # 2^126: where something is added to code times scale, a block that reaches it travels as bad
INF = 0x7F800000  # bits of +Inf; magnitudes from here on are Inf and NaN
NAN_SCALE = 0x7FC0  # the scale of a block that holds a NaN or an Inf


class Blocks(NamedTuple):
    """Neighbouring blocks of equal length: all the whole ones, or the partial last one."""

    first: int  # index of the first block
    n_blocks: int
    elements: slice  # in the chunk's elements
    codes: slice  # in the chunk's wire bytes
    stored: int  # elements per block on the wire, a multiple of 8; what is missing has code 0


class Scales(NamedTuple):
    """Scales of m blocks. inv is 0 where every code of the block is 0."""

    bits: np.ndarray  # uint16 (m,), bfloat16
    inv: np.ndarray  # float32 (m,), what elements are multiplied with

    @property
    def values(self) -> np.ndarray:  # float32 (m,)
        """The scales as numbers."""
        return from_bfloat16(self.bits)


def check_block(name: str, block: object, default: int) -> None:
    """Raise CodecError for a block that no codec can have."""
    if type(block) is not int or not MIN_BLOCK <= block <= MAX_BLOCK or block % BLOCK_STEP != 0:
        raise CodecError(
            f"{name} needs a block that is a multiple of {BLOCK_STEP} from {MIN_BLOCK} to {MAX_BLOCK}, "
            f"got {block!r}; use {default}"
        )


def blocks(
    n_elems: int,
    block: int,
    bits: int,
    codes_offset: int,
) -> Iterator[Blocks]:
    """The whole blocks, then the partial one, where there are any."""
    n_whole, n_left = divmod(n_elems, block)
    whole = n_whole * block
    middle = codes_offset + whole * bits // 8
    if n_whole:
        yield Blocks(0, n_whole, slice(0, whole), slice(codes_offset, middle), block)
    if n_left:
        stored = -(-n_left // BLOCK_STEP) * BLOCK_STEP
        yield Blocks(n_whole, 1, slice(whole, n_elems), slice(middle, middle + stored * bits // 8), stored)


def rows(
    x: np.ndarray,  # (n,)
    stored: int,
) -> np.ndarray:  # (m, stored)
    """x as rows, its missing elements like the last one."""
    missing = -x.size % stored
    return (np.pad(x, (0, missing), "edge") if missing else x).reshape(-1, stored)


def amax_bits(
    of: np.ndarray,  # float32 (m, r)
) -> np.ndarray:  # uint32 (m,)
    """The largest magnitude of each row as its bits, so that NaN and Inf order themselves."""
    return (of.view(np.uint32) & 0x7FFFFFFF).max(axis=1)


def from_bfloat16(
    bits: np.ndarray,  # uint16 (m,)
) -> np.ndarray:  # float32 (m,)
    """bfloat16 numbers from their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_above(
    x: np.ndarray,  # float32 (m,), positive and under the largest bfloat16
) -> np.ndarray:  # uint16 (m,)
    """The smallest bfloat16 that is not below."""
    return ((x.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)


def to_bfloat16_bytes(
    *columns: np.ndarray,  # uint16 (m,) each
) -> np.ndarray:  # uint8 (m, 2 * columns)
    """Numbers of 16 bits as the bytes of each block's scale."""
    return np.stack(columns, axis=1).view(np.uint8)


def scale_cap(largest: int) -> int:
    """Bits of the largest bfloat16 whose product with `largest` is finite in fp32."""
    quotient = np.float32(min(2.0**128 / largest, float(np.finfo(np.float32).max)))
    bits = int(quotient.view(np.uint32)) >> 16
    while float(from_bfloat16(np.array([bits], np.uint16))[0]) * largest >= 2.0**128:
        bits -= 1
    return bits


def block_scales(
    amax: np.ndarray,  # uint32 (m,), of amax_bits
    largest: int,
    tiny: int = TINY,
) -> Scales:
    """The scale of each block: its largest magnitude over `largest`, rounded up to bfloat16, under the cap."""
    # Rounding the quotient cannot leave s under amax / largest: docs/wire-format.md, int_block.
    carries = (amax >= tiny) & (amax < INF)
    a = np.where(carries, amax, np.uint32(0x3F800000)).view(np.float32)
    with np.errstate(all="ignore"):
        up = ((a / np.float32(largest)).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        up = np.minimum(up, np.uint32(scale_cap(largest) << 16))
        inv = np.float32(1) / up.view(np.float32)
    bits = np.where(carries, up >> 16, np.where(amax >= INF, np.uint32(NAN_SCALE), np.uint32(0)))
    return Scales(bits.astype(np.uint16), np.where(carries, inv, np.float32(0)))
