"""What every transport promises, on each there is: bytes arrive whole, in any order of tags, errors name the peer."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fake_cuda import FakeCuda
from impatience import AMPLE_S

from zcomm.errors import GroupError, PeerTimeout, TransportError
from zcomm.transports import local
from zcomm.transports.nccl import NcclTransport
from zcomm.transports.open import open_transport
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR
from zcomm.transports.transport import Parcel, Transport


def values(nbytes: int, seed: int) -> bytes:
    """Bytes that depend on seed and position."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def filled(transport, nbytes: int, seed: int):
    """Memory that holds them."""
    memory = transport.empty(nbytes)
    transport.write(memory, values(nbytes, seed))
    return memory


def check_all_to_all(transport) -> None:
    assert isinstance(transport, Transport)
    for tag, nbytes in enumerate([1, 16, 1000, 300_000], start=transport.tags.take()):
        peers = [rank for rank in range(transport.size) if rank != transport.rank]
        before = transport.wire_bytes_sent
        out = {peer: filled(transport, nbytes, 100 * transport.rank + peer) for peer in peers}
        into = {peer: transport.empty(nbytes) for peer in peers}
        exchange = transport.open(
            [Parcel(peer, out[peer]) for peer in peers], [Parcel(peer, into[peer]) for peer in peers], tag, AMPLE_S
        )
        exchange.start()
        exchange.wait()
        exchange.close()
        for peer in peers:
            assert transport.read(into[peer], AMPLE_S) == values(nbytes, 100 * peer + transport.rank)
        assert transport.wire_bytes_sent - before == nbytes * len(peers)


def check_many_tags_sent_backwards(transport) -> None:
    following = (transport.rank + 1) % transport.size
    preceding = (transport.rank - 1) % transport.size
    first = transport.tags.take()
    exchanges, into = [], []
    for number in range(20):
        into.append(transport.empty(50_000))
        exchanges.append(
            transport.open(
                [Parcel(following, filled(transport, 50_000, number))],
                [Parcel(preceding, into[-1])],
                first + number,
                AMPLE_S,
            )
        )
    for exchange in reversed(exchanges):
        exchange.start()
    for exchange in exchanges:
        exchange.wait()
        exchange.close()
    for number, memory in enumerate(into):
        assert transport.read(memory, AMPLE_S) == values(50_000, number)


def check_slices(transport) -> None:
    memory = filled(transport, 100, 5)
    part = memory[32:48]
    assert transport.address(part) == transport.address(memory) + 32
    assert transport.read(part, AMPLE_S) == values(100, 5)[32:48]
    transport.write(part, bytes(range(16)))
    assert transport.read(memory, AMPLE_S) == values(100, 5)[:32] + bytes(range(16)) + values(100, 5)[48:]


def check_tag_ranges(transport) -> None:
    first, second = transport.tags.take(), transport.tags.take()
    assert abs(second - first) >= TAGS_PER_COMMUNICATOR
    assert transport.tags.meeting() != transport.tags.meeting()
    transport.tags.give_back(first)
    assert transport.tags.take() == first


def check_host(transport) -> None:
    host = transport.host
    assert (host.rank, host.size, host.host) == (transport.rank, transport.size, host)
    assert host.tags is transport.tags


CHECKS = [check_all_to_all, check_many_tags_sent_backwards, check_slices, check_tag_ranges, check_host]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_local(check, size):
    local.run(size, check)


def test_messages_with_one_tag_arrive_in_the_order_they_are_sent():
    def program(transport):
        if transport.rank == 0:
            for number in range(3):
                transport.open([Parcel(1, filled(transport, 48, number))], [], 7, AMPLE_S).start()
            return []
        into = [transport.empty(48) for _ in range(3)]
        exchanges = [transport.open([], [Parcel(0, memory)], 7, AMPLE_S) for memory in into]
        for exchange in exchanges:
            exchange.wait()
        return [transport.read(memory, AMPLE_S) for memory in into]

    assert local.run(2, program)[1] == [values(48, number) for number in range(3)]


def test_an_exchange_that_could_not_be_opened_takes_no_later_message():
    world = local.LocalWorld(2)
    sender, receiver = world.transport(0), world.transport(1)
    sender.open([Parcel(1, filled(sender, 10, 0), 1)], [], 7, AMPLE_S).start()
    with pytest.raises(TransportError, match="sent 10 bytes where rank 1 expected 16"):
        receiver.open([], [Parcel(0, receiver.empty(48), 0), Parcel(0, receiver.empty(16), 1)], 7, AMPLE_S)
    memory = receiver.empty(48)
    exchange = receiver.open([], [Parcel(0, memory, 0)], 7, AMPLE_S)
    sender.open([Parcel(1, filled(sender, 48, 3), 0)], [], 7, AMPLE_S).start()
    exchange.wait()

    assert receiver.read(memory, AMPLE_S) == values(48, 3)


def over_gloo(check, size: int) -> None:
    import torch.distributed as dist

    from zcomm.transports.torch_dist import TorchTransport

    group = dist.new_group(list(range(size)))
    if dist.get_rank() < size:
        check(TorchTransport(group))


def over_batches(check, size: int) -> None:
    """As other backends than gloo do it: one grouped batch per step."""
    import torch.distributed as dist

    from zcomm.transports.torch_dist import TorchTransport

    group = dist.new_group(list(range(size)))
    if dist.get_rank() < size:
        transport = TorchTransport(group)
        transport._eager = False
        check(transport)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gloo(torch_world, check, size):
    torch_world.run(over_gloo, check, size)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gloo_in_batches(torch_world, check, size):
    torch_world.run(over_batches, check, size)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_nccl(check, size, seed):
    def program(nccl):
        with cuda.module.cuda.Stream():
            check(NcclTransport(nccl))

    with FakeCuda(seed) as cuda:
        cuda.run(size, program)


def test_a_silent_peer_is_named_after_the_timeout():
    def program(transport):
        if transport.rank == 1:
            return
        exchange = transport.open([], [Parcel(1, transport.empty(10))], 0, 0.2)
        exchange.start()
        started = time.monotonic()
        with pytest.raises(PeerTimeout, match="rank 1"):
            exchange.wait()
        assert time.monotonic() - started > 0.1

    local.run(2, program)


def test_a_rank_that_fails_is_named_to_the_others():
    told = []

    def program(transport):
        if transport.rank == 2:
            raise ZeroDivisionError("on purpose")
        exchange = transport.open([], [Parcel(2, transport.empty(10))], 0, AMPLE_S)
        try:
            exchange.wait()
        except TransportError as error:
            told.append(str(error))

    with pytest.raises(ZeroDivisionError):
        local.run(3, program)
    assert len(told) == 2
    assert all("rank 2 failed" in message for message in told)


def test_a_message_of_another_length_is_an_error_not_a_crash():
    def program(transport):
        peer = 1 - transport.rank
        exchange = transport.open(
            [Parcel(peer, transport.empty(10 + transport.rank))], [Parcel(peer, transport.empty(10))], 0, AMPLE_S
        )
        exchange.start()
        exchange.wait()

    with pytest.raises(TransportError, match="expected 10"):
        local.run(2, program)


@pytest.mark.parametrize("group", ["world", 3.5, object()])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(GroupError, match="expected"):
        open_transport(group)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_world_without_ranks_is_refused(size):
    with pytest.raises(GroupError):
        local.run(size, lambda transport: None)
