"""The cuda engine: every verb as kernels over the blocks of its chunks, queued on the caller's current stream.

The kernels are cuda/exports.cu. For each codec struct there is a general one, for any width, block and address, and for
the usual codecs a fast one, for whole blocks of memory at multiples of 16 bytes: what is left of a chunk is a launch of
the general one. `_struct` says which C++ struct a codec has. Arguments are addresses: tensors of torch or cupy are used
in place. `encode_pieces` and `decode_pieces` do a chunk's pieces in one launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from zcomm.buffers import DType
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.errors import EngineError
from zcomm.wire.cast import Cast
from zcomm.wire.codec import WIRE_ALIGNMENT, Codec
from zcomm.wire.draw import Draw
from zcomm.wire.int_block import IntBlock
from zcomm.wire.raw import Raw

N_THREADS = 256  # of every CTA: ZC_THREADS
INLINE_SOURCES = 128  # ZC_SOURCES
MAX_PIECES = 32  # ZC_PIECES
WIDE_BLOCK = 8192  # elements from which on a whole CTA shares a block


class Launcher(Protocol):
    """What runs kernels: a GPU (cuda_device.py), or a CPU in tests."""

    max_ctas: int  # more blocks than these can hold are looped over

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
    """Computes raw, cast and int_block codecs on one GPU, asynchronously to the host."""

    name = "cuda"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def supports(self, codec: Codec) -> bool:
        """Whether it can compute this codec."""
        try:
            _struct(codec)
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
        draw: Draw | None = None,  # ignored: no codec that this engine computes rounds by chance
    ) -> None:
        """Encode one chunk."""
        self.encode_pieces(codec, source, dtype, wire, ((0, n_elems, 0),))

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
    ) -> None:
        """Encode each piece as a chunk of its own, all in one launch."""
        size = dtype.itemsize
        work = [_Work(start * size, offset, n) for start, n, offset in pieces if n]
        if isinstance(codec, Raw) and codec.dtype is dtype:
            work = [part._replace(n_elems=part.n_elems * size) for part in work]
            self._run(_COPY, _job((source,), wire, pads=True), work)
        else:
            self._run(encode_kernels(codec, dtype), _job((source,), wire, codec_out=codec, pads=True), work)

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
            self._run(_COPY, _job((wire,), target), work)
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
        draw: Draw | None = None,  # ignored
    ) -> None:
        """As reduce, but the finished fp32 sums are encoded again by codec_out instead of stored."""
        if n_elems:
            job = _job(wires, wire_out, finish, codec_in=codec, codec_out=codec_out, pads=True)
            self._run(sum_encode_kernels(codec, codec_out), job, [_Work(0, 0, n_elems)], wires)

    def _run(
        self,
        kernels: _Kernels,
        job: _Job,
        work: Sequence[_Work],
        wires: Sequence[int] = (),  # where there may be more than fit into the job
    ) -> None:
        """Launch what does these chunks: the fast kernel on their whole blocks, the general one on the rest."""
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

    def _launch(self, kernel: _Kernel, job: _Job, parts: Sequence[_Part]) -> None:
        job.team = kernel.team
        for batch in range(0, len(parts), MAX_PIECES):
            of_batch = parts[batch : batch + MAX_PIECES]
            n_tasks = 0
            for i, part in enumerate(of_batch):
                job.pieces[i] = _Piece(*part.work, part.first_block, n_tasks)
                n_tasks += part.n_blocks
            job.n_pieces, job.n_tasks = len(of_batch), n_tasks
            n_ctas = min(self._launcher.max_ctas, -(-n_tasks * kernel.team // N_THREADS))
            self._launcher.launch(kernel.name, n_ctas, N_THREADS, np.frombuffer(bytes(job), _JOB_DTYPE))


class _Work(NamedTuple):
    """One chunk of a launch."""

    source: int  # bytes behind every source
    target: int  # bytes behind the target
    n_elems: int


class _Part(NamedTuple):
    """Neighbouring blocks of one chunk."""

    work: _Work
    first_block: int
    n_blocks: int


class _Kernel(NamedTuple):
    name: str
    team: int  # threads that share a block


class _Kernels(NamedTuple):
    """What does one verb of one codec."""

    fast: _Kernel | None
    general: _Kernel
    block: int  # elements


_COPY = _Kernels(None, _Kernel("copy", 1), 16)


def split(
    kernels: _Kernels,
    work: Sequence[_Work],
    places: int,  # all addresses, or-ed
) -> tuple[list[_Part], list[_Part]]:
    """The blocks for the fast kernel, and those for the general one: partial blocks and misaligned chunks."""
    fast, general = [], []
    for chunk in work:
        n_blocks = -(-chunk.n_elems // kernels.block)
        aligned = (places | chunk.source | chunk.target) % WIRE_ALIGNMENT == 0
        n_whole = chunk.n_elems // kernels.block if kernels.fast and aligned else 0
        if n_whole:
            fast.append(_Part(chunk, 0, n_whole))
        if n_blocks > n_whole:
            general.append(_Part(chunk, n_whole, n_blocks - n_whole))
    return fast, general


# ---- which kernel does what


class _Struct(NamedTuple):
    """A codec's struct in C++."""

    fast: str  # with constants; "" if there is none
    general: str
    block: int
    segments: int  # of the fast one, as in cuda/planes.cuh
    has_blocks: bool


