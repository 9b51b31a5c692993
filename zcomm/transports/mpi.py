"""Bytes over any MPI communicator (mpi4py): MPI moves bytes only, so every dtype travels, and sums are zcomm's own.

Receives are posted first, sends follow when their bytes are ready, both without blocking. A transport works on its own
duplicate of the communicator, so it never meets the program's messages.

[Note: waiting] MPI has no timeout, and its blocking calls spin. Here a wait asks MPI again and again, which also moves
messages on; it yields its core between the first questions, then sleeps, longer each time up to LONGEST_PAUSE_S. So
ranks that share cores leave them to each other, a dead peer is noticed, and short messages are still fast.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from zcomm.errors import GroupError, MissingExtra, PeerTimeout, TransportError
from zcomm.transports.memory import HostMemory
from zcomm.transports.mpi_launcher import check_launcher
from zcomm.transports.pace import Pacer
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR, TagRanges, change_of
from zcomm.transports.transport import Parcel
from zcomm.work import finish_all

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
    group: Any = None  # the duplicate is this transport's own
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
        _watch_the_end()
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
        check_not_over()
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        return MpiExchange(self, outgoing, incoming, tag, timeout_s)

    def post(
        self,
        begin: Callable[..., Any],  # comm.Irecv or comm.Isend
        parcels: Sequence[Parcel],
        tag: int,
        messages: _Messages,  # added to
        complaint: str,
    ) -> None:
        """Begin a message for each parcel; for one larger than the largest message, several."""
        for peer, payload, mark in parcels:
            nbytes = payload.size
            for piece in (payload,) if nbytes <= self.piece_bytes else self.pieces(payload):
                nbytes = piece.size
                try:
                    request = begin([piece, MPI.BYTE], peer, self.fold(tag, nbytes, mark))
                except MPI.Exception as error:
                    raise TransportError(f"{complaint.format(peer)}: {error}") from error
                messages.append((request, peer, nbytes))

    def fold(self, tag: int, nbytes: int, mark: int = 0) -> int:
        """The MPI tag of a message: that of its step, as far as MPI's largest tag (32767 at least) allows.

        Communicators are cut off first, then the low bits: they only tell apart calls that should have been equal. The
        steps of a communicator, 14 bits, always stay distinct.
        """
        tag ^= change_of(nbytes, mark)
        if self.tag_bits >= TAG_BITS:
            return tag & ((1 << self.tag_bits) - 1)
        return (tag & (TAGS_PER_COMMUNICATOR - 1)) >> (TAG_BITS - self.tag_bits)

    def pieces(self, payload: np.ndarray) -> list[np.ndarray]:
        """A parcel cut into messages; one for most. What a message holds never depends on the number of ranks."""
        return [payload[at : at + self.piece_bytes] for at in range(0, payload.size or 1, self.piece_bytes)]

    def paced(self, parcels: Sequence[Parcel]) -> Iterable[Sequence[Parcel]]:
        """What may be sent together: all; one by one, each when its link has had the time, where one is paced here."""
        return (parcels,) if self._pacer is None else map(self._pace, parcels)

    def _pace(self, parcel: Parcel) -> Sequence[Parcel]:
        if self._pacer is not None:
            self._pacer.charge(parcel.payload.size, self._world_ranks[parcel.peer])
        return (parcel,)

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

    __slots__ = ("_coming", "_going", "_outgoing", "_tag", "_timeout_s", "_transport")

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
        self._going: _Messages = []
        self._coming: _Messages = []
        transport.check_thread()
        transport.under_way.add(self)
        transport.post(transport.comm.Irecv, incoming, tag, self._coming, "nothing can come from rank {}")

    def start(self) -> None:
        transport = self._transport
        transport.check_thread()
        for parcels in transport.paced(self._outgoing):
            transport.post(transport.comm.Isend, parcels, self._tag, self._going, "rank {} cannot be reached")
        nbytes_sent = sum([nbytes for _, _, nbytes in self._going])
        transport.wire_bytes_sent += nbytes_sent  # nothing is called in between: other threads count too

    def wait(self) -> None:
        self._transport.check_thread()
        _complete(self._coming, MPI.Status(), self._timeout_s, "nothing came from rank {}")

    def close(self) -> None:
        self._transport.check_thread()
        _complete(self._going, None, self._timeout_s, "rank {} did not take its bytes")
        self._transport.under_way.discard(self)

    def call_off(self) -> bool:
        """Cancel what has not arrived; whether MPI has let go of all memory."""
        for request, _, _ in self._coming:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
        return all(_is_let_go(request) for request, _, _ in (*self._coming, *self._going))


_Messages = list[tuple[Any, int, int]]  # under way in one direction: request, peer, nbytes, as they were posted


def _complete(
    messages: _Messages,  # emptied
    status: Any,  # where messages come in, and their size is checked; None where they go out
    timeout_s: float,
    complaint: str,
) -> None:
    """Return when all are done. See [Note: waiting]."""
    for _ in range(YIELDS):
        while messages and _is_done(messages[-1], status, complaint):  # the question about one moves all on
            messages.pop()
        if not messages:
            return
        os.sched_yield()
    give_up_at = time.monotonic() + timeout_s
    pause_s = SHORTEST_PAUSE_S
    while not _are_done(messages, status, complaint):
        if time.monotonic() > give_up_at and not _are_done(messages, status, complaint):  # the last may just have come
            raise PeerTimeout(f"{complaint.format(messages[0][1])} within {timeout_s} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _are_done(messages: _Messages, status: Any, complaint: str) -> bool:
    messages[:] = [message for message in messages if not _is_done(message, status, complaint)]
    return not messages


def _is_done(message: tuple[Any, int, int], status: Any, complaint: str) -> bool:
    """Whether a message is done. Raises TransportError for one that failed, or was shorter than its place; of a longer
    one MPI complains itself."""
    request, peer, nbytes = message
    try:
        done: bool = request.Test(status)
    except MPI.Exception as error:
        why = MPI.Get_error_string(error.Get_error_code())
        raise TransportError(f"{complaint.format(peer)} as agreed: {why}") from error
    if done and status is not None and (came := status.Get_count(MPI.BYTE)) != nbytes:
        raise TransportError(f"rank {peer} sent {came} bytes where {nbytes} were expected")
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
    if not MPI.Is_initialized():
        raise GroupError("MPI is not initialised; call MPI.Init() first, or let mpi4py do so as it does by default")
    check_not_over()
    check_launcher(MPI.COMM_WORLD.Get_size(), _library())
    if comm == MPI.COMM_NULL:
        raise GroupError("got COMM_NULL: this process is not in the communicator; only its members may call")
    if comm.Is_inter():
        raise GroupError("got an intercommunicator; expected an intracommunicator: comm.Merge() makes one")


def check_not_over() -> None:
    """Raise GroupError after MPI.Finalize(): MPI itself would end the process."""
    if MPI.Is_finalized():
        raise GroupError("MPI is finalised already; use zcomm before MPI.Finalize()")


@functools.cache
def _watch_the_end() -> None:
    """Let works in flight end before MPI does: MPI_Finalize begins by freeing COMM_SELF, which tells its attributes."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_finish), None)


def _finish(comm: Any, keyval: int, value: Any) -> None:
    finish_all()


def _library() -> str:
    """The MPI library in a few words."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _duplicate(comm: Any, group_name: str) -> Any:
    """A communicator of the same ranks for zcomm's messages alone, whose errors are exceptions."""
    complaint = "not every rank came to make a zcomm communicator; rank {} waited"
    try:
        _complete([(comm.Ibarrier(), comm.Get_rank(), 0)], None, DEFAULT_TIMEOUT_S, complaint)
    except TransportError as error:
        raise type(error)(f"{group_name}: {error}") from error
    try:
        own = comm.Dup()  # blocks no more: all ranks are here
    except MPI.Exception as error:
        raise TransportError(
            f"{group_name}: MPI gives no communicator for zcomm's messages ({str(error).splitlines()[-1]}); there can "
            "be a few thousand at once: close() those of zcomm's that are no longer used, and Free() the program's own"
        ) from error
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return own


def _world_ranks(comm: Any) -> list[int]:
    """The rank in COMM_WORLD of each of comm's ranks."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks: list[int] = group.Translate_ranks(list(range(group.Get_size())), world)
    group.Free()
    world.Free()
    return ranks
