"""int_block: signed integers of 2 to 8 bits, one bfloat16 scale per block. "int8", "int4" and their kin.

    chunk:   [bfloat16 scales of block 0, 1, ...][zeros to 16][codes of block 0, 1, ...][zeros to 16]
    codes:   one plane per field of 8, 4, 2, 1 bits that adds up to the width, low bits first (6 = 4 + 2)
    plane:   byte j holds elements j (low bits), j + r/k, j + 2r/k, ... of the block's r; k = 8 / field

A code times its scale is exact in fp32, so no engine can differ by contraction. The scale is rounded away
from zero, so the largest element never clips. The rules, one by one: docs/wire-format.md, int_block. Same
names in cuda/int_block.cuh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.codec import check_chunk, check_count, padded

BITS = range(2, 9)
MIN_BLOCK, MAX_BLOCK, BLOCK_STEP = 8, 65536, 8

TINY = 0x0F800000  # 2^-96: a block whose largest magnitude is below travels as zeros
INF = 0x7F800000  # bits of +Inf; magnitudes from here on are Inf and NaN
NAN_SCALE = 0x7FC0  # the scale of a block that holds a NaN or an Inf


def default_block(bits: int) -> int:
    """The block that a width's short spelling stands for: coarse codes get finer scales."""
    return 256 if bits >= 5 else 128


def fields(bits: int) -> tuple[int, ...]:
    """The planes' field widths, low bits of the code first."""
    return tuple(field for field in (8, 4, 2, 1) if bits & field)