_ELEMENTS = {
    DType.FLOAT32: "Float32",
    DType.BFLOAT16: "BFloat16",
    DType.FLOAT16: "Float16",
    DType.FLOAT64: "Float64",
}
_VECTOR = {DType.FLOAT32: 4, DType.BFLOAT16: 8, DType.FLOAT16: 8}  # of cuda/elements.cuh; float64 has no fast kernels
_SUM_VECTOR = 8  # VECTOR of SumOf
_FAST_INT_BLOCKS = {(8, 256): 1, (4, 128): 2}  # and their segments


@lru_cache(maxsize=256)
def _struct(codec: Codec) -> _Struct:
    if isinstance(codec, IntBlock) and codec == IntBlock(codec.bits, codec.block):  # without other options
        segments = _FAST_INT_BLOCKS.get((codec.bits, codec.block), 0)
        fast = f"IntBlock<{codec.bits}, {codec.block}>" if segments else ""
        return _Struct(fast, "IntBlock<0, 0>", codec.block, segments, has_blocks=True)
    if isinstance(codec, Raw | Cast):
        element = _ELEMENTS[codec.dtype]
        fast = f"Carried<{element}, 8>" if codec.dtype in _VECTOR else ""
        return _Struct(fast, f"Carried<{element}, 0>", 8, 1, has_blocks=False)
    raise EngineError(f"the cuda engine cannot compute codec {codec}; use CPU memory for it")


@lru_cache(maxsize=256)
def encode_kernels(codec: Codec, dtype: DType) -> _Kernels:
    """From elements to a chunk."""
    struct = _struct(codec)
    if not struct.has_blocks:
        return sum_kernels(Raw(dtype.spelling), codec.dtype)  # type: ignore[attr-defined]
    return _kernels(struct, f"encode<{{}}, Elements<{_ELEMENTS[dtype]}>>", _VECTOR.get(dtype, 0))


@lru_cache(maxsize=256)
def sum_kernels(codec: Codec, dtype: DType) -> _Kernels:
    """From chunks, one or many, to elements."""
    return _kernels(_struct(codec), f"sum<{{}}, {_ELEMENTS[dtype]}>", _VECTOR.get(dtype, 0))


@lru_cache(maxsize=256)
def sum_encode_kernels(codec: Codec, codec_out: Codec) -> _Kernels:
    """From chunks to a chunk of their sum."""
    struct, out = _struct(codec), _struct(codec_out)
    if not out.has_blocks:
        return sum_kernels(codec, codec_out.dtype)  # type: ignore[attr-defined]
    if struct == out:
        return _kernels(out, "encode<{}, SumOf<{}>>", _SUM_VECTOR)
    return _kernels(out, f"encode<{{}}, SumOf<{struct.general}>>", 0)


def _kernels(
    struct: _Struct,
    pattern: str,
    vector: int,  # elements that a thread of the fast kernel moves at once, 0 if there is no fast one
) -> _Kernels:
    """A pattern's two instances, and how many threads share a block in each."""
    columns = struct.block // 8
    wide = struct.has_blocks and struct.block >= WIDE_BLOCK
    general = _Kernel(
        pattern.replace("{}", struct.general),
        N_THREADS if wide else 8 if not struct.has_blocks else min(32, 1 << (columns - 1).bit_length()),
    )
    if not (struct.fast and vector):
        return _Kernels(None, general, struct.block)
    at_once = vector if struct.has_blocks else 8
    team = min(32, struct.block // (struct.segments * at_once))
    return _Kernels(_Kernel(pattern.replace("{}", struct.fast), team), general, struct.block)


def every_kernel(codecs: Sequence[Codec]) -> list[str]:
    """The C++ names of all kernels that any verb uses on these codecs."""
    names = {_COPY.general.name: None}
    for kernels in _every(codecs):
        names[kernels.general.name] = None
        if kernels.fast:
            names[kernels.fast.name] = None
    return list(names)


def _every(codecs: Sequence[Codec]) -> Iterator[_Kernels]:
    for codec in codecs:
        for dtype in DType:
            yield encode_kernels(codec, dtype)
            yield sum_kernels(codec, dtype)
        for codec_out in codecs:
            yield sum_encode_kernels(codec, codec_out)


# ---- cuda/job.cuh


class _Piece(ctypes.Structure):
    """zc_piece."""

    _fields_ = (
        ("source", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("n_elems", ctypes.c_int64),
        ("first_block", ctypes.c_int64),
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
        ("k", ctypes.c_int64),
        ("n_tasks", ctypes.c_int64),
        ("codec_in", _Settings),
        ("codec_out", _Settings),
        ("team", ctypes.c_int32),
        ("pads", ctypes.c_int32),
        ("n_pieces", ctypes.c_int32),
        ("unused", ctypes.c_int32),
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
) -> _Job:
    """A job without its pieces."""
    job = _Job(target=target, factor=finish[0], divisor=finish[1], k=len(sources), pads=pads)
    if len(sources) <= INLINE_SOURCES:
        job.sources[: len(sources)] = list(sources)
    job.codec_in, job.codec_out = _settings(codec_in), _settings(codec_out)
    return job


def _settings(codec: Codec | None) -> _Settings:
    return _Settings(codec.bits, codec.block) if isinstance(codec, IntBlock) else _Settings()
