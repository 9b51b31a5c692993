"""A link in user space, for machines that allow no network namespaces: senders sleep as long as the wire would take.

All ranks of all emulated nodes share one small file, mapped into each: a record per node of when its link is free again
(a virtual finish time) and of the bytes it has carried. A message to another node moves that time on by its own length
at the link's rate, and its sender sleeps until then, so ranks of one node share the node's link.

Set up by `zcomm cluster` through ZCOMM_PACE (bits per second, or "none") and ZCOMM_PACE_FILE. Only what is charged is
paced and counted: TCP headers and traffic that nobody charges are free.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from zcomm.errors import ClusterError

RATE_VARIABLE = "ZCOMM_PACE"
FILE_VARIABLE = "ZCOMM_PACE_FILE"

_RECORD = struct.Struct("=qqq")  # free_at_ns (CLOCK_MONOTONIC), tx_bytes, rx_bytes


def file_nbytes(n_nodes: int) -> int:
    """The size of the shared file, which starts as zeros."""
    return n_nodes * _RECORD.size


class Pacer:
    """This rank's hold on the shared links. Threads may use one together."""

    def __init__(
        self,
        path: str,  # the shared file, file_nbytes(n_nodes) bytes
        bits_s: float,  # each node's rate, bits per second; infinite: count only
        node: int,  # this rank's node
        ranks_per_node: int,
    ) -> None:
        self._node = node
        self._ranks_per_node = ranks_per_node
        self._ns_per_byte = 8e9 / bits_s
        self._thread_lock = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._records = mmap.mmap(self._fd, 0)
        except (OSError, ValueError) as problem:
            raise ClusterError(
                f"{FILE_VARIABLE}={path} cannot be shared ({problem}); it lives as long as its zcomm cluster"
            ) from problem
        self._let_go_once = weakref.finalize(self, _let_go, self._records, self._fd)  # at the latest when it is dropped
        self._let_go_once.atexit = False  # works in flight may still be paced
        self._n_nodes = len(self._records) // _RECORD.size

    @classmethod
    def from_environment(cls) -> Pacer | None:
        """The pacer of this rank, or None where links are real."""
        if RATE_VARIABLE not in os.environ:
            return None
        rate = os.environ[RATE_VARIABLE]
        try:
            return cls(
                os.environ[FILE_VARIABLE],
                float("inf") if rate == "none" else float(rate),
                int(os.environ["NODE_RANK"]),
                int(os.environ["LOCAL_WORLD_SIZE"]),
            )
        except (KeyError, ValueError, ZeroDivisionError) as problem:
            raise ClusterError(
                f"{RATE_VARIABLE}={rate!r} came with an environment that does not fit ({problem!r}); "
                "these variables are set by zcomm cluster and go together"
            ) from problem

    def charge(
        self,
        nbytes: int,
        to_rank: int | None = None,  # None: some rank of another node
    ) -> None:
        """Sleep until this node's link has carried nbytes more. A rank of the same node costs nothing.

        Received bytes are counted where the receiving node is known: by to_rank, or as the other one of two.
        """
        to_node = None if to_rank is None else to_rank // self._ranks_per_node
        if to_node is None and self._n_nodes == 2:
            to_node = 1 - self._node
        if to_node == self._node:
            return
        with self._locked():
            free_at_ns, tx_bytes, rx_bytes = self._read(self._node)
            free_at_ns = max(free_at_ns, time.monotonic_ns()) + round(nbytes * self._ns_per_byte)
            self._write(self._node, free_at_ns, tx_bytes + nbytes, rx_bytes)
            if to_node is not None:
                their_free_at_ns, their_tx_bytes, their_rx_bytes = self._read(to_node)
                self._write(to_node, their_free_at_ns, their_tx_bytes, their_rx_bytes + nbytes)
        time.sleep(max(0, free_at_ns - time.monotonic_ns()) / 1e9)

    def counters(self, node: int) -> tuple[int, int]:
        """Bytes sent and received by node so far."""
        with self._locked():
            _, tx_bytes, rx_bytes = self._read(node)
        return tx_bytes, rx_bytes

    def close(self) -> None:
        """Let go of the shared file. Again is no error."""
        self._let_go_once()

    def __enter__(self) -> Pacer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, node: int) -> tuple[int, int, int]:
        return _RECORD.unpack_from(self._records, node * _RECORD.size)

    def _write(self, node: int, free_at_ns: int, tx_bytes: int, rx_bytes: int) -> None:
        _RECORD.pack_into(self._records, node * _RECORD.size, free_at_ns, tx_bytes, rx_bytes)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:  # flock belongs to the open file, which our threads share
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


def _let_go(records: mmap.mmap, fd: int) -> None:
    records.close()
    os.close(fd)
