"""Communicators over the first MPI ranks, and what the definition says of their collectives."""

from __future__ import annotations

import numpy as np
import oracle

import zcomm
from zcomm.buffers import DType
from zcomm.topology import Topology

TWO_NODES = (0, 0, 1, 1)  # as the ranks of tests/mpi_world.py say


def comm_of(size: int, codec: str = "int8", **settings):
    """A compressed communicator over the first ranks of the world, or None on the others."""
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < size else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return None
    return zcomm.mpi.Comm(part, codec, plan=zcomm.Plan(one_shot_bytes=0, **settings))


def topology_of(size: int) -> Topology | None:
    """Where two hops are taken; None where one is."""
    topology = Topology(node_of_rank=TWO_NODES[:size])
    return topology if topology.has_two_levels else None


def inputs(size: int, n_elems: int, dtype: str) -> list[np.ndarray]:
    return [oracle.values(rank, n_elems, DType[dtype.upper()].numpy) for rank in range(size)]


def reduced(size: int, n_elems: int, codec_name: str, dtype: str, op: str = "SUM") -> np.ndarray:
    """What the definition says: the input itself on one rank."""
    if size == 1:
        return inputs(1, n_elems, dtype)[0]
    codec = zcomm.codec(codec_name).for_dtype(DType[dtype.upper()])
    return oracle.all_reduce(codec, codec, inputs(size, n_elems, dtype), topology_of(size), op)


def scattered(size: int, n_elems: int, codec_name: str, dtype: str) -> list[np.ndarray]:
    if size == 1:
        return inputs(1, n_elems, dtype)
    codec = zcomm.codec(codec_name).for_dtype(DType[dtype.upper()])
    return oracle.reduce_scatter(codec, codec, inputs(size, n_elems * size, dtype), topology_of(size), "SUM")


def gathered(size: int, n_elems: int, codec_name: str, dtype: str) -> np.ndarray:
    if size == 1:
        return inputs(1, n_elems, dtype)[0]
    codec = zcomm.codec(codec_name).for_dtype(DType[dtype.upper()])
    return oracle.all_gather(codec, inputs(size, n_elems, dtype))
