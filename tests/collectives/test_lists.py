"""Lists of tensors and messages between two ranks: the codecs' definitions, shapes and dtypes kept."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle
import pytest
from impatience import shorten

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.buffers import DType
from zcomm.errors import BufferError, GroupError, PeerTimeout

TWO_BY_TWO = Topology(nodes=2, ranks_per_node=2)
SHAPES = [(), (7,), (0,), (3, 5), (1, 2, 2), (2, 1, 3, 1, 4)]


def run(program, topology: Topology = TWO_BY_TWO, **settings):
    def main(transport):
        with Communicator(transport, Plan(**settings), topology) as comm:
            return program(comm)

    return local.run(topology.size, main)


def tensors(rank: int, dtypes: list) -> list[np.ndarray]:
    made = []
    for number, shape in enumerate(SHAPES):
        x = oracle.values(rank * 31 + number, int(np.prod(shape)), np.dtype(np.float32)).reshape(shape)
        made.append(x.astype(dtypes[number % len(dtypes)]))
    return made


@pytest.mark.parametrize(
    "dtypes",
    [[np.float32], [np.float16], [np.float32, ml_dtypes.bfloat16, np.float16], [np.float64, np.float32]],
    ids=["float32", "float16", "mixed", "with float64"],
)
@pytest.mark.parametrize("name", ["raw", "int8"])
@pytest.mark.parametrize("async_op", [False, True])
def test_coalesced_tensors_are_reduced_in_one_message(dtypes, name, async_op):
    def program(comm):
        xs = tensors(comm.rank, dtypes)
        before = [x.shape for x in xs]
        work = comm.all_reduce_coalesced(xs, "avg", name, async_op)
        if async_op:
            work.wait()
        assert [x.shape for x in xs] == before
        assert comm.stats()["all_reduce"].calls == 1
        return xs

    results = run(program, one_shot_bytes=0)

    flat = [np.concatenate([x.astype(np.float32).reshape(-1) for x in tensors(rank, dtypes)]) for rank in range(4)]
    codec = zcomm.codec(name).for_dtype(DType.FLOAT16 if dtypes == [np.float16] else DType.FLOAT32)
    expected = oracle.all_reduce(codec, codec, flat, TWO_BY_TWO, "AVG")
    for xs in results:
        got = np.concatenate([x.astype(np.float32).reshape(-1) for x in xs])
        parts = np.split(expected, np.cumsum([x.size for x in xs])[:-1])
        wanted = np.concatenate([part.astype(x.dtype).astype(np.float32) for part, x in zip(parts, xs, strict=True)])
        assert np.allclose(got, wanted, rtol=1e-6 if np.float64 in dtypes else 0, atol=0)
        for x, dtype in zip(xs, dtypes * len(SHAPES), strict=False):
            assert x.dtype == dtype


def test_list_forms_are_the_single_forms():
    counts = (5, 0, 130, 7)

    def program(comm):
        everyones = [oracle.values(rank, sum(counts), np.dtype(np.float32)) for rank in range(4)]
        starts = np.cumsum([0, *counts])
        mine = [everyones[comm.rank][starts[r] : starts[r + 1]].copy() for r in range(4)]
        gathered = [np.empty(count, np.float32) for count in counts]
        comm.all_gather(gathered, mine[comm.rank])
        single = np.empty(sum(counts), np.float32)
        comm.all_gather_single(single, mine[comm.rank], counts=counts)
        assert np.concatenate(gathered).tobytes() == single.tobytes()

        reduced, wanted = np.empty((2, counts[comm.rank]), np.float32)
        comm.reduce_scatter(reduced, mine, "avg")
        comm.reduce_scatter_single(wanted, everyones[comm.rank], "avg", counts=counts)
        assert reduced.tobytes() == wanted.tobytes()

        sent = [np.full((comm.rank + 1, peer), 10.0 * comm.rank + peer, np.float32) for peer in range(4)]
        came = [np.empty((peer + 1, comm.rank), np.float32) for peer in range(4)]
        comm.all_to_all(came, sent, "raw")
        for peer, x in enumerate(came):
            assert (x == 10.0 * peer + comm.rank).all()

    run(program)


def test_lists_that_do_not_fit_are_refused():
    def program(comm):
        ones = [np.ones(3, np.float32)] * comm.size
        told = []
        for call in (
            lambda: comm.all_gather(ones[:1], ones[0]),
            lambda: comm.all_gather(np.ones((2, 3), np.float32), ones[0]),
            lambda: comm.reduce_scatter(np.empty(4, np.float32), ones),
            lambda: comm.all_reduce_coalesced([]),
            lambda: comm.all_reduce_coalesced([ones[0], np.ones(3, np.int32)]),
            lambda: comm.all_gather([np.empty(4, np.float32)] * 2, ones[0]),
            lambda: comm.gather(ones[0], np.ones((2, 3), np.float32), comm.rank),
            lambda: comm.scatter(np.empty(3, np.float32), np.ones((2, 3), np.float32), comm.rank),
        ):
            with pytest.raises(BufferError) as caught:
                call()
            told.append(str(caught.value))
        return told

    told = run(program, Topology(nodes=1, ranks_per_node=2))[0]

    assert "list of 2 tensors" in told[0]
    assert "tensors[1] has dtype int32" in told[4]


@pytest.mark.parametrize("name", ["raw", "bf16", "int8", "int4"])
def test_a_message_arrives_as_its_bytes_decode(name):
    xs = [oracle.values(rank, 1000, np.dtype(np.float32)).reshape(20, 50) for rank in range(4)]

    def program(comm):
        if comm.rank == 0:
            for peer in (1, 2, 3):
                comm.send(xs[peer][::2], peer, name)
        else:
            came = np.full((20, 50), 7, np.float32)
            comm.recv(came[::2], 0, name)
            assert (came[1::2] == 7).all()
            expected = oracle.through(zcomm.codec(name), xs[comm.rank][::2].reshape(-1))
            assert came[::2].reshape(-1).tobytes() == expected.tobytes()

    run(program)


def test_messages_match_in_order_beside_collectives_and_wait_in_any_order():
    def program(comm):
        peer = comm.rank ^ 1
        sent = [np.full(100 + i, 10.0 * comm.rank + i, np.float32) for i in range(8)]
        came = [np.empty(100 + i, np.float32) for i in range(8)]
        receives = [comm.recv(x, peer, "raw", async_op=True) for x in came]
        total = np.ones(10, np.float32)
        comm.all_reduce(total, "sum", "raw")
        sends = [comm.send(x, peer, "raw", async_op=True) for x in sent]
        for work in [*reversed(receives), *sends]:
            work.wait()
        assert total[0] == 4
        for i, x in enumerate(came):
            assert (x == 10.0 * peer + i).all()
        stats = comm.stats()
        assert stats["send"].calls == stats["recv"].calls == 8
        assert stats["send"].wire_bytes == sum(zcomm.codec("raw").nbytes(100 + i) for i in range(8))
        assert stats["send"].wire_bytes_inter == 0

    run(program)


def test_a_dropped_message_still_arrives_and_its_work_is_a_real_one():
    x = oracle.values(3, 200_000, np.dtype(np.float32))

    def program(comm):
        if comm.rank == 0:
            comm.send(x, 1, "int8", async_op=True)
            return None
        came = np.empty_like(x)
        work = comm.recv(came, 0, "int8", async_op=True)
        while not work.is_completed():
            pass
        assert work.exception() is None
        return came

    _, came = run(program, Topology(nodes=1, ranks_per_node=2))

    assert came.tobytes() == oracle.through(zcomm.codec("int8"), x).tobytes()


def test_a_message_that_never_comes_is_a_timeout_and_bad_peers_are_refused():
    def program(comm):
        x = np.ones(10, np.float32)
        for call in (lambda: comm.send(x, 5), lambda: comm.recv(x, comm.rank), lambda: comm.send(x, True)):
            with pytest.raises(GroupError):
                call()
        if comm.rank == 0:
            shorten(comm, 0.3)
            with pytest.raises(PeerTimeout, match=r"recv from rank 1 number 1 on rank 0 of .* 10 float32 as int8"):
                comm.recv(x, 1)
        comm.close()
        with pytest.raises(GroupError, match="closed"):
            comm.send(x, 1 - comm.rank)

    run(program, Topology(nodes=1, ranks_per_node=2))
