"""N ranks as threads of one process. Ships with the package, so that tests and first tries need no launcher.

zcomm.local.run(4, lambda transport: zcomm.Communicator(transport).all_reduce(x[transport.rank]))
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from zcomm.errors import GroupError, PeerTimeout, TransportError
from zcomm.transports.memory import HostMemory
from zcomm.transports.tags import TAG_RANGES, TagRanges
from zcomm.transports.transport import Parcel

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 60.0
_Key = tuple[int, int, int, int]  # of a message: source, target, tag, mark


class _Receive:
    """A message that is awaited."""

    __slots__ = ("is_done", "key", "payload", "refusal")

    def __init__(self, key: _Key, payload: np.ndarray) -> None:
        self.key = key
        self.payload = payload  # where to put the bytes
        self.is_done = False
        self.refusal: str | None = None  # what came was of another length


class LocalWorld:
    """What the ranks share: one mailbox. Messages that are alike arrive in the order they are sent, as over gloo."""

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise GroupError(f"a world has at least 1 rank, got {size!r}")
        self.size = size
        self.changed = threading.Condition()
        self.posted: dict[_Key, deque[_Receive]] = defaultdict(deque)
        self.arrived: dict[_Key, deque[np.ndarray]] = defaultdict(deque)  # bytes sent before they were asked for
        self.failed: dict[int, BaseException] = {}  # rank -> why it will never send again
        self.tags = [TagRanges(TAG_RANGES) for _ in range(size)]  # by rank

    def transport(self, rank: int) -> LocalTransport:
        """The endpoint of one rank; each belongs to one thread."""
        return LocalTransport(self, rank)


class LocalTransport(HostMemory):
    """One rank's endpoint in a LocalWorld."""

    name = "local"
    group: Any = None  # nobody destroys it
    device = "cpu"
    queued = False
    why_synchronous: str | None = None

    def __init__(self, world: LocalWorld, rank: int) -> None:
        if not 0 <= rank < world.size:
            raise GroupError(f"rank {rank} is not in a world of {world.size}")
        self.world = world
        self.rank = rank
        self.size = world.size
        self.group_name = f"local world of {world.size}"
        self.wire_bytes_sent = 0
        self.tags = world.tags[rank]

    @property
    def host(self) -> LocalTransport:
        """This one: all memory is the host's."""
        return self

    def open(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float | None,
    ) -> _LocalExchange:
        """Post the receives."""
        return _LocalExchange(self, outgoing, incoming, tag, DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Nothing of its own to free."""


class _LocalExchange:
    def __init__(
        self,
        transport: LocalTransport,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._tag = tag
        self._timeout_s = timeout_s
        world = transport.world
        self._receives = [_Receive((peer, transport.rank, tag, mark), payload) for peer, payload, mark in incoming]
        with world.changed:
            for receive in self._receives:
                early = _next(world.arrived, receive.key)
                if early is None:
                    world.posted[receive.key].append(receive)
                elif early.size != receive.payload.size:
                    self._withdraw()
                    raise TransportError(_lengths(early, receive))
                else:
                    receive.payload[:] = early
                    receive.is_done = True

    def start(self) -> None:
        world = self._transport.world
        with world.changed:
            for peer, payload, mark in self._outgoing:
                key = (self._transport.rank, peer, self._tag, mark)
                self._transport.wire_bytes_sent += payload.size
                receive = _next(world.posted, key)
                if receive is None:
                    world.arrived[key].append(payload.copy())
                elif payload.size != receive.payload.size:
                    receive.refusal = _lengths(payload, receive)
                    world.changed.notify_all()
                    raise TransportError(receive.refusal)
                else:
                    receive.payload[:] = payload
                    receive.is_done = True
            world.changed.notify_all()

    def wait(self) -> None:
        world, receives = self._transport.world, self._receives
        with world.changed:
            world.changed.wait_for(
                lambda: (
                    world.failed
                    or any(receive.refusal for receive in receives)
                    or all(receive.is_done for receive in receives)
                ),
                self._timeout_s,
            )
            refusals = [receive.refusal for receive in receives if receive.refusal]
            missing = [receive for receive in receives if not receive.is_done and not receive.refusal]
            self._withdraw()
        if refusals:
            raise TransportError(refusals[0])
        if missing:
            peers = [receive.key[0] for receive in missing]
            dead = [peer for peer in peers if peer in world.failed]
            if dead:
                raise TransportError(f"rank {dead[0]} failed: {world.failed[dead[0]]!r}")
            if world.failed:
                raise TransportError(f"rank {next(iter(world.failed))} failed; nothing came from rank {peers[0]}")
            raise PeerTimeout(f"nothing came from rank {peers[0]} within {self._timeout_s} s")

    def close(self) -> None:
        pass

    def _withdraw(self) -> None:
        """Await no more what has not come, lest it takes a later message. With the world locked."""
        posted = self._transport.world.posted
        for receive in self._receives:
            queue = posted.get(receive.key)
            if queue is not None and receive in queue:
                queue.remove(receive)
                if not queue:
                    del posted[receive.key]


def _next(queues: dict[_Key, deque[T]], key: _Key) -> T | None:
    """The first of a queue, taken out of it; None if there is none."""
    queue = queues.get(key)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


def _lengths(payload: np.ndarray, receive: _Receive) -> str:
    source, target = receive.key[:2]
    return f"rank {source} sent {payload.size} bytes where rank {target} expected {receive.payload.size}"


def run(
    size: int,
    program: Callable[..., T],  # called as program(transport, *args) on each rank
    *args: Any,
) -> list[T]:
    """Run a program on every rank of a new world, one thread each; its results by rank.

    Raises what the first failing rank raised, after all have ended.
    """
    world = LocalWorld(size)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = program(world.transport(rank), *args)
        except BaseException as error:
            errors.append((rank, error))
            with world.changed:
                world.failed[rank] = error
                world.changed.notify_all()

    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results
