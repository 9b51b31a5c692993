"""Order and lifetimes: results do not depend on who is slow, on who lets go of what, or on how much is in flight."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import forms
import numpy as np
import oracle
import pytest
from impatience import AMPLE_S

import zcomm
from zcomm import Communicator, Plan, local


def values(rank: int, n_elems: int) -> np.ndarray:
    return oracle.values(rank, n_elems, np.dtype(np.float32))


class Unsteady:
    """An exchange whose every step is late by chance."""

    def __init__(self, exchange, chance: random.Random) -> None:
        self._exchange, self._chance = exchange, chance

    def __getattr__(self, name):
        step = getattr(self._exchange, name)

        def late():
            time.sleep(self._chance.choice((0, 0, 0.0005, 0.002)))
            return step()

        return late


def unsteady(transport, seed: int):
    """A transport whose ranks, opens, sends and waits are late by chance, each rank otherwise."""
    chance, opened = random.Random(100 * seed + transport.rank), transport.open

    def late(*args):
        time.sleep(chance.choice((0, 0, 0.001)))
        return Unsteady(opened(*args), chance)

    transport.open = late
    return transport


@pytest.mark.parametrize("placement", ["3", "2x2", "2+1"])
def test_ranks_that_are_late_at_any_step_change_no_result(placement):
    """Every form in flight at once, in many chunks, on ranks that fall out of step everywhere."""
    topology = forms.PLACEMENTS[placement]

    def of_rank(transport, seed):
        plan = Plan("int4:64", chunk_elems=256, one_shot_bytes=0)
        with Communicator(unsteady(transport, seed) if seed else transport, plan, topology) as comm:
            cases = [
                form(comm, values(comm.rank + 10 * number, 900 * comm.size), "avg", np.copy)
                for number, form in enumerate(forms.FORMS.values())
            ]
            works = [case.call(async_op=True) for case in cases]
            for work in random.Random(seed).sample(works, len(works)):
                work.wait()
            return [forms.as_array(array).tobytes() for case in cases for array in case.written]

    steady, *others = (local.run(topology.size, of_rank, seed) for seed in (0, 1, 2))

    assert others == [steady, steady]


@pytest.mark.parametrize("placement", ["2", "2x2"])
def test_calls_keep_alive_what_they_read_and_write(placement):
    """Inputs, outputs and works are dropped and collected at once, their memory given to others; sums are right."""

    def program(comm):
        results = []
        for step in range(30):
            out = np.full(400, np.nan, np.float32)
            results.append(out)
            comm.reduce_scatter_single(
                out, np.full((400 * comm.size, 2), comm.rank + step, np.float32)[:, 0], "sum", "raw", async_op=True
            )
            comm.all_reduce(values(comm.rank, 1000), "sum", "int8", async_op=True)
            gc.collect(0)
            _ = [np.full(400 * comm.size, -1e9, np.float32) for _ in range(4)]
        comm.all_reduce(np.ones(1, np.float32))  # behind all others
        total = sum(range(comm.size))
        assert all((out == total + step * comm.size).all() for step, out in enumerate(results))

    forms.run(placement, program, one_shot_bytes=0)


def test_arrays_are_let_go_when_their_call_is_done():
    def program(comm):
        seen = []
        for asynchronous in (False, True):
            for form in forms.FORMS.values():
                case = form(comm, values(comm.rank, 600 * comm.size), "sum", np.copy)
                work = case.call(async_op=asynchronous)
                if asynchronous:
                    work.wait()
                seen += [weakref.ref(array) for array in (*case.written, *case.read)]
                del case
        comm.all_reduce(np.ones(1, np.float32), async_op=True).wait()  # the worker, too, has done the last
        gc.collect()
        return [ref() is None for ref in seen]

    assert all(all(dead) for dead in forms.run("2", program))


def test_a_communicator_dropped_with_works_in_flight_finishes_them_and_ends():
    def of_rank(transport):
        comm = Communicator(transport, Plan("raw", chunk_elems=256, one_shot_bytes=0))
        before = threading.active_count()
        xs = [np.full(3000, comm.rank + step, np.float32) for step in range(12)]
        last = [comm.all_reduce(x, async_op=True) for x in xs][-1]
        thread = comm._conductor._worker._thread
        kept = weakref.ref(comm._conductor.scratch)
        del comm
        gc.collect()
        last.wait()
        del last
        thread.join(AMPLE_S)
        assert not thread.is_alive()
        assert all((x == 1 + 2 * step).all() for step, x in enumerate(xs))
        gc.collect()
        assert kept() is None
        return before

    local.run(2, of_rank)


@pytest.mark.parametrize("scratch_bytes", [0, 100_000, 1 << 28])
def test_a_hundred_works_in_flight_use_no_more_scratch_than_the_plan_says(scratch_bytes):
    """Calls beyond it begin when others have ended; on one rank alone if need be, as here: rank 0 waits for nothing."""
    n, calls = 20_000, 100
    most = []

    def program(comm):
        pool = comm._conductor.scratch
        comm.all_reduce(values(comm.rank, n))
        (settled,) = comm._conductor._settler._kept.values()
        one = settled.schedule.scratch_bytes
        xs = [values(comm.rank + step, n) for step in range(calls)]
        works = []
        for x in xs:
            works.append(comm.all_reduce(x, "avg", async_op=True))
            most.append((pool.used_bytes + pool.free_bytes) / max(scratch_bytes, one))
        for work in reversed(works):
            work.wait()
        assert pool.used_bytes == 0
        assert pool.free_bytes <= scratch_bytes
        return xs

    results = forms.run("2x2", program, scratch_bytes=scratch_bytes, one_shot_bytes=0)

    assert max(most) <= 1
    codec = zcomm.codec("int8")
    for step in (0, 1, 50, 99):
        inputs = [values(rank + step, n) for rank in range(4)]
        wanted = oracle.all_reduce(codec, codec, inputs, forms.PLACEMENTS["2x2"], "AVG")
        assert all(xs[step].tobytes() == wanted.tobytes() for xs in results)


def test_scratch_that_is_scarce_on_one_rank_only_stops_nobody(monkeypatch):
    """Whether there is room is each rank's own matter: messages are the same."""

    def program(comm):
        if comm.rank == 0:
            monkeypatch.setattr(comm._conductor.scratch, "_cap_bytes", 0)
        xs = [np.full(5000, comm.rank + step, np.float32) for step in range(40)]
        works = [comm.all_reduce(x, "sum", "raw", async_op=True) for x in xs]
        for work in works:
            work.wait()
        assert all((x == 3 + 3 * step).all() for step, x in enumerate(xs))

    forms.run("3", program, one_shot_bytes=0)


def test_the_bytes_of_a_failed_call_do_not_count_as_in_use_for_ever():
    def main(transport):
        comm = Communicator(transport, Plan("raw", check="never", one_shot_bytes=0, timeout_s=AMPLE_S))
        if transport.rank == 1:
            return
        from impatience import shorten

        shorten(comm, 0.05)
        for _ in range(3):
            with pytest.raises(zcomm.errors.PeerTimeout):
                comm.all_reduce(np.ones(5000, np.float32))
        gc.collect()
        assert comm._conductor.scratch.used_bytes == 0

    local.run(2, main)
