"""Bytes over any torch.distributed process group, always as uint8, always point to point.

Over host memory (gloo) every receive is posted before any send: a send whose receive is not posted waits for a round
trip behind the bytes already queued, which makes links half duplex, and gloo's own all-gather and reduce-scatter rings
send up to twice the bytes. Point to point also needs no sub-groups: two hops run over the group that the user has.
Over GPU memory (NCCL) each step is one grouped batch on the current stream. A group with both has two transports.

[Note: counted messages] Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares a number between ranks before each of its
own collectives that gloo raises with every message, its own send and recv too. Ranks that have sent and received
another number of them, as in a broadcast, on uneven nodes, or while calls are in flight, would be told that their
program mismatches. There zcomm's bytes go over connections of their own.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from zcomm.errors import BufferError, GroupError, MissingExtra, PeerTimeout, TransportError
from zcomm.streams import Mark, current_stream, index_of
from zcomm.transports.gloo_thread import make_batch
from zcomm.transports.pace import Pacer
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR, TagRanges, tag_of
from zcomm.transports.transport import Exchange, Parcel

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtra("torch is not installed; pip install 'zcomm-collectives[torch]'") from error

FIRST_TAG = 1 << 30  # above any tag a program is likely to use for its own sends
_dispatch_mode, _FAKE_MODE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_tags: weakref.WeakKeyDictionary[Any, TagRanges] = weakref.WeakKeyDictionary()  # of each group
_uncounted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # see [Note: counted messages]
_of_parent: weakref.WeakSet[Any] | None = None  # in the child of a fork: groups whose connections the parent uses


def _leave_groups_with_parent() -> None:
    global _of_parent
    _of_parent = weakref.WeakSet(dist.distributed_c10d._world.pg_map) if dist.is_available() else None


os.register_at_fork(after_in_child=_leave_groups_with_parent)


class TorchTransport:
    """The ranks of a process group."""

    name = "torch_dist"
    why_synchronous: str | None = None

    def __init__(
        self,
        group: Any = None,  # a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group
        device: str | None = None,  # where parcels live: "cpu", "cuda:0"; None: where the group moves bytes
    ) -> None:
        group = process_group(group)
        _check_not_faked()
        self._group = weakref.ref(group)  # torch keeps it until it is destroyed; only calls in flight do so longer
        self._made_by_torch = group in _groups_of_torch()  # not one made by hand
        self.rank = group.rank()
        self.size = group.size()
        self.group_name = f"group {group.group_name!r} of {self.size}"
        self.wire_bytes_sent = 0
        self._device = _device_of(group, device)
        self.device = str(self._device)
        self.queued = self._device.type == "cuda"  # NCCL
        self._eager = not self.queued
        self.hangs_up = self._eager and _backend_name(group, "cpu") == "gloo"
        if self.hangs_up:
            _connect_uncounted(group)
        if self._eager:
            make_batch()
        self.tags = _tags.setdefault(group, TagRanges(FIRST_TAG // TAGS_PER_COMMUNICATOR, FIRST_TAG, group.group_name))
        self._pacer = Pacer.from_environment()
        if self._pacer is not None:
            self._global_ranks = [dist.get_global_rank(group, rank) for rank in range(self.size)]

    @property
    def group(self) -> Any:
        """The process group. Raises GroupError once it is destroyed, TransportError where torch would move no bytes."""
        _check_not_faked()
        if self._made_by_torch and self._group() not in _groups_of_torch():
            raise self._destroyed()
        return self.group_in_use

    @property
    def group_in_use(self) -> Any:
        """The process group for a call that was made before it was destroyed, and keeps it."""
        group = self._group()
        if group is None:
            raise self._destroyed()
        return group

    def _destroyed(self) -> GroupError:
        return GroupError(f"{self.group_name} has been destroyed; make a communicator over a group that exists")

    @property
    def host(self) -> TorchTransport:
        """One over the group's CPU backend, where it has one beside NCCL; else this one."""
        return TorchTransport(self.group, "cpu") if self.queued and _has_cpu_backend(self.group) else self

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the group's device, that may be written in inference mode and outside of it."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def address(self, memory: torch.Tensor) -> int:
        """Where memory starts."""
        return memory.data_ptr()

    def write(self, memory: torch.Tensor, data: bytes) -> None:
        """Put bytes of the host there, in the order of the current stream."""
        memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def read(self, memory: torch.Tensor, timeout_s: float | None) -> bytes:
        """The bytes that are there when the current stream has come so far."""
        if self.queued:
            index = index_of(self.device)
            complaint = "not every rank's bytes came; NCCL does not say whose, and its watchdog may end the program"
            Mark(index, current_stream(index, of_torch=True)).settle(timeout_s, complaint)
        return memory.cpu().numpy().tobytes()

    def open(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float | None,
    ) -> Exchange:
        """Post the receives on gloo; over NCCL nothing happens before start."""
        if self._eager:
            return _EagerExchange(self, outgoing, incoming, tag, timeout_s)
        return _BatchExchange(self, outgoing, incoming, tag)

    def pace(self, peer: int, nbytes: int) -> None:
        """Where an emulated link is paced in user space, sleep as long as it would take."""
        if self._pacer is not None:
            self._pacer.charge(nbytes, self._global_ranks[peer])

    def hang_up(self) -> None:
        """After a failure, close gloo's connections to all ranks: who waits for this one hears at once that it gave up.

        A rank asks one peer after another, and may be with this one when the peer that died has been heard of. gloo
        itself hangs up where a wait runs out of time, and offers no other way.
        """
        group = self._group()
        if group is None or not self.hangs_up:
            return
        messages = _messages_of(group)
        for peer in range(self.size):
            with contextlib.suppress(RuntimeError):  # that the time was up, or that this one is the dead one
                if peer != self.rank:
                    messages.recv([self.empty(1)], peer, FIRST_TAG - 1).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Nothing of its own to free: the group is the user's."""


