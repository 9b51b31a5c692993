"""The steps of raw, casts, int8 and int4 by torch's own kernels, eager and compiled, for kernels.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from zcomm.buffers import DType
from zcomm.wire.cast import Cast
from zcomm.wire.codec import Codec
from zcomm.wire.int_block import IntBlock
from zcomm.wire.raw import Raw

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

EAGER_DTYPES = (DType.FLOAT32, DType.BFLOAT16)
COMPILED = ("int8", "int4")  # in float32: a compilation takes seconds
Calls = dict[str, Callable[[], Any]]  # verb -> a call of it


def runs(
    spec: str,
    kind: Codec,
    x: np.ndarray,  # elements of dtype (n,)
    dtype: DType,
    n_chunks: int,
    compiled: bool,  # whether to compile too
) -> dict[str, Calls]:
    """Calls by engine and verb; none where torch is missing or has no such steps."""
    if torch is None or dtype not in EAGER_DTYPES:
        return {}
    torch.set_num_threads(1)
    tensor = torch.from_numpy(x.view(np.uint16) if dtype is DType.BFLOAT16 else x)
    tensor = tensor.view(torch.bfloat16) if dtype is DType.BFLOAT16 else tensor
    if isinstance(kind, Raw | Cast):
        return {"torch eager": carried(tensor, getattr(torch, kind.dtype.spelling), n_chunks)}
    if not isinstance(kind, IntBlock) or kind.bits not in (4, 8) or kind.rounding != "nearest" or x.size % kind.block:
        return {}
    found = {"torch eager": in_blocks(tensor, kind, n_chunks, lambda step: step)}
    has_compiler = shutil.which("g++") or shutil.which("clang++")
    if compiled and has_compiler and spec in COMPILED and dtype is DType.FLOAT32:
        found["torch compile"] = in_blocks(tensor, kind, n_chunks, partial(torch.compile, dynamic=False))
    return found


def carried(x: Any, to: Any, n_chunks: int) -> Calls:
    """Casts to `to` and back."""
    coded = x.to(to, copy=True)
    return {
        "encode": lambda: x.to(to, copy=True),
        "decode": lambda: coded.to(x.dtype, copy=True),
        "reduce": lambda: sum((coded.float() for _ in range(n_chunks)), start=0).to(x.dtype),
    }


def in_blocks(
    x: Any,  # tensor (n,), n a multiple of the block
    kind: IntBlock,
    n_chunks: int,
    prepare: Callable[[Callable[..., Any]], Callable[..., Any]],  # compiles a step, or leaves it
) -> Calls:
    """Symmetric codes in blocks with a float32 scale each; 4-bit codes in the halves of a byte."""
    half = kind.block // 2

    def encode(x: Any) -> tuple[Any, Any]:
        rows = x.view(-1, kind.block).float()
        scale = rows.abs().amax(1, keepdim=True) / kind.qmax
        q = (rows / scale).round().to(torch.int8)
        return scale, q if kind.bits == 8 else (q[:, :half] & 15) | (q[:, half:] << 4)

    def decoded(scale: Any, q: Any) -> Any:
        if kind.bits == 4:
            q = torch.cat(((q << 4) >> 4, q >> 4), 1)
        return q.float() * scale

    def decode(scale: Any, q: Any) -> Any:
        return decoded(scale, q).to(x.dtype)

    def reduce(*chunks: tuple[Any, Any]) -> Any:
        return sum((decoded(*chunk) for chunk in chunks), start=0).to(x.dtype)

    chunks = [encode(x) for _ in range(n_chunks)]
    encode_, decode_, reduce_ = (prepare(step) for step in (encode, decode, reduce))
    return {
        "encode": lambda: encode_(x),
        "decode": lambda: decode_(*chunks[0]),
        "reduce": lambda: reduce_(*chunks),
    }
