"""Plan.auto and Plan.min_elems: raw where a codec cannot pay, alike on all ranks, counted with the reason."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from placements import run

import zcomm
from zcomm import Topology
from zcomm.buffers import DType
from zcomm.collectives.choice import choose
from zcomm.collectives.request import Pattern, Request
from zcomm.plan import AUTO_RAW_BYTES, Plan

TWO_BY_TWO = (Topology(nodes=2, ranks_per_node=2), True)


def reasons(comm) -> dict[str, dict[str, int]]:
    return {name: stats.uncompressed for name, stats in comm.stats().items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_auto_sends_up_to_64_kib_raw_and_more_in_the_codec_named(dtype):
    limit = AUTO_RAW_BYTES // np.dtype(dtype).itemsize
    sizes = [0, 7, limit, limit + 1, limit + 4099]
    inputs = [oracle.values(rank, sizes[-1], np.dtype(dtype)) for rank in range(4)]

    def program(comm):
        results = []
        for n in sizes:
            x = inputs[comm.rank][:n].copy()
            comm.all_reduce(x, "avg")
            results.append(x)
        return results, reasons(comm)

    exact = run(TWO_BY_TWO, program, codec="raw")
    plain = run(TWO_BY_TWO, program, codec="int8")
    auto = run(TWO_BY_TWO, program, codec="int8", auto=True)

    for (results, why), (raw, _), (coded, _) in zip(auto, exact, plain, strict=True):
        assert why == {"all_reduce": {f"auto: {AUTO_RAW_BYTES} bytes or fewer": 3}}
        for n, result, uncompressed, compressed in zip(sizes, results, raw, coded, strict=True):
            assert result.tobytes() == (uncompressed if n <= limit else compressed).tobytes()


def test_auto_counts_all_ranks_together_and_calls_of_every_codec():
    n = AUTO_RAW_BYTES // 16  # elements of each of 4 ranks, together as much as travels raw

    def program(comm):
        part, more = np.ones(n, np.float32), np.ones(n + 1, np.float32)
        for x in (part, more):
            comm.all_gather_single(np.empty(4 * x.size, np.float32), x, codec="int4")
            comm.reduce_scatter_single(np.empty(x.size, np.float32), np.ones(4 * x.size, np.float32))
        comm.all_to_all_single(np.empty(8, np.float32), np.ones(8, np.float32))
        return reasons(comm)

    for why in run(TWO_BY_TWO, program, codec="int8", auto=True):
        raw = {f"auto: {AUTO_RAW_BYTES} bytes or fewer": 1}
        assert why == {"all_gather": raw, "reduce_scatter": raw, "all_to_all": {}}


@pytest.mark.parametrize(
    ("codec", "dtype", "nodes", "told"),
    [
        ("int8", DType.FLOAT32, 1, "all ranks are on one node"),
        ("bf16", DType.FLOAT16, 2, "bf16 makes float16 smaller by less than a quarter"),
        ("bf16", DType.BFLOAT16, 2, "bf16 makes bfloat16 smaller by less than a quarter"),
        ("int7", DType.BFLOAT16, 2, None),
        ("bf16", DType.FLOAT32, 2, None),
        ("int8", DType.FLOAT16, 2, None),
        ("raw", DType.FLOAT32, 1, None),
        ("raw:float16", DType.FLOAT32, 1, None),
    ],
)
def test_auto_is_never_lossier_than_the_codec_named(codec, dtype, nodes, told):
    x = np.ones(1 << 20, dtype.numpy)
    span = zcomm.buffers.span_of(x, "x")
    named = zcomm.codec(codec)
    request = Request("all_reduce", Pattern.ALL_REDUCE, span, span, None, named, named, (x.size,))

    chosen = choose(Plan(codec, auto=True), Topology(nodes=nodes, ranks_per_node=2), request)

    assert chosen.uncompressed == (told and f"auto: {told}")
    assert chosen.codec == (zcomm.codec("raw") if told else named).for_dtype(dtype)
    assert choose(Plan(codec), Topology(nodes=nodes, ranks_per_node=2), request).uncompressed is None