class _EagerExchange:
    """Receives posted at once, sends when the bytes are ready."""

    __slots__ = ("_group", "_outgoing", "_receives", "_sends", "_tag", "_timeout", "_transport")

    def __init__(
        self,
        transport: TorchTransport,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
        timeout_s: float | None,
    ) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._tag = tag
        self._timeout = timedelta(seconds=timeout_s) if timeout_s is not None else None
        self._sends: list[tuple[int, Any]] = []
        self._group = transport.group_in_use  # kept, so that there is something to hang up
        receive = _messages_of(self._group).recv
        self._receives: list[tuple[int, Any]] = []
        for peer, payload, mark in incoming:
            try:
                self._receives.append((peer, receive([payload], peer, tag_of(tag, payload.numel(), mark))))
            except RuntimeError as error:
                transport.hang_up()
                raise TransportError(f"nothing can come from rank {peer}: {_first_line(error)}") from error

    def start(self) -> None:
        transport = self._transport
        send = _messages_of(self._group).send
        for peer, payload, mark in self._outgoing:
            nbytes = payload.numel()
            transport.pace(peer, nbytes)
            try:
                self._sends.append((peer, send([payload], peer, tag_of(self._tag, nbytes, mark))))
            except RuntimeError as error:
                transport.hang_up()
                raise TransportError(f"rank {peer} cannot be reached: {_first_line(error)}") from error
            transport.wire_bytes_sent += nbytes  # nothing is called in between: other threads count too

    def wait(self) -> None:
        self._wait(self._receives, "nothing came from rank {}")

    def close(self) -> None:
        self._wait(self._sends, "rank {} did not take its bytes")

    def _wait(self, works: list[tuple[int, Any]], complaint: str) -> None:
        timeout = self._timeout
        for peer, work in works:
            try:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
            except RuntimeError as error:
                self._transport.hang_up()
                raise _kind_of(error)(f"{complaint.format(peer)}: {_first_line(error)}") from error
        works.clear()


class _BatchExchange:
    """One grouped batch of sends and receives on the current stream, which wait() lets wait for it, not the host.

    NCCL has no timeout for one call: given one, torch would let the host wait. The group's own is its watchdog's.
    """

    __slots__ = ("_incoming", "_outgoing", "_tag", "_transport", "_works")

    def __init__(
        self,
        transport: TorchTransport,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,
    ) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._incoming = incoming
        self._tag = tag
        self._works: list[Any] = []

    def start(self) -> None:
        group = self._transport.group_in_use
        batch = [
            dist.P2POp(kind, payload, group=group, tag=self._tag, group_peer=peer)
            for kind, parcels in ((dist.irecv, self._incoming), (dist.isend, self._outgoing))
            for peer, payload, _ in parcels
        ]
        for peer, payload, _ in self._outgoing:
            self._transport.pace(peer, payload.numel())
        if not batch:
            return
        try:
            self._works = dist.batch_isend_irecv(batch)
        except RuntimeError as error:
            raise TransportError(f"ranks {self._peers()} cannot be reached: {_first_line(error)}") from error
        nbytes = sum(parcel.payload.numel() for parcel in self._outgoing)
        self._transport.wire_bytes_sent += nbytes

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise _kind_of(error)(f"exchange with ranks {self._peers()}: {_first_line(error)}") from error

    def close(self) -> None:
        self.wait()

    def _peers(self) -> list[int]:
        return sorted({parcel.peer for parcel in (*self._incoming, *self._outgoing)})


