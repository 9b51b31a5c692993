"""Decoding takes any bytes: it never crashes, never reads past the chunk, and gives what the definition gives."""

from __future__ import annotations

import inputs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcomm.buffers import DType
from zcomm.engines import native
from zcomm.engines.engine import NO_FINISH, Engine
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.errors import CodecError
from zcomm.wire.codec import Codec
from zcomm.wire.raw import Raw

REFERENCE = ReferenceEngine()
BUILDS: list[Engine] = [] if native.why_missing() else [NativeEngine(build) for build in native.builds()]
KINDS = inputs.every_codec()


def engines_of(kind: Codec) -> list[Engine]:
    return [engine for engine in BUILDS if engine.supports(kind)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_that_no_encoder_writes_decode_alike(kind: Codec) -> None:
    # Every scale, among them NaN, Inf, negative and subnormal ones, and every code.
    rng = np.random.default_rng(len(str(kind)))
    n = max(2 * kind.block + 13, 700)
    wire = rng.integers(0, 256, kind.nbytes(n), dtype=np.uint8).tobytes()

    for dtype in (DType.FLOAT32, DType(int(rng.integers(4)))):
        expected = inputs.decode(REFERENCE, kind, wire, n, dtype)
        for engine in engines_of(kind):
            assert inputs.decode(engine, kind, wire, n, dtype, 3) == expected


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_decode_alike_and_nothing_outside_them_counts(data: st.DataObject) -> None:
    kind, n = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 3000))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    wire = rng.integers(0, 256, kind.nbytes(n), dtype=np.uint8)
    if data.draw(st.booleans()):  # one that an encoder wrote, with a few bytes changed
        encoded = inputs.encode(REFERENCE, kind, rng.standard_normal(n).astype(np.float32), DType.FLOAT32)
        at = rng.integers(0, max(wire.size, 1), 5)[: wire.size]
        wire, damage = np.frombuffer(encoded, np.uint8).copy(), wire[at]
        wire[at] = damage
    dtype, offset = data.draw(st.sampled_from(DType)), data.draw(st.integers(0, 63))

    # Between guard bytes of 0xa5; a read past the end would bring them in, and differ from numpy.
    expected = inputs.decode(REFERENCE, kind, wire.tobytes(), n, dtype)
    for engine in engines_of(kind):
        assert inputs.decode(engine, kind, wire.tobytes(), n, dtype, offset) == expected
        summed = inputs.reduce(engine, kind, [wire.tobytes()] * 2, n, NO_FINISH, dtype, offset)
        assert len(summed) == n * dtype.itemsize


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_chunk_that_is_too_short_is_refused_with_its_size(kind: Codec) -> None:
    wire = np.zeros(kind.nbytes(100), np.uint8)
    out = np.empty(100, kind.dtype.numpy if isinstance(kind, Raw) else np.float32)

    for cut in (0, 16, wire.size - 16, wire.size - 1):
        with pytest.raises(CodecError, match=f"holds 100 elements in {wire.size} bytes"):
            kind.decode(wire[:cut], out)
