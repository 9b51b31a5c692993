"""Inputs that find differences between engines, memory that shows a stray write, and comparison byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zcomm.buffers import DType
from zcomm.engines.engine import Engine
from zcomm.errors import CodecError
from zcomm.wire import registry
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.elements import narrow
from zcomm.wire.raw import Raw

BLOCKS = (8, 40, 64, 8192)
WORDS = ("", ":stochastic", ":shift", ":asym", ":asym:stochastic")  # what may follow a block
LARGEST = np.finfo(np.float32).max
TINY = np.float32(2.0**-96)

DRAW = Draw(
    seed=0x0123456789ABCDEF, call=0xFEDCBA9876543210, first=2**35 + 77
)  # what chance means where it matters not

Rng = np.random.Generator


def every_codec() -> list[Codec]:
    """Every name of the registry with every option it takes, and behind hadamard: what can stand there."""
    options = [block + word for block in ("", *(f":{block}" for block in BLOCKS)) for word in WORDS]
    options += [f":{dtype.spelling}" for dtype in DType]
    plain = [f"{name}{option}" for name in registry.NAMES for option in options]
    found = (_parsed(spec) for spec in [*plain, *(f"hadamard:{spec}" for spec in plain)])
    return list(dict.fromkeys(kind for kind in found if kind is not None))


def _parsed(spec: str) -> Codec | None:
    try:
        return registry.codec(spec)
    except CodecError:
        return None


def _normal(rng: Rng, n: int) -> np.ndarray:
    return rng.standard_normal(n)


def _wide_exponents(rng: Rng, n: int) -> np.ndarray:
    return rng.standard_normal(n) * 2.0 ** rng.integers(-100, 120, n)


def _subnormal(rng: Rng, n: int) -> np.ndarray:
    return rng.integers(0, 2**23, n, dtype=np.uint32).view(np.float32) * rng.choice((-1, 1), n)


def _tiny_mix(rng: Rng, n: int) -> np.ndarray:
    return rng.choice((-1, 1), n) * 2.0 ** rng.integers(-149, -89, n)


def _some(value: float) -> Callable[[Rng, int], np.ndarray]:
    return lambda rng, n: np.where(rng.random(n) < 0.02, value, rng.standard_normal(n))


def _any_bits(rng: Rng, n: int) -> np.ndarray:
    return rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


def _ties(rng: Rng, n: int) -> np.ndarray:
    # Where a block's largest magnitude is 127, 63, ... its scale is 1 and halves are exact ties.
    x = rng.integers(-250, 251, n) / 2
    x[:: max(1, min(n, 16))] = rng.choice((127, 63, 31, 15, 7, 3, 1))
    return x


def _near_ties(rng: Rng, n: int) -> np.ndarray:
    bits = _ties(rng, n).astype(np.float32).view(np.int32)
    return (bits + np.where(bits & 0x7FFFFFFF, rng.integers(-1, 2, n), 0).astype(np.int32)).view(np.float32)


CLASSES: dict[str, Callable[[Rng, int], np.ndarray]] = {
    "normal": _normal,
    "wide exponents": _wide_exponents,
    "zero": lambda rng, n: np.zeros(n),
    "negative zero": lambda rng, n: -np.zeros(n),
    "subnormal": _subnormal,
    "tiny mix": _tiny_mix,
    "some infinite": _some(-np.inf),
    "some nan": _some(np.nan),
    "any bits": _any_bits,
    "largest": lambda rng, n: LARGEST * rng.choice((-1, 1), n),
    "large": lambda rng, n: LARGEST * rng.random(n),
    "ties": _ties,
    "near ties": _near_ties,
    "at the threshold": lambda rng, n: rng.choice((TINY, -TINY, 0), n),
    "around the threshold": lambda rng, n: TINY * (1 + rng.integers(-2, 3, n) * 2.0**-23),
    "sparse": lambda rng, n: np.where(rng.random(n) < 0.01, rng.standard_normal(n), 0),
}


def elements(name: str, rng: Rng, n: int, dtype: DType) -> np.ndarray:
    """n elements of an input class in dtype; float64 ones are not all float32 numbers."""
    with np.errstate(all="ignore"):
        x = CLASSES[name](rng, n)
        if dtype is DType.FLOAT64:
            return x.astype(np.float64) * (1 + 2.0**-30)
        return narrow(x.astype(np.float32), dtype)


class Room:
    """Bytes at an address of any alignment, between guard bytes."""

    GUARD = 64

    def __init__(self, nbytes: int, offset: int = 0, content: bytes | None = None) -> None:
        self._memory = np.full(nbytes + 2 * self.GUARD + offset + 64, 0xA5, np.uint8)
        self._start = self.GUARD + offset + -self._memory.ctypes.data % 64
        self.bytes = self._memory[self._start : self._start + nbytes]
        if content is not None:
            self.bytes[:] = np.frombuffer(content, np.uint8)
        self.address = self._memory.ctypes.data + self._start

    def taken(self) -> bytes:
        """What is inside. Fails if anything around it was written."""
        end = self._start + self.bytes.size
        assert (self._memory[: self._start] == 0xA5).all(), "written before the beginning"
        assert (self._memory[end:] == 0xA5).all(), "written past the end"
        return self.bytes.tobytes()


def without_payloads(data: bytes, dtype: DType) -> bytes:
    """Elements with every NaN made the same one: its payload and sign are not promised."""
    x = np.frombuffer(data, dtype.numpy)
    bits = x.view(f"u{dtype.itemsize}").copy()
    with np.errstate(invalid="ignore"):
        bits[np.isnan(x.astype(np.float64))] = np.iinfo(bits.dtype).max
    return bits.tobytes()


def encode(
    engine: Engine,
    codec: Codec,
    x: np.ndarray,
    dtype: DType,
    offset: int = 0,
    draw: Draw = DRAW,
) -> bytes:
    """Wire bytes of x, read from and written to memory at an offset from alignment."""
    source = Room(x.nbytes, offset, x.tobytes())
    wire = Room(codec.nbytes(x.size), offset)
    engine.encode(codec, source.address, x.size, dtype, wire.address, draw)
    return wire.taken()


def decode(engine: Engine, codec: Codec, wire: bytes, n: int, dtype: DType, offset: int = 0) -> bytes:
    """Elements of a chunk, NaN payloads removed."""
    source = Room(len(wire), offset, wire)
    target = Room(n * dtype.itemsize, offset)
    engine.decode(codec, source.address, n, target.address, dtype)
    return without_payloads(target.taken(), dtype)


def reduce(
    engine: Engine,
    codec: Codec,
    wires: list[bytes],
    n: int,
    finish: tuple[float, float],
    dtype: DType,
    offset: int = 0,
) -> bytes:
    """The finished sum of chunks as elements, NaN payloads removed."""
    sources = [Room(len(wire), offset + i, wire) for i, wire in enumerate(wires)]
    target = Room(n * dtype.itemsize, offset)
    engine.reduce(codec, [s.address for s in sources], n, finish, target.address, dtype)  # type: ignore[arg-type]
    return without_payloads(target.taken(), dtype)


def reduce_encode(
    engine: Engine,
    codec: Codec,
    wires: list[bytes],
    n: int,
    finish: tuple[float, float],
    codec_out: Codec,
    offset: int = 0,
    draw: Draw = DRAW,
) -> bytes:
    """The finished sum of chunks, encoded again; NaN payloads of raw elements removed."""
    sources = [Room(len(wire), offset + i, wire) for i, wire in enumerate(wires)]
    out = Room(codec_out.nbytes(n), offset)
    addresses = [source.address for source in sources]
    engine.reduce_encode(codec, addresses, n, finish, codec_out, out.address, draw)  # type: ignore[arg-type]
    wire = out.taken()
    dtype = codec_out.dtype
    if dtype is None:
        return wire
    elements_nbytes = n * dtype.itemsize
    assert not any(wire[elements_nbytes:]), "padding is not zero"
    assert isinstance(codec_out, Raw) or dtype.itemsize == 2
    return without_payloads(wire[:elements_nbytes], dtype)
