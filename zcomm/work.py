"""A collective under way, and the thread that carries collectives out one after another.

`Work` is torch-like: `wait`, `is_completed`, `exception`. It holds the arrays it reads and writes until it is done, so
it may be dropped without waiting. Works of one communicator are done in the order they were called, on every rank.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import numbers
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable

from zcomm.errors import GroupError, PeerTimeout, PlanError
from zcomm.graphs import outside_graphs
from zcomm.streams import Gate

EXIT_GRACE_S = 10.0  # that the end of the program waits for works in flight
HANG_UP_GRACE_S = 10.0  # and for those that it then makes fail: they need no other rank, only a turn of this machine's


@outside_graphs
class Work:
    """A call that may still be running. Safe to wait for from any thread, any number of times, in any order."""

    __slots__ = ("_call", "_callbacks", "_done", "_error", "_gate", "_lock")

    def __init__(
        self,
        call: Callable[[], Gate | None] | None,  # what is left to do; None if it is done, or queued, already
        gate: Gate | None = None,  # of a call that is queued already
    ) -> None:
        self._call = call
        self._gate = gate
        self._error: BaseException | None = None
        self._done = call is None
        self._callbacks: list[Callable[[Work], None]] = []
        self._lock = threading.Condition(threading.Lock())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the result is there; raise what the call raised. True, as torch's wait returns.

        On a GPU not the host waits for the result but the caller's current stream, unless timeout_s is given.
        Raises PeerTimeout if timeout_s passes first; the call goes on and may be waited for again.
        """
        if timeout_s is not None and (not isinstance(timeout_s, numbers.Real) or timeout_s != timeout_s):
            raise PlanError(f"timeout_s must be a number of seconds or None, got {timeout_s!r}")
        if not self._done:
            longest = None if timeout_s is None else min(float(timeout_s), threading.TIMEOUT_MAX)
            with self._lock:
                if not self._lock.wait_for(lambda: self._done, longest):
                    raise PeerTimeout(
                        f"the collective was not complete after {timeout_s} s; wait again, or give it longer"
                    )
        if self._error is not None:
            raise self._error
        if self._gate is not None:
            if timeout_s is not None:
                self._gate.settle(timeout_s)
            self._gate.lead()
        return True

    def is_completed(self) -> bool:
        """Whether wait would return or raise at once."""
        return self._done and (self._gate is None or self._gate.passed())

    def exception(self) -> BaseException | None:
        """What the call raised, once it is complete."""
        return self._error

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call callback(self) when complete, at once if it is; on the thread that completes it. Must not block.

        On a GPU that is when the call is queued: what callback queues after wait() finds the result.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def run(self) -> None:
        """Do what is left, on this thread. For the Worker; errors are kept for wait."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            self._gate = call()
        except BaseException as error:
            self._error = error
        del call  # lets go of the arrays
        with self._lock:
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._lock.notify_all()
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:  # a callback's fault, or its exit, must not stop the works behind it
                with contextlib.suppress(BaseException):
                    sys.excepthook(*sys.exc_info())

    def abandon(self, error: BaseException) -> None:
        """End it with an error, whoever held its lock. For the child of a fork, which has none of the threads."""
        self._lock = threading.Condition(threading.Lock())
        self._call, self._callbacks = None, []
        self._error, self._done = error, True


class Worker:
    """Runs works in order on one daemon thread, which starts with the first and ends when it is closed."""

    def __init__(
        self,
        name: str,
        hang_up: Callable[[], None] | None = None,  # makes what waits for other ranks fail at once; None: nothing can
    ) -> None:
        self.name = name
        self._hang_up = hang_up
        self._queue: collections.deque[Work] = collections.deque()
        self._wake = threading.Condition(threading.RLock())  # a finalizer may stop it while this thread holds it
        self._thread: threading.Thread | None = None
        self._running: Work | None = None
        self._busy = False
        self._closed = False
        self.is_forked = False  # whether this is a copy, in a child process, of the one that has the thread
        _live.add(self)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._busy

    @property
    def runs_here(self) -> bool:
        """Whether this is the worker's own thread: a work or a callback that calls again."""
        return threading.current_thread() is self._thread

    def submit(self, work: Work) -> None:
        """Queue a work behind those submitted before. Raises GroupError once stopped."""
        with self._wake:
            if self._closed:
                raise GroupError("the communicator was closed while it was called; make a new one")
            self._queue.append(work)
            self._busy = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._wake.notify()

    def stop(self) -> None:
        """Let the thread end when it has finished what is queued."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    def close(self, within_s: float | None = None) -> None:
        """Finish what is queued and end the thread; after within_s it is left to itself."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(within_s)

    def give_up(
        self,
        deadline: float,  # time.monotonic() until which to wait for the thread's end
    ) -> bool:
        """Let the works that wait for other ranks fail, and end the thread. Whether there was a way."""
        if self._hang_up is None:
            return False
        with contextlib.suppress(Exception):  # whatever it is, the program is ending
            self._hang_up()
        self.close(max(deadline - time.monotonic(), 0.0))
        return True

    def orphan(self) -> None:
        """Give up in the child of a fork: the thread, and what it was doing, stayed in the parent."""
        self._wake = threading.Condition(threading.RLock())
        self._thread, self._busy, self._closed, self.is_forked = None, False, True, True
        works, self._queue = [self._running, *self._queue], collections.deque()
        for work in works:
            if work is not None:
                work.abandon(GroupError(_FORKED))

    def check_not_forked(self) -> None:
        """Raise GroupError in the child of a fork."""
        if self.is_forked:
            raise GroupError(_FORKED)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._running = None
                if not self._queue:
                    self._busy = False
                    self._wake.wait_for(lambda: self._queue or self._closed)
                    if not self._queue:
                        return
                work = self._running = self._queue.popleft()
            work.run()
            del work


_live: weakref.WeakSet[Worker] = weakref.WeakSet()
_FORKED = (
    "this process was forked from one that had the communicator, whose connections and threads are its own; "
    "start processes by spawn, or make the communicator after the fork"
)


def _orphan_all() -> None:
    for worker in list(_live):
        worker.orphan()


os.register_at_fork(after_in_child=_orphan_all)


@atexit.register
def finish_all() -> None:
    """Let works in flight end, and their threads, before what they need does: Python ends a thread that wants to run
    while the program leaves by unwinding it, and where that meets a destructor of a library, the process aborts.

    A message that never comes, and one that is never taken, would wake its thread just then, when the other rank leaves
    too. So what is not done after EXIT_GRACE_S is made to fail, and told.
    """
    workers, deadline = list(_live), time.monotonic() + EXIT_GRACE_S
    for worker in workers:
        while not worker.idle and time.monotonic() < deadline:
            time.sleep(0.005)  # not closed yet: a callback may call again
        worker.close(max(deadline - time.monotonic(), 0.0))
    stuck = [worker for worker in workers if not worker.idle]  # before one hangs up: they may share connections
    deadline = time.monotonic() + HANG_UP_GRACE_S
    given_up = [worker.name for worker in stuck if worker.give_up(deadline)]
    if given_up:
        warnings.warn(
            f"the program ended with calls in flight, given up after {EXIT_GRACE_S:g} s: {', '.join(given_up)}; wait "
            "for every work, and give every message its send and its recv",
            stacklevel=2,
        )