class Scales(NamedTuple):
    """Scales of m blocks. inv is 0 where every code of the block is 0."""

    bits: np.ndarray  # uint16 (m,), bfloat16
    inv: np.ndarray  # float32 (m,), what elements are multiplied with

    @property
    def values(self) -> np.ndarray:  # float32 (m,)
        """The scales as numbers."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


class _Blocks(NamedTuple):
    """Neighbouring blocks of equal length: all the whole ones, or the partial last one."""

    first: int  # index of the first block
    elements: slice  # in the chunk's elements
    codes: slice  # in the chunk's wire bytes
    stored: int  # elements per block on the wire, a multiple of 8; what is missing has code 0


@dataclass(frozen=True, slots=True)
class IntBlock:
    """Symmetric codes of `bits` bits in blocks of `block` elements, rounded to nearest, ties to even."""

    bits: int
    block: int

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise CodecError(f"int_block has codes of 2 to 8 bits, got {self.bits!r}; use int8, int4, ...")
        if type(self.block) is not int or not MIN_BLOCK <= self.block <= MAX_BLOCK or self.block % BLOCK_STEP != 0:
            raise CodecError(
                f"int{self.bits} needs a block that is a multiple of {BLOCK_STEP} from {MIN_BLOCK} to "
                f"{MAX_BLOCK}, got {self.block!r}; use {default_block(self.bits)}"
            )

    def __str__(self) -> str:
        return f"int{self.bits}" if self.block == default_block(self.bits) else f"int{self.bits}:{self.block}"

    @property
    def qmax(self) -> int:
        """The largest code; the smallest is -qmax."""
        return 2 ** (self.bits - 1) - 1

    def for_dtype(self, dtype: DType) -> IntBlock:
        """Itself: the bytes do not depend on the elements' dtype."""
        return self

    def nbytes(self, n_elems: int) -> int:
        """Scales, padded, and codes, padded."""
        check_count(n_elems)
        n_stored = -(-n_elems // BLOCK_STEP) * BLOCK_STEP
        return self._codes_offset(n_elems) + padded(n_stored * self.bits // 8)

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
    ) -> None:
        """Quantize x block by block into out. Raises CodecError if out has another size."""
        check_chunk(self, x, DType.FLOAT32, out)
        out[:] = 0
        for blocks in self._blocks(x.size):
            rows = _rows(x[blocks.elements], blocks.stored)
            scales = self._scales(rows)
            last = blocks.first + len(rows)
            out[2 * blocks.first : 2 * last] = scales.bits.view(np.uint8)
            with np.errstate(all="ignore"):
                codes = np.rint(rows * scales.inv[:, None])
            codes[scales.inv == 0] = 0
            out[blocks.codes] = self._pack(codes.astype(np.int8).view(np.uint8)).reshape(-1)

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Codes times scales. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        for blocks in self._blocks(out.size):
            n_blocks = -(-(blocks.elements.stop - blocks.elements.start) // blocks.stored)
            codes = self._unpack(wire[blocks.codes].reshape(n_blocks, -1), blocks.stored)
            bits = wire[2 * blocks.first : 2 * (blocks.first + n_blocks)].view(np.uint16)
            with np.errstate(all="ignore"):
                rows = codes.astype(np.float32) * Scales(bits, bits).values[:, None]
            out[blocks.elements] = rows.reshape(-1)[: blocks.elements.stop - blocks.elements.start]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """Half a step of its block's scale and a little; |x| in zero blocks; inf in non-finite ones."""
        # inv = (1/s)(1 + a) and fl(x inv) = x inv (1 + b) with |a| <= 2^-22 (1/s is subnormal for s > 2^126;
        # otherwise 2^-24) and |b| <= 2^-24, so x inv = x/s (1 + c), |c| < 2^-21. Rounding to an integer adds
        # at most 1/2, a code times s is exact, and no code clips: |x| <= qmax s, or at the cap |x|/s < qmax +
        # 1/2 (cuda/int_block.cuh). Hence |decoded - x| <= s/2 + 2^-21 |x|.
        bound = np.empty(x.size, np.float64)
        for blocks in self._blocks(x.size):
            rows = _rows(x[blocks.elements], blocks.stored)
            scales = self._scales(rows)
            step = scales.values[:, None].astype(np.float64)
            with np.errstate(invalid="ignore"):  # signalling NaNs
                magnitude = np.abs(rows.astype(np.float64))
            rounded = 0.5 * step + 2.0**-21 * magnitude
            of_rows = np.where(np.isnan(step), np.inf, np.where(step == 0, magnitude, rounded))
            bound[blocks.elements] = of_rows.reshape(-1)[: blocks.elements.stop - blocks.elements.start]
        return bound

    def _codes_offset(self, n_elems: int) -> int:
        """Where the codes of a chunk begin."""
        return padded(2 * -(-n_elems // self.block))

    def _blocks(self, n_elems: int) -> Iterator[_Blocks]:
        """The whole blocks, then the partial one, where there are any."""
        n_whole, n_left = divmod(n_elems, self.block)
        whole, start = n_whole * self.block, self._codes_offset(n_elems)
        middle = start + whole * self.bits // 8
        if n_whole:
            yield _Blocks(0, slice(0, whole), slice(start, middle), self.block)
        if n_left:
            stored = -(-n_left // BLOCK_STEP) * BLOCK_STEP
            end = middle + stored * self.bits // 8
            yield _Blocks(n_whole, slice(whole, n_elems), slice(middle, end), stored)

    def _scales(
        self,
        rows: np.ndarray,  # float32 (m, r)
    ) -> Scales:
        """The scale of each row: max|row| / qmax rounded up to bfloat16, under the cap."""
        # Rounding the quotient cannot leave s under amax / qmax: docs/wire-format.md, int_block.
        amax = (rows.view(np.uint32) & 0x7FFFFFFF).max(axis=1)
        carries = (amax >= TINY) & (amax < INF)
        a = np.where(carries, amax, np.uint32(0x3F800000)).view(np.float32)
        qmax = np.float32(self.qmax)
        with np.errstate(all="ignore"):
            up = ((a / qmax).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
            up = np.minimum(up, np.uint32(self._scale_cap() << 16))
            inv = np.float32(1) / up.view(np.float32)
        bits = np.where(carries, up >> 16, np.where(amax >= INF, np.uint32(NAN_SCALE), np.uint32(0)))
        return Scales(bits.astype(np.uint16), np.where(carries, inv, np.float32(0)))

    def _scale_cap(self) -> int:
        """Bits of the largest bfloat16 whose product with qmax is finite in fp32."""
        # 2^p <= qmax < 2^(p+1) and s = m 2^(120-p) with 128 <= m < 256: s qmax < 2^128 asks for m qmax <
        # 2^(8+p).
        p = self.bits - 2
        m = (2 ** (8 + p) - 1) // self.qmax
        return (254 - p) << 7 | (m - 128)

    def _pack(
        self,
        codes: np.ndarray,  # uint8 (m, r), two's complement, low `bits` bits used
    ) -> np.ndarray:  # uint8 (m, r * bits / 8)
        """Cut each code into fields and lay each field out as a plane."""
        planes, shift = [], 0
        for field in fields(self.bits):
            k = 8 // field
            parts = ((codes >> shift) & (2**field - 1)).reshape(len(codes), k, -1)
            at_bits = field * np.arange(k, dtype=np.uint8)
            planes.append(np.bitwise_or.reduce(parts << at_bits[:, None], axis=1))
            shift += field
        return np.concatenate(planes, axis=1)

    def _unpack(
        self,
        planes: np.ndarray,  # uint8 (m, stored * bits / 8)
        stored: int,
    ) -> np.ndarray:  # int8 (m, stored)
        """The signed codes out of their planes."""
        codes, shift, at = np.zeros((len(planes), stored), np.uint8), 0, 0
        for field in fields(self.bits):
            k = 8 // field
            plane = planes[:, None, at : at + stored // k]
            parts = (plane >> (field * np.arange(k, dtype=np.uint8))[:, None]) & (2**field - 1)
            codes |= parts.reshape(len(planes), stored) << shift
            shift, at = shift + field, at + stored // k
        sign = np.uint8(1 << (self.bits - 1))
        return ((codes ^ sign) - sign).view(np.int8)


def parse(
    head: str,  # "int2" ... "int8"
    options: list[str],  # what followed it, cut at each colon
) -> IntBlock:
    """IntBlock from its spelling. Raises CodecError for a block it cannot have, or more than a block."""
    bits = int(head.removeprefix("int"))
    if not options:
        return IntBlock(bits, default_block(bits))
    if len(options) > 1 or re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", options[0]) is None:
        raise CodecError(
            f"{head} takes one option, its block in elements, got {':'.join(options)!r}; "
            f"write {head}:{default_block(bits)}"
        )
    return IntBlock(bits, int(options[0]))


def _rows(
    x: np.ndarray,  # float32 (n,)
    stored: int,
) -> np.ndarray:  # float32 (m, stored)
    """x as rows, its missing elements 0."""
    missing = -x.size % stored
    return (np.pad(x, (0, missing)) if missing else x).reshape(-1, stored)
