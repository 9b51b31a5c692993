"""NCCL's place taken, so that N ranks may be threads on one GPU, which NCCL itself refuses: everything else is real.

groupEnd returns when every message of the group has met its other half; the copy is queued on the receiver's stream,
after what the sender has queued, and what the sender queues next comes after the copy.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

STUCK_S = 120.0


class Half(NamedTuple):
    """A send or a receive that waits for the other."""

    stream: int
    address: int
    nbytes: int
    ready: Any  # event
    met: list[bool]  # becomes true


class OneGpu:
    """What the ranks share. Stands in for cupy.cuda.nccl too."""

    NCCL_UINT8 = 1
    NcclError = RuntimeError

    def __init__(self, cupy: Any, size: int) -> None:
        self.cupy, self.size = cupy, size
        self.changed = threading.Condition()
        self.halves: dict[tuple[str, int, int], collections.deque[Half]] = collections.defaultdict(collections.deque)
        self.here = threading.local()
        self.failed: list[BaseException] = []

    def groupStart(self) -> None:  # noqa: N802 - cupy's name
        """Begin a group of this thread."""
        self.here.group = []

    def groupEnd(self) -> None:  # noqa: N802
        """Queue the group."""
        mine = [self._post(*each) for each in self.here.group]
        with self.changed:
            assert self.changed.wait_for(lambda: self.failed or all(met[0] for met in mine), STUCK_S), "stuck"
            assert not self.failed, self.failed

    def _post(self, kind: str, rank: int, peer: int, address: int, nbytes: int, stream: int) -> list[bool]:
        runtime = self.cupy.cuda.runtime
        half = Half(stream, address, nbytes, self._event(stream), [False])
        pair = (rank, peer) if kind == "send" else (peer, rank)
        other_kind = "recv" if kind == "send" else "send"
        with self.changed:
            waiting = self.halves[(other_kind, *pair)]
            if not waiting:
                self.halves[(kind, *pair)].append(half)
                return half.met
            other = waiting.popleft()
            assert half.nbytes == other.nbytes, (half.nbytes, other.nbytes)
            sender, receiver = (half, other) if kind == "send" else (other, half)
            runtime.streamWaitEvent(receiver.stream, sender.ready.ptr)
            runtime.memcpyAsync(receiver.address, sender.address, half.nbytes, 3, receiver.stream)
            runtime.streamWaitEvent(sender.stream, self._event(receiver.stream).ptr)
            half.met[0] = other.met[0] = True
            self.changed.notify_all()
        return half.met

    def _event(self, stream: int) -> Any:
        event = self.cupy.cuda.Event(disable_timing=True)
        self.cupy.cuda.runtime.eventRecord(event.ptr, stream)
        return event

    def run(self, program: Callable[[OneGpuComm], Any]) -> list[Any]:
        """Run a program on every rank, one thread each, all on cuda:0; results by rank."""
        results: list[Any] = [None] * self.size

        def main(rank: int) -> None:
            try:
                with self.cupy.cuda.Device(0):
                    results[rank] = program(OneGpuComm(self, rank))
            except BaseException as error:
                with self.changed:
                    self.failed.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]
        return results


class OneGpuComm:
    """A rank's NcclCommunicator."""

    def __init__(self, world: OneGpu, rank: int) -> None:
        self.world, self.rank = world, rank
        self.nbytes_sent = self.n_sent = 0

    def rank_id(self) -> int:
        """This rank."""
        return self.rank

    def size(self) -> int:
        """Ranks."""
        return self.world.size

    def device_id(self) -> int:
        """The one GPU."""
        return 0

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Add to the group."""
        self.nbytes_sent += count
        self.n_sent += 1
        self.world.here.group.append(("send", self.rank, peer, address, count, stream))

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Add to the group."""
        self.world.here.group.append(("recv", self.rank, peer, address, count, stream))

    def check_async_error(self) -> None:
        """There is none."""
