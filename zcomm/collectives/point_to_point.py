"""One rank sends compressed values to another: activations between pipeline stages, say.

Messages between two ranks are matched in the order they are sent and received, whatever collectives run beside them.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Callable
from time import perf_counter

from zcomm.buffers import Span
from zcomm.collectives.conductor import FINGERPRINT_BITS, POINT_TO_POINT_STEPS, Conductor
from zcomm.collectives.run import HOP_SHIFT
from zcomm.collectives.schedule import Hop
from zcomm.collectives.stats import CollectiveStats
from zcomm.engines.select import engine_for
from zcomm.transports.transport import Exchange, Parcel
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw


class PointToPoint:
    """The messages of one communicator that are not collective."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._sent: collections.Counter[int] = collections.Counter()  # to each rank
        self._received: collections.Counter[int] = collections.Counter()  # from each rank

    def send(self, source: Span, peer: int, codec: Codec) -> _Message:
        """Encode source and send it; the message may be closed later."""
        message = self._message("send", source, peer, codec, self._sent)
        engine = engine_for(self._conductor.transport.device, message.codec)
        started = perf_counter()
        if source.n_elems:
            draw = Draw(self._conductor.seed | Hop.MESSAGE << HOP_SHIFT, self._sent.total(), 0)
            engine.encode(message.codec, source.address, source.n_elems, source.dtype, message.address, draw)
        message.stats.codec_s += perf_counter() - started
        message.exchange.start()
        return message

    def receive(self, target: Span, peer: int, codec: Codec) -> _Message:
        """Be ready for a message; its bytes are decoded into target when it is completed."""
        message = self._message("recv", target, peer, codec, self._received)
        message.exchange.start()
        return message

    def _message(self, name: str, span: Span, peer: int, codec: Codec, counter: collections.Counter[int]) -> _Message:
        conductor = self._conductor
        transport = conductor.transport
        chosen = codec.for_dtype(span.dtype)
        nbytes = chosen.nbytes(span.n_elems)
        stats = conductor.stats.setdefault(name, CollectiveStats())
        stats.calls += 1
        memory = transport.empty(nbytes)
        fingerprint = zlib.crc32(repr((span.n_elems, span.dtype, codec)).encode()) & ((1 << FINGERPRINT_BITS) - 1)
        tag = conductor.point_to_point_tag + (counter[peer] % POINT_TO_POINT_STEPS << FINGERPRINT_BITS) + fingerprint
        counter[peer] += 1
        parcels = [Parcel(peer, memory)] if nbytes else []
        outgoing, incoming = (parcels, []) if name == "send" else ([], parcels)
        if name == "send":
            node = conductor.topology.node_of_rank
            level = "wire_bytes_intra" if node[peer] == node[transport.rank] else "wire_bytes_inter"
            setattr(stats, level, getattr(stats, level) + nbytes)
            stats.raw_bytes += span.nbytes
        exchange = transport.open(outgoing, incoming, tag, conductor.plan.timeout_s)
        return _Message(conductor, span, chosen, exchange, transport.address(memory), memory, stats)


class _Message:
    """One message under way."""

    def __init__(
        self,
        conductor: Conductor,
        span: Span,
        codec: Codec,
        exchange: Exchange,
        address: int,
        memory: object,
        stats: CollectiveStats,
    ) -> None:
        self.codec = codec
        self.exchange = exchange
        self.address = address
        self.stats = stats
        self._conductor = conductor
        self._span = span
        self._memory = memory  # kept until the bytes are sent or decoded

    def complete_send(self) -> None:
        """Return when the bytes are taken."""
        self._wait(self.exchange.close)

    def complete_receive(self) -> None:
        """Return when the values are in the target."""
        self._wait(self.exchange.wait)
        span = self._span
        if span.n_elems:
            engine = engine_for(self._conductor.transport.device, self.codec)
            started = perf_counter()
            engine.decode(self.codec, self.address, span.n_elems, span.address, span.dtype)
            self.stats.codec_s += perf_counter() - started

    def _wait(self, wait: Callable[[], None]) -> None:
        started = perf_counter()
        wait()
        self.stats.wait_s += perf_counter() - started
