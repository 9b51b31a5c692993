"""Works run in order, keep their errors, let go of their arrays, and can be waited for in any order."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from zcomm.errors import PeerTimeout
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
