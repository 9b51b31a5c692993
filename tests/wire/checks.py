"""Claims that hold for every codec, each a function of the codec. A codec's test file calls them and adds its own."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np

from zcomm.errors import CodecError
from zcomm.wire.codec import WIRE_ALIGNMENT, Codec
from zcomm.wire.draw import Draw
from zcomm.wire.raw import Raw
from zcomm.wire.registry import codec

VECTORS = Path(__file__).with_name("vectors")
GUARD = 0xA5
DRAW = Draw(seed=2**40 + 9, call=3, first=2**33 + 13)  # for codecs that round by chance


def element_type(kind: Codec) -> np.dtype:
    """What the codec's encode takes: float32, but raw's own."""
    return kind.dtype.numpy if isinstance(kind, Raw) else np.dtype(np.float32)


def encoded(kind: Codec, x: np.ndarray, draw: Draw = DRAW) -> np.ndarray:
    """Wire bytes of x, written between guard bytes that must survive."""
    nbytes = kind.nbytes(x.size)
    memory = np.full(nbytes + 2 * WIRE_ALIGNMENT, GUARD, np.uint8)
    wire = memory[WIRE_ALIGNMENT : WIRE_ALIGNMENT + nbytes]
    kind.encode(x, wire, draw)
    assert (memory[:WIRE_ALIGNMENT] == GUARD).all()
    assert (memory[WIRE_ALIGNMENT + nbytes :] == GUARD).all()
    return wire


def decoded(kind: Codec, wire: np.ndarray, n_elems: int) -> np.ndarray:
    """Elements out of wire, written between guard elements that must survive."""
    memory = np.full(n_elems + 2, 7.5, element_type(kind))
    kind.decode(wire, memory[1 : 1 + n_elems])
    assert memory[0] == memory[-1] == 7.5
    return memory[1 : 1 + n_elems]


def check_identity(kind: Codec) -> None:
    """It parses from its own string, pickles, compares, hashes and cannot be changed."""
    assert codec(str(kind)) == kind
    assert str(codec(str(kind))) == str(kind)
    assert pickle.loads(pickle.dumps(kind)) == kind
    assert hash(pickle.loads(pickle.dumps(kind))) == hash(kind)
    assert codec(kind) is kind
    try:
        kind.bits = 3  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return
    raise AssertionError(f"{kind!r} can be changed")


def check_nbytes(
    kind: Codec,
    expected: dict[int, int],  # n_elems: bytes, from the table in docs/wire-format.md
) -> None:
    """The size is what the documentation says, and arrays of another size are refused."""
    assert {n: kind.nbytes(n) for n in expected} == expected
    assert kind.nbytes(0) == 0
    assert all(kind.nbytes(n) % WIRE_ALIGNMENT == 0 for n in range(100))
    for narrow in (np.int32(2**31 - 1), np.uint8(255), np.array(2**31 - 1, np.int32)):  # bytes are more than it holds
        assert kind.nbytes(narrow) == kind.nbytes(int(narrow))
    x = np.zeros(9, element_type(kind))
    wire = np.zeros(kind.nbytes(9), np.uint8)
    calls = (
        lambda: kind.nbytes(-1),
        lambda: kind.nbytes(9.0),
        lambda: kind.nbytes("9"),
        lambda: kind.encode(x.tolist(), wire, DRAW),
        lambda: kind.encode(None, wire, DRAW),
        lambda: kind.encode(x, None, DRAW),
        lambda: kind.decode(None, x),
        lambda: kind.encode(x, wire[:-1], DRAW),
        lambda: kind.encode(x, np.zeros(wire.size + 16, np.uint8), DRAW),
        lambda: kind.encode(x.reshape(3, 3), wire, DRAW),
        lambda: kind.encode(x.astype(np.int32), wire, DRAW),
        lambda: kind.decode(wire[:-16], x),
        lambda: kind.decode(wire.view(np.int8), x),
    )
    for call in calls:
        try:
            call()
        except CodecError:
            continue
        raise AssertionError("a wrong argument was taken")


def check_error_bound(
    kind: Codec,
    x: np.ndarray,  # float32 (n,)
) -> None:
    """Every element comes back within its own bound, and the bound is finite where the docs promise one."""
    bound = kind.error_bound(x)
    with np.errstate(invalid="ignore"):
        error = np.abs(decoded(kind, encoded(kind, x), x.size).astype(np.float64) - x)

    assert bound.dtype == np.float64
    assert bound.shape == x.shape
    assert np.all((error <= bound) | np.isinf(bound))


def elements_of_all_sorts(
    n_elems: int,
    seed: int,
) -> dict[str, np.ndarray]:  # float32 (n_elems,) each
    """What blocks may hold, by name."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(n_elems).astype(np.float32)
    return {
        "normal": normal,
        "of many magnitudes": (normal * 2.0 ** rng.integers(-40, 40, n_elems)).astype(np.float32),
        "any bits": rng.integers(0, 2**32, n_elems, dtype=np.uint32).view(np.float32),
        "largest": np.where(rng.random(n_elems) < 0.1, np.finfo(np.float32).max, normal).astype(np.float32),
        "tiny": (normal * 2.0**-95).astype(np.float32),
        "zeros": np.zeros(n_elems, np.float32),
    }


