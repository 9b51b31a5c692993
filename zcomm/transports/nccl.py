"""Bytes over an NCCL communicator of cupy's, without torch: cupy.cuda.nccl.NcclCommunicator.

NCCL knows no tags: what two ranks exchange meets in the order in which both queue it. A schedule starts its exchanges
in one order on all ranks, and calls are queued in the order in which the program makes them, so both orders are one.
Each exchange is one group of sends and receives of uint8, queued on the transport's own stream, so that kernels of the
next chunk run meanwhile.

[Note: no timeout] A message whose peer never comes occupies the GPU until the communicator is aborted. The host does
not wait for payloads; where it waits, for cards, it gives up after the timeout and asks NCCL for errors meanwhile.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from zcomm.errors import BufferError, GroupError, TransportError
from zcomm.streams import DEFAULT_TIMEOUT_S, Mark, cupy, current_stream, index_of, nccl
from zcomm.transports.memory import GpuMemory
from zcomm.transports.tags import TAG_RANGES, TagRanges
from zcomm.transports.transport import Parcel

_numbers = itertools.count()  # of the transports that this process makes
IN_PROGRESS = 7  # ncclResult_t


class NcclTransport(GpuMemory):
    """The ranks of an NCCL communicator, one for each process and GPU."""

    name = "nccl"
    group: Any = None  # the caller keeps it
    queued = True
    why_synchronous: str | None = None

    def __init__(
        self,
        comm: Any,  # cupy.cuda.nccl.NcclCommunicator; stays the caller's
        device: str | None = None,  # must be the communicator's own, if given
    ) -> None:
        if not all(hasattr(comm, name) for name in ("rank_id", "size", "device_id", "send", "recv")):
            raise GroupError(f"got a {type(comm).__name__}; expected a cupy.cuda.nccl.NcclCommunicator")
        self.comm = comm
        self.rank = comm.rank_id()
        self.size = comm.size()
        self.index = comm.device_id()
        self.device = f"cuda:{self.index}"
        if device is not None and index_of(device) != self.index:
            raise BufferError(f"the NCCL communicator is on {self.device}, not on {device}; leave the device out")
        self.group_name = f"NCCL communicator of {self.size}"
        self.wire_bytes_sent = 0
        # NCCL knows no tags, but ranges are counted alike over every transport.
        self.tags = TagRanges(TAG_RANGES, name=f"{next(_numbers)}")
        self.lock = threading.Lock()  # NCCL lets one thread queue at a time
        self.nccl = nccl()
        module = cupy()
        with module.cuda.Device(self.index):
            self.stream = module.cuda.Stream(non_blocking=True)

    @property
    def host(self) -> NcclTransport:
        """This one: there is no other way between the ranks."""
        return self

    def read(self, memory: Any, timeout_s: float | None) -> bytes:
        """The bytes that are there when the current stream has come so far. See [Note: no timeout]."""
        complaint = "not every rank's bytes came; NCCL does not say whose. comm.abort() frees the GPU of what waits"
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self.mark().settle(timeout_s, complaint, self.check)
        return bytes(memory.get())

    def open(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float | None,
    ) -> _NcclExchange:
        """Nothing happens before start."""
        return _NcclExchange(self, outgoing, incoming)

    def mark(self) -> Mark:
        """What the current stream has queued."""
        return Mark(self.index, current_stream(self.index, of_torch=False))

    def let_wait(self, mark: Mark) -> None:
        """Let what the current stream queues from now on wait for mark."""
        mark.precede(current_stream(self.index, of_torch=False))

    def check(self) -> None:
        """Raise TransportError if NCCL has found an error meanwhile: a peer that is gone, a network that is down."""
        try:
            self.comm.check_async_error()
        except self.nccl.NcclError as error:
            if error.status != IN_PROGRESS:
                raise TransportError(f"{error}; the communicator is of no use any more: comm.abort()") from error

    def close(self) -> None:
        """Nothing of its own to free: the communicator is the caller's."""


class _NcclExchange:
    """One group of sends and receives."""

    __slots__ = ("_done", "_incoming", "_outgoing", "_transport")

    def __init__(self, transport: NcclTransport, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._incoming = incoming
        self._done: Mark | None = None

    def start(self) -> None:
        if not (self._outgoing or self._incoming):
            return
        transport = self._transport
        library, comm, stream = transport.nccl, transport.comm, transport.stream.ptr
        with transport.lock:
            transport.check()
            transport.mark().precede(stream)
            try:
                library.groupStart()
                for peer, payload, _ in self._incoming:
                    comm.recv(payload.data.ptr, payload.size, library.NCCL_UINT8, peer, stream)
                for peer, payload, _ in self._outgoing:
                    comm.send(payload.data.ptr, payload.size, library.NCCL_UINT8, peer, stream)
                    transport.wire_bytes_sent += payload.size
                library.groupEnd()
            except library.NcclError as error:
                peers = sorted({parcel.peer for parcel in (*self._outgoing, *self._incoming)})
                raise TransportError(f"exchange with ranks {peers}: {error}") from error
            self._done = Mark(transport.index, stream)

    def wait(self) -> None:
        if self._done is not None:
            self._transport.let_wait(self._done)

    def close(self) -> None:
        self.wait()
