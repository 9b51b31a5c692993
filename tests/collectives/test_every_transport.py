"""One program of collectives on every transport there is: the same bytes come back, and the same bytes are sent.

Over local threads, gloo, gloo in NCCL's form (batches), MPI, MPI with GPU memory (staged and GPU-aware), and NCCL. The
GPUs are tests/fake_cuda.py here; tests/transports/test_nccl_gpu.py runs the same program on real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from fake_cuda import FakeCuda, QueuedEngine, fake_gpus

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.engines import select

WORLDS = {
    "2 flat": Topology(nodes=1, ranks_per_node=2),
    "3 flat": Topology(nodes=1, ranks_per_node=3),
    "2x2": Topology(nodes=2, ranks_per_node=2),
    "2+1": Topology(node_of_rank=(0, 0, 1)),
}
CODECS = ("raw", "fp16", "int8", "int4:64")
SIZES = (1, 1031, 4096)
TRANSPORTS = ("gloo", "gloo in batches", "nccl through torch", "nccl", "mpi", "mpi staged", "mpi gpu_aware")


class Told(NamedTuple):
    """What one rank has to show."""

    results: dict[tuple[str, str, int], bytes]  # (collective, codec, count) -> elements of the result
    sent: dict[str, tuple[int, int, int]]  # collective -> calls, bytes inside the node, bytes to other nodes
    by_transport: int  # bytes, as the transport counted them
    by_backend: int  # bytes that the library under it was handed
    n_messages: int  # and in how many messages


class Arrays(NamedTuple):
    """How numpy's arrays become those of a transport, and back."""

    to: Callable[[np.ndarray], Any] = np.array
    back: Callable[[Any], np.ndarray] = np.asarray


def program(transport: Any, topology: Topology, arrays: Arrays, count: Counter) -> Told:
    """Every collective, on values that depend on rank and place."""
    plan = Plan(chunk_elems=1500, check="never", one_shot_bytes=2000)
    with Communicator(transport, plan, topology) as comm:
        before, begun = transport.wire_bytes_sent, count.total()
        results = {
            (name, codec, n): result
            for codec in CODECS
            for n in SIZES
            for name, result in collectives(comm, codec, n, arrays).items()
        }
        sent = {
            name: (stats.calls, stats.wire_bytes_intra, stats.wire_bytes_inter) for name, stats in comm.stats().items()
        }
        nbytes, n_messages = (now - then for now, then in zip(count.total(), begun, strict=True))
        return Told(results, sent, transport.wire_bytes_sent - before, nbytes, n_messages)