def check_elements_of_all_sorts(kind: Codec, n_elems: int = 5_003, seed: int = 0) -> None:
    """Whatever blocks hold comes back within its bound, and is encoded alike each time."""
    for x in elements_of_all_sorts(n_elems, seed).values():
        check_error_bound(kind, x)
        check_deterministic(kind, x)


def check_largest_stay_finite(kind: Codec) -> None:
    """The largest finite float32 decodes to a finite one."""
    x = elements_of_all_sorts(5_003, 0)["largest"]

    assert np.isfinite(decoded(kind, encoded(kind, x), x.size)).all()


def check_bad_block(
    kind: Codec,
    bad: float,
    block: int | None = None,  # elements that a bad one takes with it; None: all that share anything
) -> None:
    """A bad element turns its own block into NaN and no other, the partial last one included."""
    block = kind.block if block is None else block
    x = np.ones(max(3 * block, kind.block) + 5, np.float32)
    x[block + 3] = bad

    y = decoded(kind, encoded(kind, x), x.size)

    assert np.isnan(y[block : 2 * block]).all()
    assert np.isfinite(np.delete(y, slice(block, 2 * block))).all()
    assert np.isinf(kind.error_bound(x)[block : 2 * block]).all()
    check_error_bound(kind, x)


def check_deterministic(kind: Codec, x: np.ndarray) -> None:
    """What is encoded does not depend on what the memory held, and encoding leaves the input alone."""
    before = x.tobytes()
    first = encoded(kind, x)
    other = np.zeros(kind.nbytes(x.size), np.uint8)
    kind.encode(x, other, DRAW)

    assert first.tobytes() == other.tobytes()
    assert x.tobytes() == before


def check_unbiased(
    kind: Codec,
    x: np.ndarray,  # float32 (n,)
    calls: int = 500,
) -> None:
    """Over many calls each element is the mean of what is decoded, and all of them together are."""
    errors = np.empty((calls, x.size))
    for call in range(calls):
        errors[call] = decoded(kind, encoded(kind, x, Draw(1, call, 0)), x.size) - x.astype(np.float64)

    # Five deviations; what happens less often than 12 times in all calls may not have happened, and is as much.
    bound = kind.error_bound(x)
    mean, deviation = errors.mean(axis=0), errors.std(axis=0) / np.sqrt(calls)
    assert (np.abs(mean) <= 5 * deviation + bound * (2.0**-15 + 12 / calls)).all()
    together = errors.mean(axis=1)
    assert abs(together.mean()) <= 5 * together.std() / np.sqrt(calls) + bound.mean() * 2.0**-15


def check_cuts(kind: Codec) -> None:
    """What is decoded does not depend on where a shard was cut, between blocks."""
    n = 5 * kind.block + 37
    x, at = np.random.default_rng(7).standard_normal(n).astype(np.float32), 2**33 + 6
    whole = decoded(kind, encoded(kind, x, Draw(4, 5, at)), n)

    edges = [0, kind.block, 4 * kind.block, n]
    pieces = [decoded(kind, encoded(kind, x[lo:hi], Draw(4, 5, at + lo)), hi - lo) for lo, hi in pairwise(edges)]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


def check_golden(name: str) -> None:
    """Bytes and decoded values are those of the independent implementation in exact_codecs.py."""
    kind = codec(name)
    with np.load(VECTORS / f"{name.replace(':', '-')}.npz") as vectors:
        cases = sorted(key.removesuffix("/x") for key in vectors if key.endswith("/x"))
        assert len(cases) >= 20
        draw = Draw(*vectors["draw"].tolist()) if "draw" in vectors else DRAW
        for case in cases:
            x = vectors[f"{case}/x"].view(np.float32)
            wire = encoded(kind, x, draw)
            assert wire.tobytes() == vectors[f"{case}/wire"].tobytes(), f"{name}: wire bytes of {case!r}"
            y, expected = decoded(kind, wire, x.size), vectors[f"{case}/decoded"].view(np.float32)
            assert np.array_equal(np.isnan(y), np.isnan(expected)), f"{name}: NaNs of {case!r}"
            y, expected = y[~np.isnan(y)], expected[~np.isnan(expected)]
            assert y.tobytes() == expected.tobytes(), f"{name}: decoded values of {case!r}"
