"""The cuda engine: every verb as kernels over the units of its chunks, queued on the caller's current stream.

cuda_kernels.py says which kernels: a fast one for whole units of memory at multiples of 16 bytes, if the codec has one,
and a general one for what is left of a chunk, in a launch of its own. Arguments are addresses: tensors of torch or cupy
are used in place. `encode_pieces` and `decode_pieces` do a chunk's pieces in one launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from zcomm.buffers import DType
from zcomm.engines.cuda_kernels import (
    COPY,
    N_THREADS,
    Kernel,
    Kernels,
    encode_kernels,
    sum_encode_kernels,
    sum_kernels,
)
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.errors import EngineError
from zcomm.wire.block_loops import BlockQuantizer
from zcomm.wire.codec import WIRE_ALIGNMENT, Codec
from zcomm.wire.draw import Draw, check_draw
from zcomm.wire.hadamard import Hadamard
from zcomm.wire.raw import Raw

INLINE_SOURCES = 128  # ZC_SOURCES
MAX_PIECES = 32  # ZC_PIECES


class Launcher(Protocol):
    """What runs kernels: a GPU (cuda_device.py), or a CPU in tests."""

    max_ctas: int  # more tasks than these can hold are looped over

    def launch(
        self,
        kernel: str,  # its C++ name
        n_ctas: int,
        n_threads: int,
        job: np.ndarray,  # one element, the kernel's argument
    ) -> None:
        """Queue a kernel."""
        ...

    def table(
        self,
        addresses: Sequence[int],
    ) -> tuple[int, Any]:  # the table's own address, and what to hold until the launch is queued
        """Addresses as an array that kernels can read."""
        ...


class CudaEngine:
    """Computes every codec of zcomm/wire on one GPU, asynchronously to the host."""

    name = "cuda"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def supports(self, codec: Codec) -> bool:
        """Whether it can compute this codec."""
        try:
            sum_kernels(codec, DType.FLOAT32)
        except EngineError:
            return False
        return True

    def encode(
        self,
        codec: Codec,
        source: int,  # address of n_elems elements of dtype
        n_elems: int,
        dtype: DType,
        wire: int,  # address of codec.nbytes(n_elems) bytes, written
        draw: Draw | None = None,  # the random bits, for a codec that rounds by chance; others ignore it
    ) -> None:
        """Encode one chunk."""
        self.encode_pieces(codec, source, dtype, wire, ((0, n_elems, 0),), draw)

    def decode(
        self,
        codec: Codec,
        wire: int,  # address of codec.nbytes(n_elems) bytes
        n_elems: int,
        target: int,  # address of n_elems elements of dtype, written
        dtype: DType,
    ) -> None:
        """Decode one chunk and narrow it to dtype (round to nearest, ties to even)."""
        self.decode_pieces(codec, wire, target, dtype, ((0, n_elems, 0),))

    def encode_pieces(
        self,
        codec: Codec,
        source: int,  # address of elements of dtype
        dtype: DType,
        wire: int,  # address that the pieces' bytes are counted from, written
        pieces: Sequence[tuple[int, int, int]],  # first element, n_elems, bytes behind wire
        draw: Draw | None = None,  # the random bits; its first element is the one at source
    ) -> None:
        """Encode each piece as a chunk of its own, all in one launch."""
        size = dtype.itemsize
        work = [_Work(start * size, offset, n, start) for start, n, offset in pieces if n]
        if isinstance(codec, Raw) and codec.dtype is dtype:
            work = [part._replace(n_elems=part.n_elems * size) for part in work]
            self._run(COPY, _job((source,), wire, pads=True), work)
        else:
            kernels = encode_kernels(codec, dtype)
            self._run(kernels, _job((source,), wire, codec_out=codec, pads=True, draw=draw), work)

    def decode_pieces(
        self,
        codec: Codec,
        wire: int,  # address that the pieces' bytes are counted from
        target: int,  # address of elements of dtype, written
        dtype: DType,
        pieces: Sequence[tuple[int, int, int]],  # first element, n_elems, bytes behind wire
    ) -> None:
        """Decode each piece, a chunk of its own, all in one launch."""
        size = dtype.itemsize
        work = [_Work(offset, start * size, n) for start, n, offset in pieces if n]
        if isinstance(codec, Raw) and codec.dtype is dtype:
            work = [part._replace(n_elems=part.n_elems * size) for part in work]
            self._run(COPY, _job((wire,), target), work)
        else:
            self._run(sum_kernels(codec, dtype), _job((wire,), target, codec_in=codec), work)

    def reduce(
        self,
        codec: Codec,
        wires: Sequence[int],  # addresses of k >= 1 chunks, codec.nbytes(n_elems) bytes each
        n_elems: int,
        finish: Finish,
        target: int,  # address of n_elems elements of dtype, written
        dtype: DType,
    ) -> None:
        """Decode k chunks, add them in this order in fp32 (raw:float64 in fp64), finish, narrow, store."""
        if n_elems:
            job = _job(wires, target, finish, codec_in=codec)
            self._run(sum_kernels(codec, dtype), job, [_Work(0, 0, n_elems)], wires)

    def reduce_encode(
        self,
        codec: Codec,
        wires: Sequence[int],  # addresses of k >= 1 chunks, codec.nbytes(n_elems) bytes each
        n_elems: int,
        finish: Finish,
        codec_out: Codec,
        wire_out: int,  # address of codec_out.nbytes(n_elems) bytes, written; never inside wires
        draw: Draw | None = None,  # the random bits, for a codec_out that rounds by chance
    ) -> None:
        """As reduce, but the finished fp32 sums are encoded again by codec_out instead of stored."""
        if n_elems:
            if isinstance(codec, Hadamard) and isinstance(codec_out, Hadamard):
                n_elems = codec.n_rotated(n_elems)  # chunks of the inner codecs, whose sums stay rotated
            kernels = sum_encode_kernels(codec, codec_out)
            job = _job(wires, wire_out, finish, codec_in=codec, codec_out=codec_out, pads=True, draw=draw)
            self._run(kernels, job, [_Work(0, 0, n_elems)], wires)

    def _run(
        self,
        kernels: Kernels,
        job: _Job,
        work: Sequence[_Work],
        wires: Sequence[int] = (),  # where there may be more than fit into the job
    ) -> None:
        """Launch what does these chunks: the fast kernel on their whole units, the general one on the rest."""
        held = None
        if len(wires) > INLINE_SOURCES:
            job.more_sources, held = self._launcher.table(wires)
        places = job.target
        for address in wires or (job.sources[0],):
            places |= address
        fast, general = split(kernels, work, places)
        if kernels.fast:
            self._launch(kernels.fast, job, fast)
        self._launch(kernels.general, job, general)
        del held

    def _launch(self, kernel: Kernel, job: _Job, parts: Sequence[_Part]) -> None:
        job.team, job.block_team = kernel.team, kernel.block_team
        for batch in range(0, len(parts), MAX_PIECES):
            of_batch = parts[batch : batch + MAX_PIECES]
            n_tasks = 0
            for i, part in enumerate(of_batch):
                job.pieces[i] = _Piece(*part.work, part.first_unit, n_tasks)
                n_tasks += part.n_units
            job.n_pieces, job.n_tasks = len(of_batch), n_tasks
            n_ctas = min(self._launcher.max_ctas, -(-n_tasks * kernel.team // N_THREADS))
            self._launcher.launch(kernel.name, n_ctas, N_THREADS, np.frombuffer(bytes(job), _JOB_DTYPE))


class _Work(NamedTuple):
    """One chunk of a launch."""

    source: int  # bytes behind every source
    target: int  # bytes behind the target
    n_elems: int
    drawn: int = 0  # elements between the draw's first and this chunk's


class _Part(NamedTuple):
    """Neighbouring units of one chunk."""

    work: _Work
    first_unit: int
    n_units: int


def split(
    kernels: Kernels,
    work: Sequence[_Work],
    places: int,  # all addresses, or-ed
) -> tuple[list[_Part], list[_Part]]:
    """The units for the fast kernel, and those for the general one: partial units and misaligned chunks."""
    fast, general = [], []
    for chunk in work:
        n_units = -(-chunk.n_elems // kernels.unit)
        aligned = (places | chunk.source | chunk.target) % WIRE_ALIGNMENT == 0
        n_whole = chunk.n_elems // kernels.unit if kernels.fast and aligned else 0
        if n_whole:
            fast.append(_Part(chunk, 0, n_whole))
        if n_units > n_whole:
            general.append(_Part(chunk, n_whole, n_units - n_whole))
    return fast, general


# ---- cuda/job.cuh


class _Piece(ctypes.Structure):
    """zc_piece."""

    _fields_ = (
        ("source", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("n_elems", ctypes.c_int64),
        ("drawn", ctypes.c_int64),
        ("first_unit", ctypes.c_int64),
        ("first_task", ctypes.c_int64),
    )


class _Settings(ctypes.Structure):
    """zc_settings."""

    _fields_ = (("bits", ctypes.c_int32), ("block", ctypes.c_int32))


class _Job(ctypes.Structure):
    """zc_job."""

    _fields_ = (
        ("sources", ctypes.c_uint64 * INLINE_SOURCES),
        ("more_sources", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("factor", ctypes.c_double),
        ("divisor", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("call", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("k", ctypes.c_int64),
        ("n_tasks", ctypes.c_int64),
        ("codec_in", _Settings),
        ("codec_out", _Settings),
        ("team", ctypes.c_int32),
        ("block_team", ctypes.c_int32),
        ("pads", ctypes.c_int32),
        ("n_pieces", ctypes.c_int32),
        ("pieces", _Piece * MAX_PIECES),
    )


_JOB_DTYPE = np.dtype((np.void, ctypes.sizeof(_Job)))


def _job(
    sources: Sequence[int],
    target: int,
    finish: Finish = NO_FINISH,
    codec_in: Codec | None = None,
    codec_out: Codec | None = None,
    pads: bool = False,
    draw: Draw | None = None,
) -> _Job:
    """A job without its pieces. Raises CodecError if codec_out rounds by chance and there is no draw."""
    job = _Job(target=target, factor=finish[0], divisor=finish[1], k=len(sources), pads=pads)
    if codec_out is not None and codec_out.by_chance:
        job.seed, job.call, job.first = check_draw(codec_out, draw)
    if len(sources) <= INLINE_SOURCES:
        job.sources[: len(sources)] = list(sources)
    job.codec_in, job.codec_out = _settings(codec_in), _settings(codec_out)
    return job


def _settings(codec: Codec | None) -> _Settings:
    """What a block codec's struct is constructed from; nothing for others."""
    inner = codec.inner if isinstance(codec, Hadamard) else codec
    return _Settings(inner.bits, inner.block) if isinstance(inner, BlockQuantizer) else _Settings()
