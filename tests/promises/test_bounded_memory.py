"""Promise 11: scratch is pooled, capped and freed with the communicator; what is remembered of calls is bounded."""

from __future__ import annotations

import gc
import threading
import weakref

import forms
import numpy as np
from impatience import AMPLE_S
from planted import assert_noticed, faults

from zcomm.collectives import settle
from zcomm.collectives.scratch import ScratchPool

CAP = 300_000
KEPT_SCHEDULES = settle._KEPT_SCHEDULES


def check() -> None:
    slabs: list[weakref.ref] = []
    made = threading.Event()

    def program(comm):
        pool = comm._conductor.scratch
        generator = np.random.default_rng(5)
        sizes = generator.integers(1, 40_000, 60)
        held = 0
        for n in sizes:
            comm.all_reduce(np.ones(n, np.float32))
            held = max(held, len(pool._free))
            assert pool.free_bytes <= CAP, "more scratch is kept than the plan says"
        assert held == 1, "one call at a time needs one slab"
        works, sizes = [], generator.integers(20_000, 40_000, 30)
        if comm.rank == 1:
            made.wait(AMPLE_S)  # so rank 0 has all of its calls in flight
        try:
            for n in sizes:
                works.append(comm.all_reduce(np.ones(n, np.float32), async_op=True))
                assert pool.free_bytes + pool.used_bytes <= CAP, "calls in flight use more than the plan says"
        finally:
            made.set()
        for work in works:
            work.wait()
        comm.all_reduce(np.ones(90_000, np.float32))  # needs nearly all
        assert 200_000 < pool.free_bytes <= CAP, "more scratch is kept than the plan says"
        for n in range(1, KEPT_SCHEDULES + 50):
            comm.all_gather_single(np.ones(2 * n, np.float32), np.ones(n, np.float32))
        assert len(comm._conductor._settler._kept) <= KEPT_SCHEDULES
        slabs.extend(weakref.ref(slab) for slab in pool._free)
        comm.close()
        assert pool.free_bytes == 0, "scratch outlives its communicator"

    forms.run("2", program, scratch_bytes=CAP, one_shot_bytes=0, check="never")
    gc.collect()
    assert slabs
    assert not any(ref() for ref in slabs)


def test_scratch_is_capped_in_use_or_not_and_freed_by_close():
    check()


def slabs_pile_up(monkeypatch):
    monkeypatch.setattr(ScratchPool, "_shrink", lambda self: None)


def slabs_are_never_used_again(monkeypatch):
    take = ScratchPool.take

    def always_new(self, nbytes):
        free, self._free = self._free, []
        slab = take(self, nbytes)
        self._free = free
        return slab

    monkeypatch.setattr(ScratchPool, "take", always_new)


def calls_in_flight_are_not_limited(monkeypatch):
    monkeypatch.setattr(ScratchPool, "has_room", lambda self, nbytes: True)


def close_frees_nothing(monkeypatch):
    monkeypatch.setattr(ScratchPool, "clear", lambda self: None)


def every_schedule_is_kept(monkeypatch):
    monkeypatch.setattr(settle, "_KEPT_SCHEDULES", 1 << 30)


@faults(
    slabs_pile_up,
    slabs_are_never_used_again,
    calls_in_flight_are_not_limited,
    close_frees_nothing,
    every_schedule_is_kept,
)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(check, fault, monkeypatch)
