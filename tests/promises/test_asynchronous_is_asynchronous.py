"""Promise 10: an asynchronous call returns before its peers have come; works own their arrays, are waited for in any
order, dropped and collected."""

from __future__ import annotations

import gc
import threading
import time

import forms
import numpy as np
import oracle
import pytest
from impatience import AMPLE_S, shorten
from planted import SHORT_S, assert_noticed, faults

import zcomm
from zcomm.collectives.conductor import Conductor
from zcomm.errors import PeerTimeout
from zcomm.work import Work, Worker

DOZENS = 36


def check_returns_at_once(timeout_s: float) -> None:
    """Rank 1 calls only when rank 0 has made all its calls, new kinds and known ones, and looked at them."""
    made = threading.Event()

    def program(comm):
        comm.all_reduce(np.ones(10, np.float32))
        shorten(comm, timeout_s)
        xs = [np.full(10 * (1 + step % 3), step, np.float32) for step in range(6)]
        if comm.rank == 1:
            made.wait(AMPLE_S)
        try:
            works = [comm.all_reduce(x, "sum", "raw", async_op=True) for x in xs]
            if comm.rank == 0:
                assert not any(work.is_completed() for work in works), "complete without its peers"
        except PeerTimeout:
            raise AssertionError("an asynchronous call waited for its peers") from None
        finally:
            made.set()
        for work in reversed(works):
            assert work.wait() is True
            assert work.is_completed()
        assert all((x == 2 * step).all() for step, x in enumerate(xs))

    forms.run("2", program)


def check_any_order(placement: str) -> None:
    def program(comm):
        xs = [oracle.values(comm.rank + 9 * step, 700 + step, np.dtype(np.float32)) for step in range(DOZENS)]
        if comm.rank == 1:
            time.sleep(0.05)
        works = [comm.all_reduce(x, "avg", async_op=True) for x in xs]
        dropped = set(range(0, DOZENS, 3))
        for step in dropped:
            works[step] = None
        gc.collect(0)
        last = max(set(range(DOZENS)) - dropped)
        for step in sorted(set(range(DOZENS)) - dropped, reverse=True):
            works[step].wait()
            if step == last:  # works are done in the order made, so those dropped before it are, too
                seen = [x.copy() for x in xs[:last]]
        assert all(np.array_equal(x, was) for x, was in zip(xs[:last], seen, strict=True)), "changed after its wait"
        return xs[:last]

    results = forms.run(placement, program, one_shot_bytes=1 << 20)
    codec = zcomm.codec("int8")
    for step in range(len(results[0])):
        inputs = [oracle.values(rank + 9 * step, 700 + step, np.dtype(np.float32)) for rank in range(len(results))]
        wanted = oracle.one_shot_all_reduce(codec, inputs, "AVG")
        assert all(xs[step].tobytes() == wanted.tobytes() for xs in results), step


def test_an_asynchronous_call_returns_before_its_peers_come():
    check_returns_at_once(AMPLE_S)


@pytest.mark.parametrize("placement", ["2", "4", "8", "2x2"])
def test_dozens_in_flight_waited_in_reverse_dropped_and_collected(placement):
    check_any_order(placement)


def calls_are_synchronous(monkeypatch):
    call = Conductor.call

    def waits(self, request, async_op):
        call(self, request, False)
        return Work(None) if async_op else None

    monkeypatch.setattr(Conductor, "call", waits)


def new_calls_are_compared_at_once(monkeypatch):
    class Eager(Worker):
        def submit(self, work):
            work.run()

    monkeypatch.setattr("zcomm.collectives.conductor.Worker", Eager)


def works_are_complete_from_the_start(monkeypatch):
    monkeypatch.setattr(Work, "is_completed", lambda self: True)


def waiting_does_not_wait(monkeypatch):
    monkeypatch.setattr(Work, "wait", lambda self, timeout_s=None: True)


@faults(calls_are_synchronous, new_calls_are_compared_at_once, works_are_complete_from_the_start, waiting_does_not_wait)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check_returns_at_once(SHORT_S), fault, monkeypatch)
