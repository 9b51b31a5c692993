"""Bytes over any MPI communicator (mpi4py): MPI moves bytes only, so every dtype travels, and sums are zcomm's own.

Receives are posted first, sends follow when their bytes are ready, both without blocking. A transport works on its own
duplicate of the communicator, so it never meets the program's messages.

[Note: waiting] MPI has no timeout, and its blocking calls spin. Here a wait asks MPI again and again, which also moves
messages on; it yields its core between the first questions, then sleeps, longer each time up to LONGEST_PAUSE_S. So
ranks that share cores leave them to each other, a dead peer is noticed, and short messages are still fast.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from zcomm.errors import GroupError, MissingExtra, PeerTimeout, TransportError
from zcomm.transports.memory import HostMemory
from zcomm.transports.mpi_launcher import check_launcher
from zcomm.transports.pace import Pacer
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR, TagRanges, tag_of
from zcomm.transports.transport import Parcel

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(
        f"mpi4py or its MPI library cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'"
    ) from error

DEFAULT_TIMEOUT_S = 1800.0  # as torch.distributed's
LEAST_LARGEST_TAG = 32767  # that MPI allows any implementation
PIECE_BYTES = 1 << 30  # the largest message; MPI counts are 32-bit in many libraries
TAG_BITS = TAGS_PER_COMMUNICATOR.bit_length() - 1
YIELDS = 200  # questions between which a wait yields only
SHORTEST_PAUSE_S = 10e-6
LONGEST_PAUSE_S = 200e-6  # a gigabit link moves 25 KB meanwhile, less than socket buffers hold

_numbers = itertools.count()  # of the transports that this process makes
_undelivered: list[Any] = []  # exchanges that MPI may still write to after their transport was closed


class MpiTransport(HostMemory):
    """The ranks of an intracommunicator. Making and closing one is collective."""

    name = "mpi"
    device = "cpu"
    queued = False

    def __init__(
        self,
        comm: Any,  # mpi4py.MPI.Intracomm; stays the caller's
    ) -> None:
        _check(comm)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.group_name = f"communicator {comm.Get_name() or 'without name'!r} of {self.size}"
        self.wire_bytes_sent = 0
        self.comm = _duplicate(comm, self.group_name)
        self.piece_bytes = PIECE_BYTES
        largest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.tag_bits = (int(largest_tag or LEAST_LARGEST_TAG) + 1).bit_length() - 1
        self.thread = None if MPI.Query_thread() == MPI.THREAD_MULTIPLE else threading.get_ident()
        self.why_synchronous = no_threads() if self.thread is not None else None
        self.under_way: set[MpiExchange] = set()
        name = f"{MPI.COMM_WORLD.Get_rank()} {next(_numbers)}"
        self.tags = TagRanges(max(1, 1 << self.tag_bits >> TAG_BITS), name=name)
        self._pacer = Pacer.from_environment()
        self._world_ranks = _world_ranks(comm) if self._pacer else []

    @property
    def host(self) -> MpiTransport:
        """This one: its parcels are in host memory."""
        return self

    def open(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float | None,
    ) -> MpiExchange:
        """Post the receives."""
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        return MpiExchange(self, outgoing, incoming, tag, timeout_s)

    def fold(self, tag: int, nbytes: int, mark: int = 0) -> int:
        """The MPI tag of a message: that of its step, as far as MPI's largest tag (32767 at least) allows.

        Communicators are cut off first, then the low bits: they only tell apart calls that should have been equal. The
        steps of a communicator, 14 bits, always stay distinct.
        """
        tag = tag_of(tag, nbytes, mark)
        if self.tag_bits >= TAG_BITS:
            return tag & ((1 << self.tag_bits) - 1)
        return (tag & (TAGS_PER_COMMUNICATOR - 1)) >> (TAG_BITS - self.tag_bits)

    def pieces(self, payload: np.ndarray) -> list[np.ndarray]:
        """A parcel cut into messages; one for most. What a message holds never depends on the number of ranks."""
        if payload.size <= self.piece_bytes:
            return [payload]
        return [payload[at : at + self.piece_bytes] for at in range(0, payload.size, self.piece_bytes)]

    def pace(self, peer: int, nbytes: int) -> None:
        """Where an emulated link is paced in user space, sleep as long as it would take."""
        if self._pacer is not None:
            self._pacer.charge(nbytes, self._world_ranks[peer])

    def check_thread(self) -> None:
        """Raise TransportError where this MPI does not allow calls from this thread."""
        if self.thread is not None and self.thread != threading.get_ident():
            raise TransportError(no_threads())

    def close(self) -> None:
        """Free the duplicate. What peers never sent is called off.

        Where something was, the duplicate is left to MPI: a message that comes for a freed communicator may be taken
        for one of the next that gets its number.
        """
        if MPI.Is_finalized() or self.comm == MPI.COMM_NULL:
            return
        failed = list(self.under_way)
        self.under_way.clear()
        _undelivered.extend(exchange for exchange in failed if not exchange.call_off())
        if failed:
            self.comm = MPI.COMM_NULL
        else:
            self.comm.Free()


class MpiExchange:
    """Receives posted at once, sends when the bytes are ready. Known to its transport until closed, so that memory
    outlives the messages that MPI may still deliver into it."""

    __slots__ = ("_outgoing", "_receives", "_sends", "_tag", "_timeout_s", "_transport")

    def __init__(
        self,
        transport: MpiTransport,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._tag = tag
        self._timeout_s = timeout_s
        self._sends = _Messages("rank {} did not take its bytes")
        self._receives = receives = _Messages("nothing came from rank {}", receiver=transport.rank)
        transport.check_thread()
        transport.under_way.add(self)
        receive = transport.comm.Irecv
        for peer, payload, mark in incoming:
            for piece in transport.pieces(payload):
                nbytes = piece.size
                try:
                    request = receive([piece, MPI.BYTE], peer, transport.fold(tag, nbytes, mark))
                except MPI.Exception as error:
                    raise TransportError(f"nothing can come from rank {peer}: {error}") from error
                receives.under_way.append((request, peer, nbytes))

    def start(self) -> None:
        transport = self._transport
        transport.check_thread()
        send, under_way = transport.comm.Isend, self._sends.under_way
        for peer, payload, mark in self._outgoing:
            transport.pace(peer, payload.size)
            for piece in transport.pieces(payload):
                nbytes = piece.size
                try:
                    request = send([piece, MPI.BYTE], peer, transport.fold(self._tag, nbytes, mark))
                except MPI.Exception as error:
                    raise TransportError(f"rank {peer} cannot be reached: {error}") from error
                under_way.append((request, peer, nbytes))
            transport.wire_bytes_sent += payload.size

    def wait(self) -> None:
        self._transport.check_thread()
        self._receives.complete(self._timeout_s)

    def close(self) -> None:
        self._transport.check_thread()
        self._sends.complete(self._timeout_s)
        self._transport.under_way.discard(self)

    def call_off(self) -> bool:
        """Cancel what has not arrived; whether MPI has let go of all memory."""
        self._receives.cancel()
        return self._receives.are_let_go() and self._sends.are_let_go()


class _Messages:
    """Messages of one direction: their requests, whose they are, and how long."""

    __slots__ = ("_complaint", "_receiver", "_status", "under_way")

    def __init__(
        self,
        complaint: str,
        receiver: int | None = None,  # the rank that the messages are for, where they are received
    ) -> None:
        self._complaint = complaint
        self._receiver = receiver
        self._status = None if receiver is None else MPI.Status()
        self.under_way: list[tuple[Any, int, int]] = []  # request, peer, nbytes, as they were posted

    def complete(self, timeout_s: float) -> None:
        """Return when all are done. See [Note: waiting]."""
        under_way, is_done = self.under_way, self._is_done
        for _ in range(YIELDS):
            while under_way and is_done(*under_way[-1]):  # the question about one moves all on
                under_way.pop()
            if not under_way:
                return
            os.sched_yield()
        give_up_at = time.monotonic() + timeout_s
        pause_s = SHORTEST_PAUSE_S
        while not self.test():
            if time.monotonic() > give_up_at and not self.test():  # the last may have come just now
                raise PeerTimeout(f"{self._complaint.format(under_way[0][1])} within {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def test(self) -> bool:
        """Whether all are done."""
        self.under_way[:] = [message for message in self.under_way if not self._is_done(*message)]
        return not self.under_way

    def cancel(self) -> None:
        """Call off those that have not begun."""
        for request, _, _ in self.under_way:
            if request != MPI.REQUEST_NULL:
                request.Cancel()

    def are_let_go(self) -> bool:
        """Whether MPI no longer needs the memory of any: they came, failed, or were called off."""
        return all(_is_let_go(request) for request, _, _ in self.under_way)

    def _is_done(self, request: Any, peer: int, nbytes: int) -> bool:
        """Whether a message is done. Raises TransportError for one that failed, or was shorter than its place; of a
        longer one MPI complains itself."""
        status = self._status
        try:
            done: bool = request.Test(status)
        except MPI.Exception as error:
            why = MPI.Get_error_string(error.Get_error_code())
            raise TransportError(f"{self._complaint.format(peer)} as agreed: {why}") from error
        if done and status is not None and (came := status.Get_count(MPI.BYTE)) != nbytes:
            raise TransportError(f"rank {peer} sent {came} bytes where rank {self._receiver} expected {nbytes}")
        return done


def _is_let_go(request: Any) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:  # of a message that failed, which the call that waited for it has told
        return True


def no_threads() -> str:
    """What to say where a call would need MPI from a second thread."""
    names = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
    level = next(name for name in names if getattr(MPI, name) == MPI.Query_thread())
    return (
        "asynchronous calls go on in a thread of their own, which needs MPI_THREAD_MULTIPLE, but this MPI was "
        f"initialised with MPI_{level}; call synchronously, or let mpi4py initialise MPI as it does by default "
        "(mpi4py.rc.thread_level = 'multiple')"
    )


def _check(comm: Any) -> None:
    """Raise GroupError unless comm is a communicator that this rank can use."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise GroupError(
            "MPI is not initialised (or finalised already); import mpi4py.MPI first, use zcomm before the end"
        )
    check_launcher(MPI.COMM_WORLD.Get_size(), _library())
    if comm == MPI.COMM_NULL:
        raise GroupError("got COMM_NULL: this process is not in the communicator; only its members may call")
    if comm.Is_inter():
        raise GroupError("got an intercommunicator; expected an intracommunicator: comm.Merge() makes one")


def _library() -> str:
    """The MPI library in a few words."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _duplicate(comm: Any, group_name: str) -> Any:
    """A communicator of the same ranks for zcomm's messages alone, whose errors are exceptions."""
    coming = _Messages("not every rank came to make a zcomm communicator; rank {} waited")
    coming.under_way.append((comm.Ibarrier(), comm.Get_rank(), 0))
    try:
        coming.complete(DEFAULT_TIMEOUT_S)
    except TransportError as error:
        raise type(error)(f"{group_name}: {error}") from error
    own = comm.Dup()  # blocks no more: all ranks are here
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return own


def _world_ranks(comm: Any) -> list[int]:
    """The rank in COMM_WORLD of each of comm's ranks."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks: list[int] = group.Translate_ranks(list(range(group.Get_size())), world)
    group.Free()
    world.Free()
    return ranks
