"""The GPUs of fake_cuda.py: streams whose tasks are done one at a time, in an order drawn from a seed.

A task may be done when it is the first of its stream. Each kind says by `go` whether it moved, and whether it ended.
Groups keep NCCL's rules: those of a communicator run in the order queued, messages of a pair meet in order, a group
ends when all its messages have met, and a message of another length is a fault.
"""

from __future__ import annotations

import collections
import ctypes
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

STUCK_S = 60.0  # a wait this long has found a deadlock
STEPS_PER_QUESTION = 30
GARBAGE = 0xDB


class Machine:
    """All streams of all devices."""

    def __init__(self, seed: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.streams: dict[tuple[int, int], collections.deque[Any]] = collections.defaultdict(collections.deque)
        self.random = random.Random(seed)
        self.failure: BaseException | None = None
        self.log: list[str] = []  # kinds of what was done, in order
        self.here = threading.local()
        self.next_handle = 1000
        self.graves: list[np.ndarray] = []  # memory that was let go, and overwritten since

    def handle(self) -> int:
        with self.changed:
            self.next_handle += 1
            return self.next_handle

    @property
    def device(self) -> int:
        """This thread's current device."""
        return getattr(self.here, "device", 0)

    def queue(self, stream: int, task: Any, device: int | None = None) -> None:
        """Put a task on a stream of the current device."""
        with self.changed:
            self.streams[self.device if device is None else device, stream].append(task)
            self.changed.notify_all()

    def step(self) -> bool:
        """Do one thing that may be done now; whether there was any."""
        keys = [key for key, tasks in self.streams.items() if tasks]
        self.random.shuffle(keys)
        for key in keys:
            task = self.streams[key][0]
            try:
                moved, ended = task.go()
            except BaseException as error:
                self.failure = error
                raise
            if ended:
                self.streams[key].popleft()
                self.log.append(type(task).__name__)
            if moved or ended:
                self.changed.notify_all()
                return True
        return False

    def until(self, done: Callable[[], bool]) -> None:
        """Take steps until something is true."""
        give_up_at = time.monotonic() + STUCK_S
        with self.changed:
            while not done():
                if self.failure is not None:
                    raise AssertionError(f"the GPU failed: {self.failure!r}") from self.failure
                if not self.step():
                    self.changed.wait(0.02)
                    assert time.monotonic() < give_up_at, f"deadlock: {self.waiting()}"

    def ask(self, done: Callable[[], bool]) -> bool:
        """Take a few steps; whether something is true then."""
        with self.changed:
            for _ in range(STEPS_PER_QUESTION):
                if done() or not self.step():
                    break
            if self.failure is not None:
                raise AssertionError(f"the GPU failed: {self.failure!r}") from self.failure
            return done()

    def finish(self) -> None:
        """Do all that can be done. Fails if anything was written to memory after it was let go."""
        with self.changed:
            while self.step():
                pass
            assert all((memory == GARBAGE).all() for memory in self.graves), "memory was written after it was let go"

    def waiting(self) -> dict[str, str]:
        return {str(key): repr(tasks[0]) for key, tasks in self.streams.items() if tasks}


class Kernel:
    """Anything that computes or copies."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def go(self) -> tuple[bool, bool]:
        self.work()
        return True, True


class Record:
    """An event recorded. Waiting for the event means the last record of it so far."""

    def __init__(self) -> None:
        self.done = False

    def go(self) -> tuple[bool, bool]:
        self.done = True
        return True, True


class WaitFor:
    def __init__(self, record: Record) -> None:
        self.record = record

    def go(self) -> tuple[bool, bool]:
        return False, self.record.done


class Group:
    """Sends and receives between groupStart and groupEnd."""

    def __init__(self, comm: Any, messages: list[tuple[str, int, int, int]]) -> None:
        self.comm = comm
        self.messages = messages  # "send" or "recv", peer, address, nbytes
        self.posted = False
        self.open = len(messages)

    def __repr__(self) -> str:
        return f"Group of rank {self.comm.rank}, {self.open} open of {[m[:2] + m[3:] for m in self.messages]}"

    def go(self) -> tuple[bool, bool]:
        if self.comm.order[0] is not self:
            return False, False
        if not self.posted:
            self.posted = True
            for kind, peer, address, nbytes in self.messages:
                self.comm.clique.meet(kind, self.comm.rank, peer, address, nbytes, self)
            return True, False
        if self.open:
            return False, False
        self.comm.order.popleft()
        return True, True


class Clique:
    """What the ranks of an NCCL communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.halves: dict[tuple[int, int], collections.deque[Any]] = collections.defaultdict(collections.deque)

    def meet(self, kind: str, rank: int, peer: int, address: int, nbytes: int, group: Group) -> None:
        pair = (rank, peer) if kind == "send" else (peer, rank)
        waiting = self.halves[pair]
        if not waiting or waiting[0][0] == kind:
            waiting.append((kind, address, nbytes, group))
            return
        _, other_address, other_nbytes, other = waiting.popleft()
        assert nbytes == other_nbytes, f"{pair[0]} to {pair[1]}: {nbytes} bytes meet {other_nbytes}"
        source, target = (address, other_address) if kind == "send" else (other_address, address)
        ctypes.memmove(target, source, nbytes)
        group.open -= 1
        other.open -= 1
