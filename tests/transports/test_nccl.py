"""Collectives over NCCL and streams: whatever order a GPU does things in, results are the definition's.

The GPUs are tests/fake_cuda.py: they do everything late, in an order drawn from a seed, and memory that is let go is
overwritten. test_every_transport.py compares NCCL with the other transports; here is what is the GPU's own.
"""

from __future__ import annotations

import threading
import types
from typing import Any

import numpy as np
import oracle
import pytest
from fake_cuda import FakeCuda, fake_gpus
from fake_cuda_machine import Kernel
from impatience import shorten

import zcomm
from zcomm import Communicator, Plan, Topology, streams
from zcomm.engines import select
from zcomm.errors import BufferError, GroupError, MismatchError, PeerTimeout, TransportError
from zcomm.transports.nccl import NcclTransport
from zcomm.transports.open import open_transport

F32 = np.dtype(np.float32)
PLAN = Plan("int8", chunk_elems=500, one_shot_bytes=0)
PLACEMENTS = {
    "3 flat": (Topology(nodes=1, ranks_per_node=3), None),
    "2x2": (Topology(nodes=2, ranks_per_node=2), Topology(nodes=2, ranks_per_node=2)),
    "2+1": (Topology(node_of_rank=(0, 0, 1)), Topology(node_of_rank=(0, 0, 1))),
}


@pytest.fixture
def cuda(request, monkeypatch):
    """GPUs whose order is drawn from the parameter, or from 0."""
    with fake_gpus(monkeypatch, getattr(request, "param", 0), select.engine_named("native")) as gpus:
        yield gpus


def seeds(count: int):
    return pytest.mark.parametrize("cuda", range(count), indirect=True, ids=lambda seed: f"order {seed}")


@seeds(6)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_order_of_a_gpu_gives_the_definition(placement, cuda):
    topology, levels = PLACEMENTS[placement]
    size, rounds = topology.size, 5
    inputs = [[oracle.values(10 * i + rank, 3001 + i, F32) for i in range(rounds)] for rank in range(size)]
    wholes = [oracle.values(90 + rank, 1031 * size, F32) for rank in range(size)]

    def program(nccl):
        with Communicator(nccl, PLAN, topology) as comm, cuda.module.cuda.Stream():
            xs = [cuda.asarray(x) for x in inputs[comm.rank]]
            works = [comm.all_reduce(x, "avg", async_op=True) for x in xs]
            mine = cuda.module.empty(1031)
            comm.reduce_scatter_single(mine, cuda.asarray(wholes[comm.rank]))
            everyones = cuda.module.empty(1031 * size)
            comm.all_gather_single(everyones, mine)  # what the call before it wrote
            for work in reversed(works):
                work.wait()
            return [x.get() for x in xs], mine.get(), everyones.get()

    results = cuda.run(size, program)

    int8 = zcomm.codec("int8")
    shards = oracle.reduce_scatter(int8, int8, wholes, levels, "SUM")
    gathered = oracle.all_gather(int8, shards).tobytes()
    for i in range(rounds):
        expected = oracle.all_reduce(int8, int8, [x[i] for x in inputs], levels, "AVG").tobytes()
        assert all(xs[i].tobytes() == expected for xs, _, _ in results)
    for rank, (_, mine, everyones) in enumerate(results):
        assert mine.tobytes() == shards[rank].tobytes()
        assert everyones.tobytes() == gathered


@seeds(6)
def test_memory_that_the_caller_lets_go_lives_until_the_gpu_is_done(cuda):
    inputs = [oracle.values(rank, 3001, F32) for rank in range(2)]

    def program(nccl):
        with Communicator(nccl, PLAN) as comm, cuda.module.cuda.Stream():
            outs = [cuda.module.empty(2 * 3001) for _ in range(4)]
            for out in outs:  # inputs and works are dropped; what is let go is overwritten in the caller's order
                comm.all_gather_single(out, cuda.asarray(inputs[comm.rank]), async_op=True)
            comm.all_reduce(cuda.asarray(inputs[comm.rank]), async_op=True)
            comm.all_reduce_coalesced([cuda.asarray(x) for x in np.split(inputs[comm.rank], [7])], async_op=True)
            comm.all_reduce(cuda.asarray(inputs[comm.rank])[::2], async_op=True)
            last = cuda.asarray(inputs[comm.rank])
            comm.all_reduce(last)  # behind the others, on the lane
            return last.get(), [out.get() for out in outs]

    results = cuda.run(2, program)

    int8 = zcomm.codec("int8")
    total = oracle.all_reduce(int8, int8, inputs, None, "SUM").tobytes()
    gathered = oracle.all_gather(int8, inputs).tobytes()
    for last, outs in results:
        assert last.tobytes() == total
        assert all(out.tobytes() == gathered for out in outs)


