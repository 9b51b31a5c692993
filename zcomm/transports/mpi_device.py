"""Bytes of a GPU over an MPI communicator: encoded on the GPU; only what travels passes through the host, if anything.

MPI knows no streams, so before a message is handed over, the host waits until the GPU has encoded it. Then one of two
ways, which the user chooses and the communicator's repr shows:

staged      wire bytes are copied to pinned host memory, sent from there, received there, copied to the GPU. Any MPI.
gpu_aware   MPI reads and writes the GPU's memory itself. Only with an MPI built for it: any other crashes or worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zcomm.errors import EngineError
from zcomm.streams import DEVICE_TO_HOST, HOST_TO_DEVICE, Mark, cupy, current_stream, index_of
from zcomm.transports.memory import GpuMemory
from zcomm.transports.mpi import DEFAULT_TIMEOUT_S, MpiExchange, MpiTransport
from zcomm.transports.transport import Parcel

MEMORY_KINDS = "mpi_memory_alloc_kinds"  # where an MPI says which memory it takes (MPI 4.1)


class MpiDeviceTransport(GpuMemory, MpiTransport):
    """The ranks of an intracommunicator, with parcels in the memory of one GPU each. Making one is collective."""

    name = "mpi"

    def __init__(
        self,
        comm: Any,  # mpi4py.MPI.Intracomm; stays the caller's
        device: str,  # "cuda:0"
        gpu_aware: bool | None = None,  # None: if the library says that it takes "cuda" memory; same on all ranks
    ) -> None:
        self.index = index_of(device)
        self._cupy = cupy()
        n_devices = self._cupy.cuda.runtime.getDeviceCount()
        if self.index >= n_devices:
            raise EngineError(f"there is no {device}; this machine has {n_devices} CUDA devices")
        super().__init__(comm)
        self.device = f"cuda:{self.index}"
        self.gpu_aware = _takes_cuda(self.comm) if gpu_aware is None else gpu_aware
        self.name = "mpi, gpu_aware" if self.gpu_aware else "mpi, staged"
        self._host = _HostView(self)

    @property
    def host(self) -> MpiTransport:
        """The same duplicate, with parcels in host memory."""
        return self._host

    def read(self, memory: Any, timeout_s: float | None) -> bytes:
        """The bytes that are there when the current stream has come so far."""
        return bytes(memory.get())

    def open(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float | None,
    ) -> MpiExchange:
        """Post the receives: into pinned memory, or into the GPU's once it no longer uses it."""
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if self.gpu_aware:
            self.settle(timeout_s)
            return _GpuAwareExchange(self, outgoing, incoming, tag, timeout_s)
        return _StagedExchange(self, outgoing, incoming, tag, timeout_s)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Host memory that the GPU copies to and from on its own, uint8 (nbytes,)."""
        memory = self._cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, nbytes)

    def copy(
        self,
        source: int,  # address
        target: int,  # address
        nbytes: int,
        kind: int,
    ) -> None:
        """Queue a copy on the current stream."""
        stream = current_stream(self.index, of_torch=False)
        self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream)

    def settle(self, timeout_s: float) -> None:
        """Let the host wait for all that the current stream has queued."""
        stream = current_stream(self.index, of_torch=False)
        Mark(self.index, stream).settle(timeout_s, "the GPU did not come to the end of what was queued")


class _GpuAwareExchange(MpiExchange):
    """MPI sends from, and receives into, the GPU's memory."""

    __slots__ = ()
    _transport: MpiDeviceTransport

    def start(self) -> None:
        self._transport.settle(self._timeout_s)
        super().start()


class _StagedExchange(MpiExchange):
    """MPI sends from, and receives into, pinned host memory; copies to and from it are queued on the current stream."""

    __slots__ = ("_arriving", "_leaving")
    _transport: MpiDeviceTransport

    def __init__(
        self,
        transport: MpiDeviceTransport,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float,
    ) -> None:
        self._leaving = [(parcel, transport.pinned(parcel.payload.size)) for parcel in outgoing]
        self._arriving = [(parcel, transport.pinned(parcel.payload.size)) for parcel in incoming]
        super().__init__(
            transport,
            [parcel._replace(payload=staged) for parcel, staged in self._leaving],
            [parcel._replace(payload=staged) for parcel, staged in self._arriving],
            tag,
            timeout_s,
        )

    def start(self) -> None:
        transport = self._transport
        for (_, payload, _), staged in self._leaving:
            transport.copy(payload.data.ptr, staged.ctypes.data, staged.size, DEVICE_TO_HOST)
        if self._leaving:
            transport.settle(self._timeout_s)
        super().start()

    def wait(self) -> None:
        super().wait()
        for (_, payload, _), staged in self._arriving:
            self._transport.copy(staged.ctypes.data, payload.data.ptr, staged.size, HOST_TO_DEVICE)

    def close(self) -> None:
        super().close()
        if self._arriving:
            self._transport.settle(self._timeout_s)  # the pinned memory is free for others now


class _HostView(MpiTransport):
    """The same ranks and messages, with parcels in host memory."""

    def __init__(self, whole: MpiDeviceTransport) -> None:
        shared = dict(vars(whole))
        shared.pop("_host", None)
        vars(self).update(shared, device="cpu", name="mpi")


def _takes_cuda(comm: Any) -> bool:
    """Whether the library says that it takes CUDA memory."""
    info = comm.Get_info()
    kinds = info.Get(MEMORY_KINDS) or ""
    info.Free()
    return any(kind.split(":")[0] == "cuda" for kind in kinds.split(","))
