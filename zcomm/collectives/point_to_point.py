"""One rank sends compressed values to another: activations between pipeline stages, say.

Messages between two ranks are matched in the order they are sent and received, whatever collectives run beside them.
Each peer and direction has a worker of its own, so that no message waits behind one of another rank. Over NCCL there
are no workers: messages and collectives are queued in the order of the calls, which must be the same on both ranks.
"""

from __future__ import annotations

import collections
import threading
import weakref
import zlib
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter

from zcomm.buffers import DType, Span
from zcomm.collectives.conductor import FINGERPRINT_BITS, POINT_TO_POINT_STEPS, Conductor, done_or_queued
from zcomm.collectives.context import CallContext
from zcomm.collectives.run import HOP_SHIFT
from zcomm.collectives.schedule import Hop
from zcomm.engines.select import engine_for
from zcomm.transports.transport import Parcel
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.work import Gate, Work, Worker

PEER_SHIFT = 32  # of a draw's call: messages to different ranks are rounded independently


class PointToPoint:
    """The messages of one communicator that are not collective."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._numbers: collections.Counter[tuple[str, int]] = collections.Counter()  # of messages with each peer
        self._workers: dict[tuple[str, int], Worker] = {}
        self._lock = threading.Lock()

    def send(self, source: Span, peer: int, codec: Codec, async_op: bool) -> Work | None:
        """Encode source, send it, and return when its bytes are taken, or a Work that completes then."""
        conductor = self._conductor
        transport = conductor.transport
        chosen = codec.for_dtype(source.dtype)
        nbytes = chosen.nbytes(source.n_elems)
        if async_op:
            conductor.check_asynchronous("send")
        number, tag = self._next("send", peer, source, codec)
        context = CallContext(transport, f"send to rank {peer}", number, (source.n_elems, source.dtype, codec))
        stats = conductor.stats["send"]
        started = perf_counter()
        conductor.lane.follow(source.owner)
        with conductor.lane.entered():
            memory = transport.empty(nbytes)
            if source.n_elems:
                draw = Draw(conductor.seed | Hop.MESSAGE << HOP_SHIFT, peer << PEER_SHIFT | number, 0)
                engine = engine_for(transport.device, chosen)
                engine.encode(chosen, source.address, source.n_elems, source.dtype, transport.address(memory), draw)
        node = conductor.topology.node_of_rank
        with self._lock:  # other threads send to other ranks
            stats.codec_s += perf_counter() - started
            stats.raw_bytes += source.nbytes
            if node[peer] == node[transport.rank]:
                stats.wire_bytes_intra += nbytes
            else:
                stats.wire_bytes_inter += nbytes
        with context, conductor.lane.entered():
            exchange = transport.open([Parcel(peer, memory)] if nbytes else [], [], tag, conductor.plan.timeout_s)
            exchange.start()

        def complete() -> Gate | None:
            started = perf_counter()
            with context, conductor.lane.entered():
                exchange.close()
                stats.wait_s += perf_counter() - started
                return conductor.lane.gate(source.owner, behind=memory)

        return self._complete("send", peer, complete, async_op)

    def receive(
        self,
        target: Span,
        peer: int,
        codec: Codec,
        async_op: bool,
        deliver: Callable[[], None] | None,  # from target to the caller's array, where it is not the same memory
    ) -> Work | None:
        """Decode what peer sends into target, now or when the Work completes."""
        conductor = self._conductor
        transport = conductor.transport
        chosen = codec.for_dtype(target.dtype)
        nbytes = chosen.nbytes(target.n_elems)
        if async_op:
            conductor.check_asynchronous("recv")
        number, tag = self._next("recv", peer, target, codec)
        context = CallContext(transport, f"recv from rank {peer}", number, (target.n_elems, target.dtype, codec))
        stats = conductor.stats["recv"]
        conductor.lane.follow(target.owner)
        with context, conductor.lane.entered():
            memory = transport.empty(nbytes)
            exchange = transport.open([], [Parcel(peer, memory)] if nbytes else [], tag, conductor.plan.timeout_s)
            exchange.start()

        def complete() -> Gate | None:
            started = perf_counter()
            with context, conductor.lane.entered():
                exchange.wait()
                exchange.close()
                arrived = perf_counter()
                if target.n_elems:
                    engine = engine_for(transport.device, chosen)
                    engine.decode(chosen, transport.address(memory), target.n_elems, target.address, target.dtype)
                stats.wait_s += arrived - started
                stats.codec_s += perf_counter() - arrived
                if deliver is not None:
                    deliver()
                return conductor.lane.gate(target.owner, behind=(memory, deliver))

        return self._complete("recv", peer, complete, async_op)

    @property
    def runs_here(self) -> bool:
        """Whether this is one of its workers' threads, in a callback."""
        with self._lock:
            return any(worker.runs_here for worker in self._workers.values())

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.close()

    def _next(self, name: str, peer: int, span: Span, codec: Codec) -> tuple[int, int]:
        """Number and tag of the next message with a peer; a fingerprint keeps messages of another kind apart."""
        conductor = self._conductor
        conductor.check_open()
        with self._lock:
            self._numbers[name, peer] += 1
            number = self._numbers[name, peer]
            conductor.stats[name].calls += 1
        step, fingerprint = number % POINT_TO_POINT_STEPS, _fingerprint(span.n_elems, span.dtype, codec)
        return number, conductor.point_to_point_tag + (step << FINGERPRINT_BITS) + fingerprint

    def _complete(self, name: str, peer: int, complete: Callable[[], Gate | None], async_op: bool) -> Work | None:
        if self._conductor.transport.queued:
            return done_or_queued(complete(), async_op)
        with self._lock:
            worker = self._workers.get((name, peer))
            if worker is None:
                title = f"zcomm {name} {peer} on rank {self._conductor.transport.rank}"
                worker = self._workers[name, peer] = Worker(title, self._conductor.hang_up)
                weakref.finalize(self, worker.stop)
        if not async_op and (worker.idle or worker.runs_here):  # a callback must not wait for its own thread
            return done_or_queued(complete(), async_op)
        work = Work(complete)
        worker.submit(work)
        if async_op:
            return work
        work.wait()
        return None


@lru_cache(maxsize=4096)
def _fingerprint(n_elems: int, dtype: DType, codec: Codec) -> int:
    """What is equal for sender and receiver of the same message, and hardly ever for others."""
    return zlib.crc32(repr((n_elems, dtype, codec)).encode()) & ((1 << FINGERPRINT_BITS) - 1)