def collectives(comm: Communicator, codec: str, n: int, arrays: Arrays) -> dict[str, bytes]:
    """The result of each on this rank."""
    rank, size = comm.rank, comm.size
    to, back = arrays
    mine, whole = oracle.values(rank, n, F32), oracle.values(10 + rank, n * size, F32)
    found: dict[str, Any] = {name: to(mine) for name in ("all_reduce", "broadcast", "reduce", "in flight", "sent on")}
    comm.all_reduce(found["all_reduce"], "avg", codec)
    comm.broadcast(found["broadcast"], size - 1, codec)
    comm.reduce(found["reduce"], 1, zcomm.premul_sum(0.375), codec)
    for name, n_elems in (("all_gather", n * size), ("reduce_scatter", n), ("all_to_all", n * size)):
        found[name] = to(np.full(n_elems, np.nan, np.float32))
    comm.all_gather_single(found["all_gather"], to(mine), codec)
    comm.reduce_scatter_single(found["reduce_scatter"], to(whole), "sum", codec)
    comm.all_to_all_single(found["all_to_all"], to(whole), codec=codec)

    table = [[(3 * source + 5 * target) % 4 * n // 3 for target in range(size)] for source in range(size)]  # some none
    sends, receives = table[rank], [row[rank] for row in table]
    for name, n_elems in (("uneven all_to_all", sum(receives)), ("elsewhere", n), ("scatter", rank * n)):
        found[name] = to(np.full(n_elems, np.nan, np.float32))
    source = to(oracle.values(30 + rank, sum(sends), F32))
    comm.all_to_all_single(found["uneven all_to_all"], source, receives, sends, codec)
    comm.all_reduce(to(mine), "sum", codec, output=found["elsewhere"])
    counts, root = [each * n for each in range(size)], size - 1
    if rank == root:
        found["gather"] = to(np.full(sum(counts), np.nan, np.float32))
    at_root = {"counts": counts} if rank == root else {}
    comm.gather_single(found.get("gather"), to(oracle.values(40 + rank, rank * n, F32)), root, codec, **at_root)
    from_root = to(oracle.values(50, sum(counts), F32)) if rank == root else None
    comm.scatter_single(found["scatter"], from_root, root, codec, **at_root)

    following, preceding = (rank + 1) % size, (rank - 1) % size
    for sends in (rank % 2 == 0, rank % 2 == 1):  # NCCL wants one of a pair to send while the other receives
        if sends:
            comm.send(to(mine), following, codec)
        else:
            comm.recv(found["sent on"], preceding, codec)

    residual, found["with feedback"] = zcomm.Feedback(beta=0.8).of("x"), to(mine)
    for step in range(2):
        comm.all_reduce(to(oracle.values(60 + rank + step, n, F32)), "avg", codec, feedback=residual)
    comm.all_reduce(found["with feedback"], "avg", codec, feedback=residual)

    flights = [found["in flight"], *(to(oracle.values(20 + rank + i, n + i, F32)) for i in range(3))]
    works = [comm.all_reduce(x, "sum", codec, async_op=True) for x in flights]
    for work in reversed(works):
        assert work is not None
        work.wait()
    found["in flight"] = flights[-1]
    return {name: back(x).tobytes() for name, x in found.items()}


F32 = np.dtype(np.float32)


# ---- who counts what the library under a transport is handed


class Counter:
    """Bytes and messages."""

    def __init__(self) -> None:
        self.nbytes = self.n_messages = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.n_messages += 1

    def total(self) -> tuple[int, int]:
        return self.nbytes, self.n_messages


class Counted:
    """Another object, whose method of this name is counted."""

    def __init__(self, inner: Any, name: str, count: Counter, nbytes_of: Callable[..., int]) -> None:
        self._inner = inner

        def counted(*args: Any, **more: Any) -> Any:
            count.add(nbytes_of(*args))
            return getattr(inner, name)(*args, **more)

        setattr(self, name, counted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# ---- the ranks of each transport; functions of processes are found by their names


def on_local(world: str) -> list[Told]:
    def main(transport: local.LocalTransport) -> Told:
        count = Counter()
        inner = transport.open

        def counted(outgoing: Any, incoming: Any, tag: int, timeout_s: float | None) -> Any:
            for parcel in outgoing:
                count.add(parcel.payload.size)
            return inner(outgoing, incoming, tag, timeout_s)

        transport.open = counted  # type: ignore[method-assign]
        return program(transport, WORLDS[world], Arrays(), count)

    return local.run(WORLDS[world].size, main)


def rank_of_gloo(world: str, form: str) -> Told | None:
    import torch
    import torch.distributed as dist

    from zcomm.transports.torch_dist import TorchTransport

    topology, count = WORLDS[world], Counter()
    group = dist.new_group(list(range(topology.size)))
    if dist.get_rank() >= topology.size:
        return None

    class CountedTransport(TorchTransport):
        @property
        def group_in_use(self) -> Any:
            inner = super().group_in_use
            if not self._eager:
                return inner
            return Counted(inner, "send", count, lambda tensors, peer, tag: tensors[0].numel())

        @property
        def host(self) -> TorchTransport:
            return CountedTransport(group, "cpu") if self.queued else self

    plain, transport = dist.batch_isend_irecv, CountedTransport(group)

    def counted(batch: list[Any]) -> Any:
        for each in batch:
            if each.op is dist.isend:
                count.add(each.tensor.numel())
        return plain(batch)

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, dist, "batch_isend_irecv", plain)
        dist.batch_isend_irecv = counted
        transport._eager = form == "gloo"
        arrays = Arrays(lambda x: torch.from_numpy(x.copy()), lambda x: x.numpy())
        if form == "nccl through torch":
            arrays = as_if_nccl(transport, stack, dist.get_rank())
        return program(transport, topology, arrays, count)


def as_if_nccl(transport: Any, stack: contextlib.ExitStack, seed: int) -> Arrays:
    """Let a transport over gloo take its memory for a GPU's: a batch waits for the current stream, as NCCL does."""
    import torch
    import torch.distributed as dist

    cuda = stack.enter_context(FakeCuda(seed))
    stack.enter_context(cuda.module.cuda.Stream())
    use_queued_engine(cuda, stack)
    counted = dist.batch_isend_irecv

    def in_order(batch: list[Any]) -> Any:
        cuda.module.cuda.get_current_stream().synchronize()
        return counted(batch)

    dist.batch_isend_irecv = in_order
    for name, value in (
        ("is_initialized", lambda: True),
        ("ExternalStream", lambda ptr, device: ptr),
        ("stream", lambda ptr: cuda.module.cuda.ExternalStream(ptr)),
    ):
        stack.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
        setattr(torch.cuda, name, value)
    transport.queued, transport.device = True, "cuda:0"
    return Arrays(cuda.asarray, lambda x: x.get())


def use_queued_engine(cuda: FakeCuda, stack: contextlib.ExitStack) -> None:
    """Let the engine of GPUs be the native one, done late."""
    stack.callback(setattr, select, "_cuda_engine", select._cuda_engine)
    engine = QueuedEngine(cuda.machine, select.engine_named("native"))
    select._cuda_engine = lambda index: engine


def rank_of_mpi(world: str, form: str) -> Told | None:
    from mpi4py import MPI

    from zcomm.transports.mpi import MpiTransport
    from zcomm.transports.mpi_device import MpiDeviceTransport

    topology, count = WORLDS[world], Counter()
    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < topology.size else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return None
    with contextlib.ExitStack() as stack:
        arrays = Arrays()
        if form == "mpi":
            transport = MpiTransport(part)
        else:
            cuda = stack.enter_context(FakeCuda(seed=MPI.COMM_WORLD.rank))
            use_queued_engine(cuda, stack)
            transport = MpiDeviceTransport(part, "cuda:0", gpu_aware=form == "mpi gpu_aware")
            arrays = Arrays(cuda.asarray, lambda x: x.get())
        plain = transport.comm
        transport.comm = Counted(plain, "Isend", count, lambda message, peer, tag: message[0].size)
        if form != "mpi":
            transport.host.comm = transport.comm
        try:
            return program(transport, topology, arrays, count)
        finally:
            transport.comm = plain
            transport.close()
            part.Free()


def on_nccl(world: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[Told]:
    from zcomm.transports.nccl import NcclTransport

    with fake_gpus(monkeypatch, seed, select.engine_named("native")) as cuda:

        def main(nccl: Any) -> Told:
            count = Counter()
            count.total = lambda: (nccl.nbytes_sent, nccl.n_sent)  # type: ignore[method-assign]
            with cuda.module.cuda.Stream():
                return program(NcclTransport(nccl), WORLDS[world], Arrays(cuda.asarray, lambda x: x.get()), count)

        return cuda.run(WORLDS[world].size, main)


@pytest.fixture(scope="module")
def by_local() -> dict[str, list[Told]]:
    return {world: on_local(world) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_gives_the_same_bytes_for_the_same_bytes(name, world, by_local, request, monkeypatch):
    if name == "nccl":
        told = on_nccl(world, monkeypatch, seed=len(world))
    elif name.startswith("mpi"):
        told = request.getfixturevalue("mpi_world").run(rank_of_mpi, world, name)
    else:
        told = request.getfixturevalue("torch_world").run(rank_of_gloo, world, name)

    for here, there in zip(told[: WORLDS[world].size], by_local[world], strict=True):
        assert here.results == there.results
        assert here.sent == there.sent
        assert (here.by_transport, here.by_backend, here.n_messages) == there[2:]


@pytest.mark.parametrize("world", WORLDS)
def test_replicas_are_equal_and_counts_are_true(world, by_local):
    told = by_local[world]

    for collective in ("all_reduce", "all_gather", "broadcast", "in flight", "with feedback"):
        for codec in CODECS:
            for n in SIZES:
                assert len({each.results[collective, codec, n] for each in told}) == 1, (collective, codec, n)
    for each in told:
        assert each.by_transport == each.by_backend == sum(intra + inter for _, intra, inter in each.sent.values())


@pytest.mark.parametrize("codec", CODECS)
def test_results_are_the_definition(codec, by_local):
    """What the others are compared with is right itself, in brief; test_collectives.py says it of every shape."""
    for world, topology in WORLDS.items():
        kind, size = zcomm.codec(codec).for_dtype(zcomm.buffers.DType.FLOAT32), topology.size
        for n in SIZES:
            mine = [oracle.values(rank, n, F32) for rank in range(size)]
            gathered = oracle.all_gather(kind, mine).tobytes()
            sent_on = oracle.through(kind, mine[size - 1]).tobytes()
            assert by_local[world][0].results["all_gather", codec, n] == gathered
            assert by_local[world][0].results["sent on", codec, n] == sent_on
            assert by_local[world][1].results["broadcast", codec, n] == sent_on
