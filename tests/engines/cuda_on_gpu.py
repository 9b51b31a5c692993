"""The cuda engine on a real GPU behind host addresses, so that every comparison for CPUs runs on it unchanged."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from zcomm.buffers import DType
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.engine import Finish
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw

GUARD = 64
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind


class Mirror:
    """A host buffer's twin in the GPU's memory, at the same offset from alignment, between guard bytes."""

    def __init__(self, cupy: Any, address: int, nbytes: int) -> None:
        self._cupy, self._host, self._nbytes = cupy, address, nbytes
        self._memory = cupy.full(nbytes + 4 * GUARD, 0xA5, np.uint8)
        first = self._memory.data.ptr
        self._start = GUARD + -first % GUARD + address % GUARD
        self.address = first + self._start
        if nbytes:
            cupy.cuda.runtime.memcpy(self.address, address, nbytes, HOST_TO_DEVICE)

    def bring_back(self) -> None:
        """Copy to the host buffer. Fails if anything around the twin was written."""
        memory = self._cupy.asnumpy(self._memory)
        end = self._start + self._nbytes
        assert (memory[: self._start] == 0xA5).all(), "written before the beginning"
        assert (memory[end:] == 0xA5).all(), "written past the end"
        inside = np.ascontiguousarray(memory[self._start : end])
        ctypes.memmove(self._host, inside.ctypes.data, self._nbytes)


class HostedEngine(CudaEngine):
    """Takes host addresses: copies there, computes, copies back. For tests only."""

    def encode_pieces(
        self,
        codec: Codec,
        source: int,
        dtype: DType,
        wire: int,
        pieces: Sequence[tuple[int, int, int]],
        draw: Draw | None = None,
    ) -> None:
        x = self._mirror(source, max((start + n for start, n, _ in pieces), default=0) * dtype.itemsize)
        out = self._mirror(wire, max((offset + codec.nbytes(n) for _, n, offset in pieces), default=0))
        super().encode_pieces(codec, x.address, dtype, out.address, pieces, draw)
        out.bring_back()

    def decode_pieces(
        self,
        codec: Codec,
        wire: int,
        target: int,
        dtype: DType,
        pieces: Sequence[tuple[int, int, int]],
    ) -> None:
        source = self._mirror(wire, max((offset + codec.nbytes(n) for _, n, offset in pieces), default=0))
        out = self._mirror(target, max((start + n for start, n, _ in pieces), default=0) * dtype.itemsize)
        super().decode_pieces(codec, source.address, out.address, dtype, pieces)
        out.bring_back()

    def reduce(
        self, codec: Codec, wires: Sequence[int], n_elems: int, finish: Finish, target: int, dtype: DType
    ) -> None:
        sources = self._mirrors(wires, codec.nbytes(n_elems))
        out = self._mirror(target, n_elems * dtype.itemsize)
        super().reduce(codec, [s.address for s in sources], n_elems, finish, out.address, dtype)
        out.bring_back()

    def reduce_encode(
        self,
        codec: Codec,
        wires: Sequence[int],
        n_elems: int,
        finish: Finish,
        codec_out: Codec,
        wire_out: int,
        draw: Draw | None = None,
    ) -> None:
        sources = self._mirrors(wires, codec.nbytes(n_elems))
        out = self._mirror(wire_out, codec_out.nbytes(n_elems))
        super().reduce_encode(codec, [s.address for s in sources], n_elems, finish, codec_out, out.address, draw)
        out.bring_back()

    def _mirror(self, address: int, nbytes: int) -> Mirror:
        import cupy

        return Mirror(cupy, address, nbytes)

    def _mirrors(self, addresses: Sequence[int], nbytes: int) -> list[Mirror]:
        twins = {address: self._mirror(address, nbytes) for address in set(addresses)}
        return [twins[address] for address in addresses]
