"""The reference engine does what the protocol says, shown on small numbers worked out by hand."""

from __future__ import annotations

import inputs
import numpy as np
import pytest

from zcomm.buffers import DType
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.engines.reference import ReferenceEngine
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec

ENGINE = ReferenceEngine()


def chunks(kind: Codec, *parts: list[float]) -> list[bytes]:
    """Wire bytes of float32 elements."""
    return [inputs.encode(ENGINE, kind, np.array(part, np.float32), DType.FLOAT32) for part in parts]


def total(kind: Codec, wires: list[bytes], n: int, finish: Finish, dtype: DType) -> list[float]:
    """The finished sum as Python floats."""
    data = inputs.reduce(ENGINE, kind, wires, n, finish, dtype)
    return np.frombuffer(data, dtype.numpy).astype(np.float64).tolist()


def test_sums_run_in_the_order_of_the_chunks_and_in_float32() -> None:
    raw = codec("raw")
    wires = chunks(raw, [2.0**24], [1.0], [-(2.0**24)], [1.0])

    assert total(raw, wires, 1, NO_FINISH, DType.FLOAT32) == [1.0]  # 2^24 + 1 rounds to 2^24
    assert total(raw, [wires[i] for i in (0, 2, 1, 3)], 1, NO_FINISH, DType.FLOAT32) == [2.0]


def test_sums_of_raw_float64_run_in_float64() -> None:
    raw = codec("raw:float64")
    wires = chunks(raw, [2.0**24], [1.0])

    assert total(raw, wires, 1, NO_FINISH, DType.FLOAT64) == [2.0**24 + 1]


def test_a_sum_is_multiplied_then_divided_then_narrowed_once() -> None:
    raw = codec("raw")
    wires = chunks(raw, [257.0], [0.5])

    # 257.5 * 2 / 4 = 128.75, which bfloat16 (steps of 1 here) rounds to 129; narrowing first would give 258 / 2.
    assert total(raw, wires, 1, Finish(2.0, 4.0), DType.BFLOAT16) == [129.0]
    assert total(raw, wires, 1, Finish(divisor=4.0), DType.FLOAT32) == [64.375]


def test_a_single_negative_zero_stays_negative() -> None:
    raw = codec("raw")
    data = inputs.reduce(ENGINE, raw, chunks(raw, [-0.0]), 1, NO_FINISH, DType.FLOAT32)

    assert np.signbit(np.frombuffer(data, np.float32)).all()


def test_the_wire_bytes_do_not_depend_on_the_elements_dtype() -> None:
    x = np.random.default_rng(0).integers(-8, 9, 300).astype(np.float32)  # exact in all four dtypes
    for spec in ("int8", "int4", "bf16", "fp16"):
        wires = {inputs.encode(ENGINE, codec(spec), x.astype(dtype.numpy), dtype) for dtype in DType}

        assert len(wires) == 1, spec


def test_float64_is_rounded_to_float32_first() -> None:
    x = np.array([1 + 2.0**-9 + 2.0**-40], np.float64)  # just above a bfloat16 tie, exactly on it in float32

    wire = inputs.encode(ENGINE, codec("bf16"), x, DType.FLOAT64)

    assert np.frombuffer(wire, np.uint16)[0] == 0x3F80


@pytest.mark.parametrize("spec", ["raw", "bf16", "int8", "int3"])
def test_no_elements_take_no_bytes(spec: str) -> None:
    kind = codec(spec)

    assert kind.nbytes(0) == 0
    ENGINE.encode(kind, 0, 0, DType.FLOAT32, 0)  # nothing is read or written: there is no memory at 0
    ENGINE.decode(kind, 0, 0, 0, DType.FLOAT32)
    ENGINE.reduce(kind, [0, 0], 0, NO_FINISH, 0, DType.FLOAT32)
    ENGINE.reduce_encode(kind, [0, 0], 0, NO_FINISH, codec("int8"), 0)


def test_encoding_leaves_guard_bytes_and_misaligned_memory_alone() -> None:
    x = np.random.default_rng(1).standard_normal(77).astype(np.float32)

    assert inputs.encode(ENGINE, codec("int4"), x, DType.FLOAT32, 0) == inputs.encode(
        ENGINE, codec("int4"), x, DType.FLOAT32, 3
    )


def test_chunks_of_rotated_elements_are_added_as_they_are() -> None:
    hadamard, inner = codec("hadamard:int4"), codec("int4")
    x = [np.random.default_rng(seed).standard_normal(160).astype(np.float32) for seed in range(3)]
    wires = [inputs.encode(ENGINE, hadamard, part, DType.FLOAT32) for part in x]

    again = inputs.reduce_encode(ENGINE, hadamard, wires, 160, Finish(divisor=3), codec("hadamard:int8"))
    summed = total(hadamard, wires, 160, NO_FINISH, DType.FLOAT32)

    # Between two rotations nothing is rotated: the bytes are those of the inner codecs.
    assert again == inputs.reduce_encode(ENGINE, inner, wires, 160, Finish(divisor=3), codec("int8"))
    one_by_one = sum(np.array(total(hadamard, [wire], 160, NO_FINISH, DType.FLOAT32)) for wire in wires)
    assert summed == pytest.approx(one_by_one, abs=1e-5)
