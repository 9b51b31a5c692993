"""Codes of 2 to 8 bits as planes, the packing of every block codec (docs/wire-format.md, Planes).

codes:   one plane per field of 8, 4, 2, 1 bits that adds up to the width, low bits first (6 = 4 + 2)
plane:   byte j holds elements j (low bits), j + r/k, j + 2r/k, ... of the block's r; k = 8 / field
"""

from __future__ import annotations

import numpy as np


def fields(bits: int) -> tuple[int, ...]:
    """The planes' field widths, low bits of the code first."""
    return tuple(field for field in (8, 4, 2, 1) if bits & field)


def pack(
    codes: np.ndarray,  # uint8 (m, r), low `bits` bits used
    bits: int,
) -> np.ndarray:  # uint8 (m, r * bits / 8)
    """Cut each code into fields and lay each field out as a plane."""
    planes, shift = [], 0
    for field in fields(bits):
        k = 8 // field
        parts = ((codes >> shift) & (2**field - 1)).reshape(len(codes), k, -1)
        at_bits = field * np.arange(k, dtype=np.uint8)
        planes.append(np.bitwise_or.reduce(parts << at_bits[:, None], axis=1))
        shift += field
    return np.concatenate(planes, axis=1)


def unpack(
    planes: np.ndarray,  # uint8 (m, r * bits / 8)
    bits: int,
    stored: int,  # r, elements per block on the wire
) -> np.ndarray:  # uint8 (m, stored)
    """The codes out of their planes, in their low bits."""
    codes, shift, at = np.zeros((len(planes), stored), np.uint8), 0, 0
    for field in fields(bits):
        k = 8 // field
        plane = planes[:, None, at : at + stored // k]
        parts = (plane >> (field * np.arange(k, dtype=np.uint8))[:, None]) & (2**field - 1)
        codes |= parts.reshape(len(planes), stored) << shift
        shift, at = shift + field, at + stored // k
    return codes
