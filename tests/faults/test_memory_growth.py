"""Memory over thousands of calls: sizes, collectives, communicators and failures that come and go leave nothing."""

from __future__ import annotations

import gc

import forms
import numpy as np
import pytest

from zcomm import Communicator, Plan, local
from zcomm.errors import MismatchError

MEBI = 1 << 20


def resident_bytes() -> int:
    """Without what is mapped from files: of that the system keeps in memory what it likes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def test_two_thousand_calls_of_every_form_in_changing_sizes():
    """On two ranks that are threads here, so both ranks' growth together is under 8 MiB."""
    calls, names = 2000, list(forms.FORMS)

    def program(comm):
        generator = np.random.default_rng(3)  # the same sizes on both ranks
        comm.all_reduce(np.ones(120_000, np.float32))
        start = 0
        for number in range(calls):
            x = np.ones(2 * int(generator.integers(0, 30_000)), np.float32)
            forms.carry_out(forms.FORMS[names[number % len(names)]](comm, x, "sum", np.copy), number % 3 == 0)
            if number == calls // 5:
                gc.collect()
                start = resident_bytes()
        gc.collect()
        return resident_bytes() - start

    assert max(forms.run("2", program)) < 8 * MEBI


def test_no_message_is_left_behind_by_calls_or_by_mismatches():
    def of_rank(transport):
        with Communicator(transport, Plan("int8", check="first", one_shot_bytes=0)) as comm:
            for step in range(60):
                for form in forms.FORMS.values():
                    forms.carry_out(form(comm, np.ones(comm.size * (step % 7), np.float32), "sum", np.copy))
                with pytest.raises(MismatchError):
                    comm.all_reduce(np.ones(1000 + step + (comm.rank == 1), np.float32))
        return transport.world

    world, _, _ = local.run(3, of_rank)

    assert not world.posted
    assert not world.arrived


def test_communicators_made_and_closed_leave_no_threads_nor_tags():
    import threading

    def of_rank(transport):
        for _ in range(100):
            with Communicator(transport, "int8") as comm:
                comm.all_reduce(np.ones(5000, np.float32), async_op=True).wait()
        return transport.tags.taken()

    before = set(threading.enumerate())  # some may be of earlier tests, and about to end
    assert local.run(2, of_rank) == [0, 0]
    assert set(threading.enumerate()) <= before


def test_what_is_remembered_of_calls_is_bounded():
    from zcomm.collectives import conductor, settle

    def program(comm):
        for n in range(conductor._KEPT_AGREEMENTS + 300):
            comm.all_reduce(np.ones(n % 4500, np.float32), "sum" if n < 4500 else "avg")
        return len(comm._conductor._agreed), len(comm._conductor._settler._kept)

    for agreed, kept in forms.run("2", program, one_shot_bytes=1 << 20):
        assert agreed == conductor._KEPT_AGREEMENTS
        assert kept <= settle._KEPT_SCHEDULES