@seeds(3)
def test_strided_arrays_lists_and_messages(cuda):
    size = 3
    squares = [oracle.values(rank, 40 * 30, F32).reshape(40, 30) for rank in range(size)]
    lists = [[oracle.values(5 * i + rank, n, F32) for i, n in enumerate((7, 1, 800))] for rank in range(size)]

    def program(nccl):
        with Communicator(nccl, "int8") as comm, cuda.module.cuda.Stream():
            square = cuda.asarray(squares[comm.rank])
            comm.all_reduce(square[:, ::2], "avg")
            several = [cuda.asarray(x) for x in lists[comm.rank]]
            comm.all_reduce_coalesced(several)
            came = cuda.module.empty(7)
            if comm.rank == 0:
                comm.send(cuda.asarray(lists[0][0]), 1, "raw")  # written on the caller's stream just before
            elif comm.rank == 1:
                work = comm.recv(came, 0, "raw", async_op=True)
                work.wait()
            return square.get(), [x.get() for x in several], came.get()

    results = cuda.run(size, program)

    int8 = zcomm.codec("int8")
    half = [np.ascontiguousarray(square[:, ::2]).reshape(-1) for square in squares]
    expected = oracle.one_shot_all_reduce(int8, half, "AVG").reshape(40, 15)
    joined = oracle.one_shot_all_reduce(int8, [np.concatenate(xs) for xs in lists], "SUM")
    for rank, (square, several, _) in enumerate(results):
        assert square[:, ::2].tobytes() == expected.tobytes()
        assert square[:, 1::2].tobytes() == squares[rank][:, 1::2].tobytes()  # what the view left out
        assert np.concatenate(several).tobytes() == joined.tobytes()
    assert results[1][2].tobytes() == lists[0][0].tobytes()


def test_the_host_waits_for_cards_only(cuda, monkeypatch):
    here, plain = threading.local(), streams.Mark.settle

    def counted(self: Any, *args: Any) -> None:
        here.waits = getattr(here, "waits", 0) + 1
        plain(self, *args)

    monkeypatch.setattr(streams.Mark, "settle", counted)

    def program(nccl):
        with Communicator(nccl, PLAN) as comm:
            waits = [here.waits]
            x = cuda.asarray(np.ones(5000, np.float32))
            for _ in range(4):
                comm.all_reduce(x)
                waits.append(here.waits)
            works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
            waits.append(here.waits)
            return waits

    for waits in cuda.run(2, program):
        assert waits == [1, 2, 2, 2, 2, 2]  # at the making, and before the first call of its kind


@seeds(3)
def test_the_default_stream_of_another_device_than_the_current_one(cuda):
    def program(nccl):
        with Communicator(nccl, "raw") as comm:
            x = cuda.asarray(np.full(3001, comm.rank + 1, np.float32))
            with cuda.module.cuda.Device(7):  # the program's own affair
                comm.all_reduce(x)
                work = comm.all_reduce(x, async_op=True)
                work.wait()
            return x.get()

    for x in cuda.run(2, program):
        assert (x == 6).all()


def test_ranks_that_call_differently_are_told_and_may_go_on(cuda):
    def program(nccl):
        with Communicator(nccl) as comm:
            with pytest.raises(MismatchError, match="rank 1 has count 101, rank 0 has 100"):
                comm.all_reduce(cuda.asarray(np.ones(100 + (comm.rank == 1), np.float32)))
            x = cuda.asarray(np.full(10, comm.rank, np.float32))
            comm.all_reduce(x, codec="raw")
            return x.get().tolist()

    assert cuda.run(3, program) == [[3.0] * 10] * 3


def test_a_rank_that_does_not_come_is_noticed_in_time(cuda):
    def program(nccl):
        if nccl.rank_id() == 0:
            with pytest.raises(PeerTimeout, match=r"not every rank's bytes came.*comm\.abort\(\).*within 0\.2 s"):
                Communicator(nccl, Plan(timeout_s=0.2))

    cuda.run(2, program)


def test_a_work_whose_peer_does_not_come_is_not_complete(cuda):
    given_up = threading.Event()

    def program(nccl):
        with Communicator(nccl, Plan("raw", check="never")) as comm:
            x = cuda.asarray(np.ones(100, np.float32))
            if comm.rank == 0:
                work = comm.all_reduce(x, async_op=True)
                assert not work.is_completed()
                with pytest.raises(PeerTimeout, match=r"within 0\.2 s"):
                    work.wait(timeout_s=0.2)
                given_up.set()
                work.wait(timeout_s=60)
                assert work.is_completed()
            else:
                assert given_up.wait(60)
                comm.all_reduce(x)
            return x.get().tolist()

    assert cuda.run(2, program) == [[2.0] * 100] * 2


def test_closing_gives_up_on_a_peer_that_does_not_come(cuda):
    def program(nccl):
        comm = Communicator(nccl, Plan("int8", check="never"))
        if comm.rank == 0:
            comm.all_reduce(cuda.asarray(np.ones(100, np.float32)))
            shorten(comm, 0.2)
            with pytest.raises(PeerTimeout, match=r"what the communicator queued within 0\.2 s"):
                comm.close()

    cuda.run(2, program)


