"""The contract of transports over MPI, and what is MPI's own: pieces, small tags, threads, launchers that don't fit."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fake_cuda import FakeCuda
from impatience import AMPLE_S
from test_contract import CHECKS, check_all_to_all, check_many_tags_sent_backwards

from zcomm.errors import EngineError, GroupError, PeerTimeout, TransportError
from zcomm.transports.mpi_launcher import check_launcher
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR
from zcomm.transports.transport import Parcel


def transport_of(size: int):
    """A transport over the first ranks of the world, or None on the others."""
    from mpi4py import MPI

    from zcomm.transports.mpi import MpiTransport

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < size else MPI.UNDEFINED)
    return None if part == MPI.COMM_NULL else MpiTransport(part)


def over_mpi(check, size: int) -> None:
    transport = transport_of(size)
    if transport is not None:
        check(transport)
        assert not transport.under_way
        transport.close()
        transport.close()  # a second time does nothing


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_mpi(mpi_world, check, size):
    mpi_world.run(over_mpi, check, size)


def over_gpu_memory(check, size: int, gpu_aware: bool) -> None:
    from mpi4py import MPI

    from zcomm.transports.mpi_device import MpiDeviceTransport

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < size else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return
    with FakeCuda(seed=MPI.COMM_WORLD.rank) as cuda, cuda.module.cuda.Stream():
        transport = MpiDeviceTransport(part, "cuda:0", gpu_aware)
        check(transport)
        assert not transport.under_way
        transport.close()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("gpu_aware", [False, True], ids=["staged", "gpu_aware"])
def test_mpi_with_gpu_memory(mpi_world, check, size, gpu_aware):
    mpi_world.run(over_gpu_memory, check, size, gpu_aware)


def into_memory_in_use() -> None:
    from mpi4py import MPI

    from zcomm.transports.mpi_device import MpiDeviceTransport

    world = MPI.COMM_WORLD
    with FakeCuda(seed=world.rank) as cuda, cuda.module.cuda.Stream():
        transport = MpiDeviceTransport(world, "cuda:0", gpu_aware=True)
        memory, kept = transport.empty(100), cuda.module.empty(100, np.uint8)
        transport.write(memory, bytes([transport.rank] * 100))
        if transport.rank:
            exchange = transport.open([Parcel(0, memory)] if transport.rank == 1 else [], [], 5, AMPLE_S)
            exchange.start()
        world.Barrier()
        if transport.rank == 0:  # the message is there already; the GPU has yet to copy what was there before
            kept[...] = memory
            exchange = transport.open([], [Parcel(1, memory)], 5, AMPLE_S)
            exchange.start()
            exchange.wait()
            assert kept.get().tolist() == [0] * 100
            assert memory.get().tolist() == [1] * 100
        exchange.close()
        transport.close()


def test_mpi_writes_to_no_memory_that_the_gpu_still_reads(mpi_world):
    mpi_world.run(into_memory_in_use)


def without_a_gpu() -> None:
    from mpi4py import MPI

    from zcomm.transports.open import open_transport

    with FakeCuda(n_devices=1) as cuda:
        for device, complaint in (("cuda:1", "there is no cuda:1"), ("gpu", "expected 'cpu', or 'cuda:0'")):
            with pytest.raises(EngineError, match=complaint):
                open_transport(MPI.COMM_WORLD, device)
        transport = open_transport(MPI.COMM_WORLD, "cuda:0")
        assert (transport.gpu_aware, transport.name) == (False, "mpi, staged")  # this MPI says nothing of CUDA
        transport.close()
    del cuda


def test_a_gpu_that_is_not_there_is_refused_and_staging_is_the_default(mpi_world):
    mpi_world.run(without_a_gpu)


def in_pieces(piece_bytes: int, nbytes: int) -> None:
    transport = transport_of(3)
    if transport is None:
        return
    transport.piece_bytes = piece_bytes
    following, preceding = (transport.rank + 1) % 3, (transport.rank - 1) % 3
    out = np.random.default_rng(transport.rank).integers(0, 256, nbytes, dtype=np.uint8)
    into = [transport.empty(nbytes), transport.empty(nbytes)]
    exchange = transport.open(
        [Parcel(following, out), Parcel(following, out[::-1].copy())],  # two parcels to one peer keep their order
        [Parcel(preceding, into[0]), Parcel(preceding, into[1])],
        0,
        AMPLE_S,
    )
    exchange.start()
    exchange.wait()
    exchange.close()
    expected = np.random.default_rng(preceding).integers(0, 256, nbytes, dtype=np.uint8)
    assert into[0].tobytes() == expected.tobytes()
    assert into[1].tobytes() == expected[::-1].tobytes()
    assert transport.wire_bytes_sent == 2 * nbytes
    transport.close()


@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1001, 10_007])
@pytest.mark.parametrize("piece_bytes", [1000, 1 << 30])
def test_parcels_larger_than_a_piece_arrive_whole(mpi_world, nbytes, piece_bytes):
    mpi_world.run(in_pieces, piece_bytes, nbytes)


def pieces_are_counted() -> None:
    transport = transport_of(4)
    transport.piece_bytes = 1000
    cut = [piece.size for piece in transport.pieces(np.empty(10_007, np.uint8))]
    assert cut == [1000] * 10 + [7]
    assert [piece.size for piece in transport.pieces(np.empty(1000, np.uint8))] == [1000]
    transport.close()


def test_pieces_depend_on_the_parcel_alone(mpi_world):
    mpi_world.run(pieces_are_counted)


def with_small_tags(check) -> None:
    transport = transport_of(4)
    transport.tag_bits = 15  # MPI's least: 32767
    check(transport)
    first = transport.tags.take()
    steps = [first + (step << 10) + 1023 for step in range(1 << 14)]
    folded = [transport.fold(tag, 1000) for tag in steps]
    assert len(set(folded)) == len(folded)
    assert max(folded) <= 32767
    transport.close()


def numbered_in_the_upper_bits(transport) -> None:
    """As check_many_tags_sent_backwards, with tags as communicators take them."""
    following, preceding = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    first = transport.tags.take()
    into = [transport.empty(50 + number) for number in range(20)]
    exchanges = [
        transport.open(
            [Parcel(following, np.full(50 + number, number, np.uint8))],
            [Parcel(preceding, into[number])],
            first + (number << 10) + 77,
            AMPLE_S,
        )
        for number in range(20)
    ]
    for exchange in reversed(exchanges):
        exchange.start()
    for exchange in exchanges:
        exchange.wait()
        exchange.close()
    for number, memory in enumerate(into):
        assert (memory == number).all()


@pytest.mark.parametrize("check", [check_all_to_all, numbered_in_the_upper_bits])
def test_an_mpi_with_the_smallest_tags_keeps_steps_apart(mpi_world, check):
    mpi_world.run(with_small_tags, check)


def tags_that_fit() -> None:
    transport = transport_of(4)
    transport.tag_bits = 29
    assert transport.fold(5 * TAGS_PER_COMMUNICATOR + 123, 0) == 5 * TAGS_PER_COMMUNICATOR + 123
    assert transport.fold(33 * TAGS_PER_COMMUNICATOR + 123, 0) == TAGS_PER_COMMUNICATOR + 123
    assert transport.fold(1023 << 10, 1000) >> 10 == transport.fold(1023 << 10, 10_000_000) >> 10
    transport.close()


def test_tags_are_kept_where_they_fit(mpi_world):
    mpi_world.run(tags_that_fit)


def beside_the_program_s_own_messages() -> None:
    from mpi4py import MPI

    transport = transport_of(4)
    peer = transport.rank ^ 1
    mine = np.full(1000, 255, np.uint8)
    theirs = np.empty_like(mine)
    tag = transport.tags.take()
    sent = MPI.COMM_WORLD.Isend(mine, peer, tag)  # the same peer, tag and size as zcomm's below
    over_mpi_tag(transport, tag)
    MPI.COMM_WORLD.Recv(theirs, peer, tag)
    sent.Wait()
    assert (theirs == 255).all()
    transport.close()


def over_mpi_tag(transport, tag: int) -> None:
    peer = transport.rank ^ 1
    into = transport.empty(1000)
    exchange = transport.open([Parcel(peer, np.full(1000, 7, np.uint8))], [Parcel(peer, into)], tag, AMPLE_S)
    exchange.start()
    exchange.wait()
    exchange.close()
    assert (into == 7).all()


def test_the_program_s_own_messages_are_never_mixed_up(mpi_world):
    mpi_world.run(beside_the_program_s_own_messages)


def while_one_is_silent() -> str | None:
    from mpi4py import MPI

    transport = transport_of(4)
    if transport.rank != 2:
        into = transport.empty(10)
        exchange = transport.open([], [Parcel(2, into)], 0, 0.3)
        exchange.start()
        started = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"nothing came from rank 2 within 0\.3 s"):
            exchange.wait()
        assert time.monotonic() - started > 0.2
    MPI.COMM_WORLD.Barrier()
    transport.close()
    check_all_to_all(transport := transport_of(4))  # MPI itself goes on
    transport.close()


def test_a_silent_peer_is_named_after_the_timeout(mpi_world):
    mpi_world.run(while_one_is_silent)


def while_one_of_several_is_silent(silent: int) -> None:
    from mpi4py import MPI

    transport = transport_of(4)
    if transport.rank == 0:
        into = [transport.empty(100 + rank) for rank in range(4)]
        exchange = transport.open([], [Parcel(rank, into[rank]) for rank in (1, 2, 3)], 3, 0.3)
        exchange.start()
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(PeerTimeout, match=rf"nothing came from rank {silent} within 0\.3 s"):
            exchange.wait()
        assert [(memory == rank).all() for rank, memory in enumerate(into) if rank not in (0, silent)] == [True, True]
    else:
        if transport.rank != silent:
            payload = np.full(100 + transport.rank, transport.rank, np.uint8)
            exchange = transport.open([Parcel(0, payload)], [], 3, AMPLE_S)
            exchange.start()
            exchange.close()
        MPI.COMM_WORLD.Barrier()  # what will come has been sent
    MPI.COMM_WORLD.Barrier()
    transport.close()


@pytest.mark.parametrize("silent", [1, 2, 3])
def test_of_several_peers_the_silent_one_is_named(mpi_world, silent):
    mpi_world.run(while_one_of_several_is_silent, silent)


def of_another_length_under_the_same_tag(n_sent: int, complaint: str) -> None:
    from mpi4py import MPI

    transport = transport_of(3)
    if transport is None:
        return
    tag = transport.fold(7, 1000)
    if transport.rank:
        n_bytes = n_sent if transport.rank == 1 else 1000
        transport.comm.Send([np.full(n_bytes, transport.rank, np.uint8), MPI.BYTE], 0, tag)
    else:
        into = [np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)]
        exchange = transport.open([], [Parcel(1, into[0]), Parcel(2, into[1])], 7, AMPLE_S)
        exchange.start()
        with pytest.raises(TransportError, match=complaint):
            exchange.wait()
        assert transport.under_way == {exchange}
    transport.close()
    assert not transport.under_way


@pytest.mark.parametrize(
    ("n_sent", "complaint"),
    [
        (0, "rank 1 sent 0 bytes where 1000 were expected"),
        (999, "rank 1 sent 999 bytes where 1000 were expected"),
        (1001, "nothing came from rank 1 as agreed: "),
        (200_000, "nothing came from rank 1 as agreed: "),
    ],
)
def test_a_length_that_its_tag_does_not_tell_apart_is_an_error_that_names_the_sender(mpi_world, n_sent, complaint):
    mpi_world.run(of_another_length_under_the_same_tag, n_sent, complaint)


def after_the_end(late_s: float) -> None:
    """A message that comes when its receiver has given up and closed touches no memory and no later transport."""
    from mpi4py import MPI

    transport = transport_of(4)
    if transport.rank == 0:
        memory = np.full(100_000, 9, np.uint8)
        exchange = transport.open([], [Parcel(1, memory)], 0, 0.2)
        with pytest.raises(PeerTimeout):
            exchange.wait()
        transport.close()
        MPI.COMM_WORLD.Barrier()
        time.sleep(late_s)
        assert (memory == 9).all()
    else:
        MPI.COMM_WORLD.Barrier()
        if transport.rank == 1:
            transport.open([Parcel(0, np.zeros(100, np.uint8))], [], 0, 1.0).start()
        transport.close()
    check_many_tags_sent_backwards(transport := transport_of(4))
    transport.close()


def test_what_comes_too_late_is_called_off(mpi_world):
    mpi_world.run(after_the_end, 0.2)


def of_another_length(difference: int) -> None:
    transport = transport_of(2)
    if transport is None:
        return
    peer = 1 - transport.rank
    n_sent = 1000 + difference if transport.rank == 1 else 1000
    timeout_s = 1.0 if transport.rank == 0 else AMPLE_S  # tags hold lengths: what rank 0 is sent, it never receives
    exchange = transport.open(
        [Parcel(peer, transport.empty(n_sent))], [Parcel(peer, transport.empty(1000))], 0, timeout_s
    )
    exchange.start()
    if transport.rank == 0:
        with pytest.raises(TransportError, match="rank 1"):
            exchange.wait()
    else:
        exchange.wait()
    transport.close()


@pytest.mark.parametrize("difference", [-1, 1, -500, 100_000])
def test_a_message_of_another_length_is_an_error_not_a_crash(mpi_world, difference):
    mpi_world.run(of_another_length, difference)


def from_a_second_thread() -> None:
    import threading

    transport = transport_of(2)
    if transport is None:
        return
    transport.thread = threading.get_ident()  # as where MPI gives less than MPI_THREAD_MULTIPLE
    raised = []

    def call() -> None:
        try:
            transport.open([], [], 0, 1.0)
        except TransportError as error:
            raised.append(str(error))

    other = threading.Thread(target=call)
    other.start()
    other.join()
    assert "needs MPI_THREAD_MULTIPLE" in raised[0]
    transport.close()


def test_a_second_thread_is_refused_where_mpi_allows_one(mpi_world):
    mpi_world.run(from_a_second_thread)


def asynchronously_without_threads() -> None:
    from zcomm import Communicator
    from zcomm.transports.mpi import no_threads

    transport = transport_of(4)
    transport.why_synchronous = no_threads()  # as where MPI gives less than MPI_THREAD_MULTIPLE
    with Communicator(transport) as comm:
        x = np.full(100, comm.rank, np.float32)
        for name, call in (
            ("all_reduce", lambda: comm.all_reduce(x, codec="raw", async_op=True)),
            ("send", lambda: comm.send(x, comm.rank ^ 1, async_op=True)),
            ("recv", lambda: comm.recv(x, comm.rank ^ 1, async_op=True)),
        ):
            with pytest.raises(TransportError, match=f"{name}: asynchronous calls .* needs MPI_THREAD_MULTIPLE"):
                call()
        comm.all_reduce(x, codec="raw")  # goes on here
        assert (x == 6).all()
    transport.close()


def test_an_asynchronous_call_is_refused_at_once_where_mpi_allows_one_thread(mpi_world):
    mpi_world.run(asynchronously_without_threads)


def groups_that_cannot_be_used() -> None:
    from mpi4py import MPI

    from zcomm.transports.open import open_transport

    world = MPI.COMM_WORLD
    with pytest.raises(GroupError, match="COMM_NULL"):
        open_transport(MPI.COMM_NULL)
    half = world.Split(world.rank % 2)
    inter = half.Create_intercomm(0, world, 1 - world.rank % 2)
    with pytest.raises(GroupError, match="intercommunicator"):
        open_transport(inter)
    inter.Free()
    transport = open_transport(half)
    assert (transport.rank, transport.size) == (world.rank // 2, 2)
    transport.close()
    assert half.Get_size() == 2  # the caller's communicator stays
    half.Free()


def test_communicators_that_cannot_be_used_are_refused(mpi_world):
    mpi_world.run(groups_that_cannot_be_used)


@pytest.mark.parametrize(
    "variables",
    [{"PMI_SIZE": "4", "PMI_RANK": "0"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMIX_RANK": "3"}],
    ids=lambda variables: next(iter(variables)),
)
def test_a_launcher_that_does_not_fit_the_library_is_named_with_it(variables):
    with pytest.raises(GroupError, match=f"(?s){next(iter(variables))}=.*does not fit the library, MPICH 5.0.2"):
        check_launcher(1, "MPICH 5.0.2", variables)


@pytest.mark.parametrize("variables", [{}, {"PMI_SIZE": "1"}, {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}])
def test_a_world_of_one_that_was_started_as_one_is_fine(variables):
    check_launcher(1, "MPICH 5.0.2", variables)
    check_launcher(4, "MPICH 5.0.2", {"PMI_SIZE": "4"})
