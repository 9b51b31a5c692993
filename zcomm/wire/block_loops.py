"""The loops of codecs whose blocks share a scale, written once: what differs between codecs is what one block becomes.

chunk:   [scales of block 0, 1, ..., scale_nbytes each][zeros to 16][codes of block 0, 1, ...][zeros to 16]
codes:   planes, zcomm/wire/planes.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zcomm.buffers import DType
from zcomm.wire.blocks import BLOCK_STEP, Blocks, blocks, rows
from zcomm.wire.codec import Quantizer, check_chunk, checked_count, padded
from zcomm.wire.draw import Draw, check_draw, half_words
from zcomm.wire.planes import pack, unpack


class Coded(NamedTuple):
    """What m blocks of r elements become."""

    scales: np.ndarray  # uint8 (m, scale_nbytes)
    codes: np.ndarray  # uint8 (m, r), of which the low bits travel


class BlockQuantizer(Quantizer):
    """A codec of blocks. Those that inherit it say what bits, block and three methods are: encode_rows and below."""

    __slots__ = ()

    if TYPE_CHECKING:  # a dataclass would take what it inherits for its fields' defaults

        @property
        def bits(self) -> int:
            """Of a code, 1 to 8."""

        @property
        def block(self) -> int:
            """Elements that share a scale."""

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a block's scale, and of what else its elements share."""
        return 2

    def encode_rows(
        self,
        elements: np.ndarray,  # float32 (m, r), blocks; the last element stands for those that a partial block lacks
        chance: np.ndarray | None,  # uint16 (m, r), their random bits, for a codec that rounds by chance
    ) -> Coded:
        """Scales and codes of blocks. Codes of missing elements are replaced by 0."""
        raise NotImplementedError

    def decode_rows(
        self,
        codes: np.ndarray,  # uint8 (m, r)
        scales: np.ndarray,  # uint8 (m, scale_nbytes)
    ) -> np.ndarray:  # float32 (m, r)
        """Elements of blocks, of any bytes."""
        raise NotImplementedError

    def bound_rows(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> np.ndarray:  # float64 (m, r)
        """Error bounds of blocks."""
        raise NotImplementedError

    def nbytes(self, n_elems: int) -> int:
        """Scales, padded, and codes, padded."""
        n_elems = checked_count(n_elems)
        n_stored = -(-n_elems // BLOCK_STEP) * BLOCK_STEP
        return self._codes_offset(n_elems) + padded(n_stored * self.bits // 8)

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # the random bits, for a codec that rounds by chance
    ) -> None:
        """Quantize x block by block into out. Raises CodecError if out has another size or a draw is missing."""
        check_chunk(self, x, DType.FLOAT32, out)
        chance = half_words(check_draw(self, draw), x.size) if self.by_chance else None
        out[:] = 0
        for part in self._parts(x.size):
            of_rows = None if chance is None else rows(chance[part.elements], part.stored)
            coded = self.encode_rows(rows(x[part.elements], part.stored), of_rows)
            coded.codes.reshape(-1)[part.elements.stop - part.elements.start :] = 0
            out[self._scales_of(part)] = coded.scales.reshape(-1)
            out[part.codes] = pack(coded.codes, self.bits).reshape(-1)

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Turn codes into elements block by block. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        for part in self._parts(out.size):
            codes = unpack(wire[part.codes].reshape(part.n_blocks, -1), self.bits, part.stored)
            with np.errstate(all="ignore"):
                elements = self.decode_rows(codes, wire[self._scales_of(part)].reshape(part.n_blocks, -1))
            out[part.elements] = elements.reshape(-1)[: part.elements.stop - part.elements.start]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """Largest |decode(encode(x)) - x| of each element; inf in blocks that decode to NaN."""
        bound = np.empty(x.size, np.float64)
        for part in self._parts(x.size):
            with np.errstate(all="ignore"):  # signalling NaNs, zero scales
                of_rows = self.bound_rows(rows(x[part.elements], part.stored))
            bound[part.elements] = of_rows.reshape(-1)[: part.elements.stop - part.elements.start]
        return bound

    def _codes_offset(self, n_elems: int) -> int:
        """Where the codes of a chunk begin."""
        return padded(self.scale_nbytes * -(-n_elems // self.block))

    def _parts(self, n_elems: int) -> list[Blocks]:
        """The whole blocks, then the partial one, where there are any."""
        return list(blocks(n_elems, self.block, self.bits, self._codes_offset(n_elems)))

    def _scales_of(self, part: Blocks) -> slice:
        """Where the scales of these blocks lie in the chunk."""
        return slice(self.scale_nbytes * part.first, self.scale_nbytes * (part.first + part.n_blocks))