def test_an_error_of_nccl_names_the_way_out(cuda):
    def program(nccl):
        with Communicator(nccl, Plan(check="never")) as comm:
            nccl.error = cuda.module.cuda.nccl.NcclError(6)
            with pytest.raises(TransportError, match=r"all_reduce number 1 on rank . .*comm\.abort\(\)"):
                comm.all_reduce(cuda.asarray(np.ones(10, np.float32)))
            nccl.error = cuda.module.cuda.nccl.NcclError(7)  # in progress: no error
            NcclTransport(nccl).check()

    cuda.run(2, program)


@pytest.mark.parametrize("op", ["sum", "avg", zcomm.premul_sum(0.5)])
def test_one_rank_gets_its_own_values_back(op, cuda):
    x = oracle.values(0, 333, F32)
    factor = np.float32(0.5) if op == zcomm.premul_sum(0.5) else np.float32(1)

    def program(nccl):
        with Communicator(nccl, "int4") as comm:
            reduced, gathered = cuda.asarray(x), cuda.module.empty(333)
            comm.all_reduce(reduced, op)
            comm.all_gather_single(gathered, cuda.asarray(x), async_op=True).wait()
            assert nccl.n_sent == 0
            return reduced.get(), gathered.get()

    ((reduced, gathered),) = cuda.run(1, program)

    assert reduced.tobytes() == (x * factor).tobytes()
    assert gathered.tobytes() == x.tobytes()


def test_what_does_not_fit_is_refused_before_anything_is_queued(cuda):
    def program(nccl):
        with Communicator(nccl) as comm:
            own = f"cuda:{comm.rank}"
            with pytest.raises(BufferError, match=f"tensor is on cpu, but this group moves bytes on {own}"):
                comm.all_reduce(np.ones(10, np.float32))
            with cuda.module.cuda.Device(5), pytest.raises(BufferError, match="tensor is on cuda:5"):
                comm.all_reduce(cuda.asarray(np.ones(10, np.float32)))
            with pytest.raises(BufferError, match=f"is on {own}, not on cuda:7"):
                open_transport(nccl, "cuda:7")
            assert open_transport(nccl, own).device == own
            before = nccl.n_groups
        assert nccl.n_groups == before
        with pytest.raises(GroupError, match="closed"):
            comm.all_reduce(cuda.asarray(np.ones(10, np.float32)))

    cuda.run(2, program)


def test_what_is_no_nccl_communicator_is_refused(cuda):
    class NCCLBackend:
        __module__ = "cupyx.distributed._nccl_comm"

    with pytest.raises(GroupError, match=r"expected the cupy\.cuda\.nccl\.NcclCommunicator itself"):
        open_transport(NCCLBackend())
    with pytest.raises(GroupError, match="got a int"):
        NcclTransport(3)


def test_a_torch_tensor_s_stream_is_torch_s(monkeypatch):
    """The lane follows and leads torch's current stream, and is torch's current stream while a call is queued."""
    with FakeCuda() as cuda, cuda.module.cuda.Device(0):
        machine, own = cuda.machine, cuda.module.cuda.Stream()
        torch = types.SimpleNamespace(cuda=types.SimpleNamespace())
        torch.cuda.is_initialized = lambda: True
        torch.cuda.stack = [own.ptr]
        torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=torch.cuda.stack[-1])
        torch.cuda.ExternalStream = lambda ptr, device: types.SimpleNamespace(cuda_stream=ptr)
        torch.cuda.stream = lambda stream: _Pushed(torch.cuda.stack, stream.cuda_stream)
        monkeypatch.setitem(streams.sys.modules, "torch", torch)
        recorded: list[int] = []
        tensor = types.SimpleNamespace(
            data_ptr=lambda: 0, record_stream=lambda stream: recorded.append(stream.cuda_stream)
        )
        lane, order = streams.Lane("cuda:0"), []

        machine.queue(own.ptr, Kernel(lambda: order.append("before")))
        lane.follow(tensor)
        with lane.entered():
            assert torch.cuda.stack[-1] == streams.current_stream(0, False) == lane.stream.ptr
            machine.queue(lane.stream.ptr, Kernel(lambda: order.append("call")))
            gate = lane.gate(tensor)
        assert torch.cuda.stack == [own.ptr]
        gate.lead()
        machine.queue(own.ptr, Kernel(lambda: order.append("after")))
        own.synchronize()

        assert order == ["before", "call", "after"]
        assert recorded == [lane.stream.ptr]  # torch's allocator keeps the memory meanwhile
        lane.close(10.0)


class _Pushed:
    def __init__(self, stack: list[int], value: int) -> None:
        self.stack, self.value = stack, value

    def __enter__(self) -> None:
        self.stack.append(self.value)

    def __exit__(self, *_: object) -> None:
        self.stack.pop()
