"""The program of test_every_transport.py on real GPUs: NCCL through torch and through cupy, and ranks that share one.

Not yet run on a GPU. With one GPU: ranks as threads over one_gpu_nccl.py, a world of one rank, a rank that sends to
itself. With as many GPUs as ranks: both NCCL faces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "collectives"))

from fake_cuda import fake_gpus
from one_gpu_nccl import OneGpu
from test_every_transport import WORLDS, Arrays, Counter, Told, on_local, program

import zcomm
from zcomm import Communicator
from zcomm.engines import select
from zcomm.transports.nccl import NcclTransport
from zcomm.transports.transport import Parcel


def on_one_gpu(cupy: Any, world: str) -> list[Told]:
    """Every rank a thread on cuda:0."""
    shared = OneGpu(cupy, WORLDS[world].size)

    def main(comm: Any) -> Told:
        count = Counter()
        count.total = lambda: (comm.nbytes_sent, comm.n_sent)  # type: ignore[method-assign]
        transport = NcclTransport(comm)
        transport.nccl = shared
        with cupy.cuda.Stream(non_blocking=True):
            return program(transport, WORLDS[world], Arrays(cupy.asarray, cupy.asnumpy), count)

    return shared.run(main)


def check(told: list[Told], world: str) -> None:
    """Results and counts are those of local threads."""
    for here, there in zip(told[: WORLDS[world].size], on_local(world), strict=True):
        assert here.results == there.results
        assert here.sent == there.sent
        assert (here.by_transport, here.by_backend) == there[2:4]


@pytest.mark.parametrize("world", WORLDS)
def test_the_stand_in_for_nccl_is_right(world, monkeypatch):
    with fake_gpus(monkeypatch, len(world), select.engine_named("native")) as cuda:
        check(on_one_gpu(cuda.module, world), world)


@pytest.mark.gpu
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_on_one_gpu_give_what_threads_give(world):
    check(on_one_gpu(pytest.importorskip("cupy"), world), world)


# ---- NCCL itself: a process and a GPU for each rank


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Four processes; rank r will use cuda:r."""
    pytest.importorskip("torch")
    needs(2)
    from torch_world import TorchWorld

    world = TorchWorld(4)
    yield world
    world.close()


def needs(n_gpus: int) -> None:
    n_found = pytest.importorskip("cupy").cuda.runtime.getDeviceCount()
    if n_found < n_gpus:
        pytest.skip(f"needs {n_gpus} GPUs, this machine has {n_found}")


def rank_of_torch(world: str, backend: str) -> Told | None:
    import torch
    import torch.distributed as dist

    from zcomm.transports.torch_dist import TorchTransport

    topology, count = WORLDS[world], Counter()
    if dist.get_rank() < topology.size:
        torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(list(range(topology.size)), backend=backend)
    if dist.get_rank() >= topology.size:
        return None
    transport = TorchTransport(group)
    assert (transport.device, transport.queued) == (f"cuda:{dist.get_rank()}", True)
    assert (transport.host is transport) == (backend == "nccl")
    count.total = lambda: (transport.wire_bytes_sent, 0)  # type: ignore[method-assign]
    arrays = Arrays(lambda x: torch.from_numpy(x.copy()).cuda(), lambda x: x.cpu().numpy())
    with torch.cuda.stream(torch.cuda.Stream()):
        return program(transport, topology, arrays, count)


def rank_of_cupy(world: str, unique_id: tuple[int, ...]) -> Told | None:
    import cupy
    import torch.distributed as dist
    from cupy.cuda import nccl

    topology, count, rank = WORLDS[world], Counter(), dist.get_rank()
    if rank >= topology.size:
        return None
    with cupy.cuda.Device(rank):
        comm = nccl.NcclCommunicator(topology.size, unique_id, rank)
        transport = NcclTransport(comm)
        count.total = lambda: (transport.wire_bytes_sent, 0)  # type: ignore[method-assign]
        with cupy.cuda.Stream(non_blocking=True):
            return program(transport, topology, Arrays(cupy.asarray, cupy.asnumpy), count)


@pytest.mark.gpu
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_through_torch_gives_what_threads_give(processes, backend, world):
    needs(WORLDS[world].size)
    check(processes.run(rank_of_torch, world, backend), world)


@pytest.mark.gpu
@pytest.mark.parametrize("world", WORLDS)
def test_nccl_through_cupy_gives_what_threads_give(processes, world):
    needs(WORLDS[world].size)
    from cupy.cuda import nccl

    check(processes.run(rank_of_cupy, world, nccl.get_unique_id()), world)


@pytest.fixture
def alone() -> Any:
    """An NCCL communicator of one rank."""
    nccl = pytest.importorskip("cupy.cuda.nccl")
    return nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)


@pytest.mark.gpu
def test_a_rank_may_send_to_itself(alone):
    import cupy

    transport = NcclTransport(alone)
    data = np.random.default_rng(3).integers(0, 256, 100_001, dtype=np.uint8).tobytes()
    with cupy.cuda.Stream(non_blocking=True):
        out, into = transport.empty(len(data)), transport.empty(len(data))
        transport.write(out, data)
        exchange = transport.open([Parcel(0, out)], [Parcel(0, into)], 0, 20.0)
        exchange.start()
        exchange.wait()
        exchange.close()
        assert transport.read(into, 20.0) == data


@pytest.mark.gpu
def test_a_call_is_queued_behind_the_caller_s_stream_and_before_what_follows(alone):
    torch = pytest.importorskip("torch")
    x = torch.zeros(1 << 20, device="cuda")
    with Communicator(alone) as comm:
        comm.all_reduce(x, zcomm.premul_sum(0.5))  # compiled and loaded
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)
            x.fill_(3.0)
            work = comm.all_reduce(x, zcomm.premul_sum(0.5), async_op=True)
            assert not work.is_completed()  # the host went on
            work.wait()
            x.add_(1.0)
            assert x.cpu().eq(2.5).all()
        assert work.is_completed()
