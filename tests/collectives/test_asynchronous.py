"""Calls under way: by the dozen, in any order, dropped, from callbacks; communicators side by side."""

from __future__ import annotations

import threading

import numpy as np
import oracle
from impatience import AMPLE_S
from placements import run

import zcomm
from zcomm import Communicator, Topology, local
from zcomm.errors import GroupError


def test_works_in_flight_by_the_dozen_waited_in_reverse(placement):
    topology, two_hops = placement
    rounds = 12
    inputs = [
        [oracle.values(100 * i + rank, 500 + 37 * i, np.dtype(np.float32)) for i in range(rounds)]
        for rank in range(topology.size)
    ]

    def program(comm):
        xs = [x.copy() for x in inputs[comm.rank]]
        works = [comm.all_reduce(x, "sum", "int8", async_op=True) for x in xs]
        synchronous = inputs[comm.rank][0].copy()
        comm.all_reduce(synchronous, "sum", "int8")  # behind the others, in order
        for work in reversed(works):
            assert work.wait() is True
            assert work.is_completed()
        assert synchronous.tobytes() == xs[0].tobytes()
        return xs

    results = run(placement, program)

    codec = zcomm.codec("int8")
    for i in range(rounds):
        everyones = [inputs[rank][i] for rank in range(topology.size)]
        expected = oracle.all_reduce(codec, codec, everyones, topology if two_hops else None, "SUM")
        for xs in results:
            assert xs[i].tobytes() == expected.tobytes()


def test_a_dropped_work_still_finishes():
    def program(comm):
        dropped = [np.arange(1000, dtype=np.float32) * (comm.rank + 1 + i) for i in range(20)]
        for x in dropped:
            comm.all_reduce(x, "sum", "raw", async_op=True)
        behind = np.arange(1000, dtype=np.float32)
        comm.all_reduce(behind, "sum", "raw")  # done after those before it
        return dropped

    results = run((Topology(nodes=2, ranks_per_node=2), True), program)

    for dropped in results:
        for i, x in enumerate(dropped):
            assert x.tobytes() == (np.arange(1000, dtype=np.float32) * (10 + 4 * i)).tobytes()


def test_two_communicators_over_one_transport_close_apart():
    def program(transport):
        first, second = Communicator(transport, "raw"), Communicator(transport, "raw")
        x = np.arange(10, dtype=np.float32)
        first.close()
        second.all_reduce(x)
        return x

    for x in local.run(2, program):
        assert x.tolist() == [2.0 * i for i in range(10)]


def test_calls_from_a_callback_run_if_asynchronous_and_are_refused_if_not():
    def program(comm):
        told, works = [], []
        x, y = np.arange(10, dtype=np.float32), np.arange(5, dtype=np.float32)

        def after(_):
            try:
                comm.all_reduce(y.copy(), "sum", "raw")
            except zcomm.errors.GroupError as error:
                told.append(str(error))
            works.append(comm.all_reduce(y, "sum", "raw", async_op=True))
            raise ZeroDivisionError("a callback's fault stays its own")

        work = comm.all_reduce(x, "sum", "raw", async_op=True)
        work.add_done_callback(after)
        work.wait()
        while not works:
            pass
        works[0].wait()
        return told, y

    for told, y in run((Topology(nodes=1, ranks_per_node=2), False), program):
        assert "async_op=True" in told[0] or told == []  # [] where the work was complete before the callback was added
        assert y.tolist() == [2.0 * i for i in range(5)]


def test_closing_in_a_callback_is_refused_and_the_works_behind_it_go_on():
    added = threading.Event()

    def program(comm):
        x, received = np.ones(1000, np.float32), np.empty(5, np.float32)
        if comm.rank:  # what it holds back keeps rank 0's works from being complete before their callbacks are added
            assert added.wait(AMPLE_S)
            for _ in range(3):
                comm.all_reduce(x, codec="raw")
            comm.send(np.full(5, 7.0, np.float32), 0, "raw")
            return x
        told, called = [], threading.Semaphore(0)

        def after(_):
            try:
                comm.close()
            except GroupError as error:
                told.append(str(error))
            called.release()

        comm.all_reduce(x, codec="raw", async_op=True)
        comm.all_reduce(x, codec="raw", async_op=True).add_done_callback(after)
        last = comm.all_reduce(x, codec="raw", async_op=True)
        message = comm.recv(received, 1, "raw", async_op=True)
        message.add_done_callback(after)
        added.set()
        last.wait()
        for _ in range(2):
            assert called.acquire(timeout=AMPLE_S)
        assert ["from a callback" in words for words in told] == [True, True]
        assert received.tolist() == [7.0] * 5
        return x

    for x in run((Topology(nodes=1, ranks_per_node=2), False), program, timeout_s=AMPLE_S):
        assert x.tolist() == [8.0] * 1000


def test_a_message_may_be_received_in_the_callback_of_another():
    added = threading.Event()

    def program(comm):
        x, y = np.arange(10, dtype=np.float32), np.arange(5, dtype=np.float32)
        if comm.rank == 0:
            assert added.wait(AMPLE_S)
            comm.send(x, 1, "raw")
            comm.send(2 * y, 1, "raw")
            return (2 * y).tolist()
        received = threading.Event()

        def after(_):
            comm.recv(y, 0, "raw")
            received.set()

        comm.recv(x, 0, "raw", async_op=True).add_done_callback(after)
        added.set()
        assert received.wait(AMPLE_S)
        return y.tolist()

    assert run((Topology(nodes=1, ranks_per_node=2), False), program, timeout_s=AMPLE_S) == [[0, 2, 4, 6, 8]] * 2


def test_a_message_may_be_sent_from_the_callback_of_another():
    def program(comm):
        x, y, sent = np.arange(10, dtype=np.float32), np.arange(5, dtype=np.float32), threading.Event()
        if comm.rank:
            comm.recv(x, 0, "raw")
            comm.recv(y, 0, "raw")
            return y.tolist()

        def after(_):
            comm.send(2 * y, 1, "raw")
            sent.set()

        comm.send(x, 1, "raw", async_op=True).add_done_callback(after)
        assert sent.wait(AMPLE_S)
        return (2 * y).tolist()

    assert run((Topology(nodes=1, ranks_per_node=2), False), program, timeout_s=AMPLE_S) == [[0, 2, 4, 6, 8]] * 2


def test_more_works_in_flight_than_there_are_tags():
    started = threading.Event()

    def program(comm):
        xs = [np.full(512, i + comm.rank, np.float32) for i in range(4600)]  # two steps each, of 8191
        comm.all_reduce(xs[0].copy(), "sum", "raw")
        if comm.rank:
            assert started.wait(AMPLE_S)
        works = [comm.all_reduce(x, "sum", "raw", async_op=True) for x in xs]
        started.set()
        for work in works:
            work.wait()
        return [i for i, x in enumerate(xs) if not (x == 2 * i + 1).all()]

    placement = (Topology(nodes=1, ranks_per_node=2), False)
    assert run(placement, program, scratch_bytes=1 << 30, timeout_s=AMPLE_S) == [[], []]
