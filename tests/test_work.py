"""Works run in order, keep their errors, let go of their arrays, and can be waited for in any order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest

from zcomm import work as work_module
from zcomm.errors import PeerTimeout, PlanError
from zcomm.work import Work, Worker


def test_works_run_in_the_order_submitted():
    worker, order = Worker("test"), []
    works = [Work(lambda i=i: order.append(i)) for i in range(50)]

    for work in works:
        worker.submit(work)
    for work in reversed(works):
        work.wait()

    assert order == list(range(50))
    worker.close()


def test_an_error_is_raised_by_wait_every_time_and_stops_nothing():
    worker = Worker("test")

    def fail():
        raise ValueError("no")

    failing, following = Work(fail), Work(lambda: None)
    worker.submit(failing)
    worker.submit(following)

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failing.wait()
    assert failing.is_completed()
    assert isinstance(failing.exception(), ValueError)
    assert following.wait()
    worker.close()


def test_wait_gives_up_after_its_timeout_and_can_be_repeated():
    worker, gate = Worker("test"), threading.Event()
    work = Work(lambda: gate.wait() and None)
    worker.submit(work)

    with pytest.raises(PeerTimeout, match=r"0\.05 s"):
        work.wait(0.05)
    assert not work.is_completed()
    gate.set()
    assert work.wait()
    worker.close()


def test_callbacks_are_called_once_before_or_after_completion():
    worker, called = Worker("test"), []
    work = Work(lambda: time.sleep(0.02))
    work.add_done_callback(lambda done: called.append(done))
    worker.submit(work)
    work.wait()
    worker.close()
    work.add_done_callback(lambda done: called.append(done))

    assert called == [work, work]


@pytest.mark.parametrize("fault", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_or_exits_stops_nothing_and_is_told(fault, monkeypatch):
    told = []

    def hook(kind, *_):
        told.append(kind)
        raise kind  # a hook that fails itself

    def raising(_):
        raise fault

    monkeypatch.setattr("sys.excepthook", hook)
    worker, gate, called = Worker("test"), threading.Event(), []
    works = [Work(lambda: gate.wait() and None), Work(lambda: None)]
    works[0].add_done_callback(raising)
    works[0].add_done_callback(lambda done: called.append(done))
    for work in works:
        worker.submit(work)

    gate.set()

    assert all(work.wait(60) for work in works)
    assert called == works[:1]
    assert told == [fault]
    worker.close()


@pytest.mark.parametrize("timeout_s", ["1", [1], float("nan"), timedelta(seconds=1)])
def test_a_timeout_that_is_no_number_is_refused(timeout_s):
    with pytest.raises(PlanError, match="number of seconds"):
        Work(None).wait(timeout_s)
    assert Work(None).wait(float("inf"))


def test_a_timeout_without_end_is_one():
    worker, gate = Worker("test"), threading.Event()
    work = Work(lambda: gate.wait() and None)
    worker.submit(work)
    threading.Timer(0.05, gate.set).start()
    assert work.wait(float("inf"))
    worker.close()


def test_arrays_are_let_go_when_done_and_the_thread_ends():
    worker = Worker("a worker to look for")
    array = np.ones(10)
    gone = weakref.ref(array)
    work = Work(lambda held=array: held.fill(0))
    del array
    worker.submit(work)
    work.wait()
    gc.collect()

    assert gone() is None
    worker.close()
    assert worker.idle
    assert not any(thread.name == "a worker to look for" for thread in threading.enumerate())


def test_what_still_waits_for_other_ranks_when_the_program_ends_is_made_to_fail_and_told(monkeypatch):
    connection = threading.Event()
    monkeypatch.setattr(work_module, "EXIT_GRACE_S", 0.0)
    monkeypatch.setattr(work_module, "_live", weakref.WeakSet())
    stuck, too = (Worker(f"recv {peer} on rank 0", connection.set) for peer in (1, 2))  # one ends both
    done = Worker("send 1 on rank 0", connection.set)
    finished, waiting, with_it = Work(lambda: None), *(Work(lambda: connection.wait() and None) for _ in range(2))
    done.submit(finished)
    finished.wait()
    done.close()
    stuck.submit(waiting)
    too.submit(with_it)

    with pytest.warns(UserWarning, match="calls in flight") as told:
        work_module.finish_all()

    (warning,) = told
    named = str(warning.message).partition("given up after 0 s: ")[2].partition(";")[0]
    assert sorted(named.split(", ")) == ["recv 1 on rank 0", "recv 2 on rank 0"]
    assert waiting.is_completed()
    assert with_it.is_completed()
    assert stuck.idle
