"""Many pieces of one array in one call of an engine, compared with the reference one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import inputs
import numpy as np

from zcomm.buffers import DType
from zcomm.engines.reference import ReferenceEngine
from zcomm.wire.codec import Codec

REFERENCE = ReferenceEngine()


def check_pieces(
    engine: Any,  # that has encode_pieces and decode_pieces
    kind: Codec,
    sizes: Sequence[int],  # elements of neighbouring pieces
    dtype: DType,
    rng: np.random.Generator,
    offset: int,
) -> None:
    """Encode and decode the pieces of an array in one call, in an order that is not theirs in the array."""
    n = sum(sizes)
    x = inputs.elements("normal", rng, n, dtype)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    draws = [inputs.DRAW._replace(first=inputs.DRAW.first + start) for start in starts]
    parts = [x[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    chunks = [inputs.encode(REFERENCE, kind, part, dtype, 0, draw) for part, draw in zip(parts, draws, strict=True)]
    order = rng.permutation(len(sizes)).tolist()
    places = dict(zip(order, np.cumsum([0, *[len(chunks[i]) for i in order]]).tolist(), strict=False))
    pieces = [(starts[i], sizes[i], places[i]) for i in range(len(sizes))]
    wire = b"".join(chunks[i] for i in order)
    what = (str(kind), sizes, dtype, offset)

    source, room = inputs.Room(x.nbytes, offset, x.tobytes()), inputs.Room(len(wire), offset)
    engine.encode_pieces(kind, source.address, dtype, room.address, pieces, inputs.DRAW)
    assert room.taken() == wire, what
    decoded = [inputs.decode(REFERENCE, kind, c, k, dtype) for c, k in zip(chunks, sizes, strict=True)]
    target = inputs.Room(x.nbytes, offset)
    engine.decode_pieces(kind, room.address, target.address, dtype, pieces)
    assert inputs.without_payloads(target.taken(), dtype) == b"".join(decoded), what