def process_group(group: Any) -> Any:
    """The ProcessGroup meant by a group, a one-dimensional DeviceMesh, or None.

    Raises GroupError where torch.distributed is not initialised, or this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise GroupError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if group is None:
        group = dist.distributed_c10d._get_default_group()
        launched = os.environ.get("WORLD_SIZE", "")
        if group.size() == 1 and launched.isdecimal() and int(launched) > 1:
            raise GroupError(
                f"the launcher started {launched} ranks, but this process's default group has 1: "
                "call init_process_group with the launcher's RANK and WORLD_SIZE"
            )
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        if group.ndim != 1:
            raise GroupError(
                f"a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names} holds several groups; pass mesh[name]"
            )
        group = group.get_group()
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(f"global rank {dist.get_rank()} is not in this group")
    if not isinstance(group, dist.ProcessGroup):
        raise GroupError(
            f"got a {type(group).__name__}; expected a torch.distributed.ProcessGroup, a DeviceMesh or None"
        )
    if _of_parent is not None and group in _of_parent:
        raise GroupError(
            f"this process was forked from one that had group {group.group_name!r}, whose connections and threads are "
            "its own; start processes by spawn, or call init_process_group after the fork"
        )
    if group.rank() < 0:
        raise GroupError(f"global rank {dist.get_rank()} is not in group {group.group_name!r}")
    return group


def device_in(
    group: Any,  # a ProcessGroup
    device: torch.device | None,  # of a tensor; None: of none in particular
) -> str:
    """Where group moves the bytes of such a tensor: on its GPU by NCCL, else between hosts, if the group has a way.

    None means the current GPU where the group has NCCL and there is one.
    """
    has_nccl = _backend_name(group, "cuda") == "nccl"
    if has_nccl and (device is None or device.type != "cpu" or not _has_cpu_backend(group)):
        if device is not None and device.type == "cuda":
            return str(device)
        if torch.cuda.is_available():
            return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _device_of(group: Any, device: str | None) -> torch.device:
    """Where a transport's parcels live. Raises BufferError where the group has no backend for that device."""
    wanted = torch.device(device_in(group, None) if device is None else device)
    if wanted.type == "cuda" and _backend_name(group, "cuda") == "nccl":
        return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    if wanted.type == "cpu" and _backend_name(group, "cpu") != "nccl":
        return wanted
    raise BufferError(
        f"group {group.group_name!r} moves no bytes on {wanted}: that takes a group made with backend "
        '"nccl" for a GPU, "gloo" for host memory, or "cpu:gloo,cuda:nccl" for both'
    )


def _messages_of(group: Any) -> Any:
    """What sends and receives for a group: itself, or see [Note: counted messages]."""
    return _uncounted.get(group, group) if _uncounted else group


def _connect_uncounted(group: Any) -> None:
    """Collective, once for each group that torch debugs. See [Note: counted messages]."""
    debugged = getattr(group._get_backend(torch.device("cpu")), "wrapped_pg", None)
    _, store = _groups_of_torch().get(group, (None, None))
    if debugged is None or store is None or group in _uncounted:
        return
    own_store = dist.PrefixStore("zcomm", store)
    try:
        _uncounted[group] = dist.ProcessGroupGloo(own_store, group.rank(), group.size(), debugged.options._timeout)
    except RuntimeError as error:
        raise _kind_of(error)(
            f"rank {group.rank()} of group {group.group_name!r}: not every rank came to connect for zcomm, which under "
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL has connections of its own: {_first_line(error)}"
        ) from error


def _groups_of_torch() -> dict[Any, Any]:
    """Those that torch made and has not destroyed."""
    groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    return groups


def _check_not_faked() -> None:
    """Raise TransportError under torch's FakeTensorMode, which makes its sends and receives do nothing."""
    if _dispatch_mode(_FAKE_MODE) is not None:
        raise TransportError("a FakeTensorMode is active here, in which torch moves no bytes; call outside of it")


def _has_cpu_backend(group: Any) -> bool:
    return _backend_name(group, "cpu") not in (None, "nccl")


def _backend_name(group: Any, kind: str) -> str | None:
    """The backend that serves a kind of device in this group; None if none does."""
    try:
        return str(group._get_backend(torch.device(kind)).name()).lower()
    except RuntimeError:
        return None


def _kind_of(error: RuntimeError) -> type[TransportError]:
    """PeerTimeout where torch's words say that the time was up."""
    return PeerTimeout if "imed out" in str(error) or "imeout" in str(error) else TransportError


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
