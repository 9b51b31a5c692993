"""A cupy for tests without a GPU: streams do their work late, in any legal order, so that what was not ordered shows.

    with FakeCuda(seed=3) as cuda:        # sys.modules["cupy"] is this one inside
        cuda.run(4, program)              # program(comm) on each rank, a thread each, with a NcclCommunicator

Nothing is done when it is queued. Only where a thread waits (a copy to the host, a question whether an event has
passed) does the machine take steps, each on a stream chosen by chance among those that may go on. Memory is numpy's.
Memory that is let go is overwritten in the order of the stream that it was allocated on, as the next owner may do.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
from fake_cuda_machine import GARBAGE, Clique, Group, Kernel, Machine, Record, WaitFor

NOT_READY = 600


class FakeComm:
    """cupy.cuda.nccl.NcclCommunicator."""

    def __init__(self, machine: Machine, clique: Clique, rank: int) -> None:
        self.machine, self.clique, self.rank = machine, clique, rank
        self.order: collections.deque[Group] = collections.deque()
        self.n_groups = self.n_sent = self.nbytes_sent = 0
        self.error: BaseException | None = None

    def rank_id(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.clique.size

    def device_id(self) -> int:
        return self.rank

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self.nbytes_sent += count
        self.n_sent += 1
        self._add("send", address, count, datatype, peer, stream)

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._add("recv", address, count, datatype, peer, stream)

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _add(self, kind: str, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert datatype == 1, "uint8"
        assert 0 <= peer < self.clique.size
        assert peer != self.rank
        self.machine.here.group.append((self, stream, (kind, peer, address, count)))


FakeComm.__module__ = "cupy_backends.cuda.libs.nccl"


class Block:
    """Memory that goes back to its pool when nothing refers to it."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        self.machine = machine
        self.bytes = np.full(nbytes, GARBAGE, np.uint8)
        self.device, self.stream = machine.device, current(machine, machine.device)

    def __del__(self) -> None:
        machine, memory = self.machine, self.bytes

        def bury() -> None:
            memory.fill(GARBAGE)
            machine.graves.append(memory)

        machine.queue(self.stream, Kernel(bury), self.device)


class FakeArray:
    """cupy.ndarray, as far as zcomm and its tests use it."""

    def __init__(self, machine: Machine, view: np.ndarray, block: Block) -> None:
        self._machine, self._view, self._block = machine, view, block
        self.dtype, self.shape, self.size, self.strides = view.dtype, view.shape, view.size, view.strides
        self.flags, self.itemsize, self.ndim, self.nbytes = view.flags, view.itemsize, view.ndim, view.nbytes
        self.device = FakeDevice(machine, block.device)
        self.data = types.SimpleNamespace(ptr=view.__array_interface__["data"][0])
        self.__cuda_array_interface__ = view.__array_interface__ | {"version": 3}

    def __len__(self) -> int:
        return len(self._view)

    def reshape(self, *shape: Any) -> FakeArray:
        return self._like(self._view.reshape(*shape))

    def __getitem__(self, place: Any) -> FakeArray:
        if isinstance(place, int):  # numpy would copy the element at once
            return self._like(self._view[place : place + 1].reshape(self.shape[1:]))
        return self._like(self._view[place])

    def __setitem__(self, place: Any, value: Any) -> None:
        target = self._view[place]
        source = value._view if isinstance(value, FakeArray) else np.array(value)

        def work() -> None:  # holds the memory, but not as an owner: who lets go of it too early is caught
            target[...] = source

        self._queue(work)

    def fill(self, value: float) -> None:
        self[...] = value

    def __float__(self) -> float:
        return float(self.get())

    def copy(self, order: str = "C") -> FakeArray:
        return self.astype(self.dtype)

    def astype(self, dtype: Any) -> FakeArray:
        new = empty(self._machine, self.shape, dtype)
        new[...] = self
        return new

    def set(self, array: np.ndarray) -> None:
        self[...] = array.copy()

    def get(self) -> np.ndarray:
        found: list[np.ndarray] = []
        self._queue(lambda: found.append(self._view.copy()))
        self._machine.until(lambda: bool(found))
        return found[0]

    def _compute(self, ufunc: np.ufunc, *operands: Any, **more: Any) -> FakeArray:
        """Let an operation of numpy's write this array."""
        views = [each._view if isinstance(each, FakeArray) else each for each in operands]
        more = {name: each._view if isinstance(each, FakeArray) else each for name, each in more.items()}
        out = self._view

        def work() -> None:
            with np.errstate(all="ignore"):
                ufunc(*views, out=out, **more)

        self._queue(work)
        return self

    def _queue(self, work: Callable[[], Any]) -> None:
        device = self.device.id
        self._machine.queue(current(self._machine, device), Kernel(work), device)

    def _like(self, view: np.ndarray) -> FakeArray:
        return FakeArray(self._machine, view, self._block)


def empty(machine: Machine, shape: Any, dtype: Any) -> FakeArray:
    shape = (shape,) if np.ndim(shape) == 0 else shape
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = Block(machine, nbytes)
    return FakeArray(machine, block.bytes[:nbytes].view(dtype).reshape(shape), block)


def current(machine: Machine, device: int) -> int:
    """This thread's current stream of a device."""
    return getattr(machine.here, "streams", {}).get(device, 0)


class Pinned(bytearray):
    """Pinned host memory: overwritten when it is let go, as its next owner may do at once."""

    graves: list[Any] = []  # noqa: RUF012 - what copies that are still queued may touch stays allocated

    def __del__(self) -> None:
        np.frombuffer(self, np.uint8)[:] = GARBAGE
        Pinned.graves.append(self)


class FakeDevice:
    def __init__(self, machine: Machine, index: int) -> None:
        self.id = index
        self._machine = machine
        self._before: list[int] = []

    def __enter__(self) -> FakeDevice:
        self._stack().append(self._machine.device)
        self._machine.here.device = self.id
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.here.device = self._stack().pop()

    def use(self) -> None:
        self._machine.here.device = self.id

    def _stack(self) -> list[int]:
        if not hasattr(self._machine.here, "devices"):
            self._machine.here.devices = []
        return self._machine.here.devices


class FakeStream:
    def __init__(self, machine: Machine, ptr: int | None = None) -> None:
        self._machine, self._device = machine, machine.device
        self.ptr = machine.handle() if ptr is None else ptr

    def __enter__(self) -> FakeStream:
        here = self._machine.here
        here.streams = {} if not hasattr(here, "streams") else here.streams
        here.stack = [] if not hasattr(here, "stack") else here.stack
        here.stack.append((self._device, here.streams.get(self._device, 0)))
        here.streams[self._device] = self.ptr
        return self

    def __exit__(self, *_: object) -> None:
        device, before = self._machine.here.stack.pop()
        self._machine.here.streams[device] = before

    def synchronize(self) -> None:
        record = Record()
        self._machine.queue(self.ptr, record, self._device)
        self._machine.until(lambda: record.done)


class FakeCuda:
    """The module, and the ranks."""

    def __init__(self, seed: int = 0, n_devices: int = 8) -> None:
        self.machine = machine = Machine(seed)
        self.events: dict[int, Record] = {}
        self.cliques: dict[tuple[int, ...], Clique] = {}

        class NcclError(RuntimeError):
            def __init__(self, status: int) -> None:
                super().__init__(f"NCCL_ERROR {status}")
                self.status = status

        class CUDARuntimeError(RuntimeError):
            pass

        self.module = cupy = types.ModuleType("cupy")
        cupy.empty = lambda shape, dtype=np.float32: empty(machine, shape, dtype)
        cupy.full = lambda shape, value, dtype: self.asarray(np.full(shape, value, dtype))
        cupy.zeros = lambda shape, dtype: self.asarray(np.zeros(shape, dtype))
        cupy.asarray = self.asarray
        cupy.isfinite = lambda array: empty(machine, array.shape, bool)._compute(np.isfinite, array)
        cupy.copyto = lambda target, source, where: target._compute(np.positive, source, where=where)
        cupy.float32 = np.float32
        cupy.asnumpy = lambda array: array.get()
        cupy.cuda = types.SimpleNamespace(
            Device=lambda index: FakeDevice(machine, index),
            Stream=lambda non_blocking=False: FakeStream(machine),
            ExternalStream=lambda ptr, device_id=-1: FakeStream(machine, ptr),
            Event=self._event,
            get_current_stream=lambda device=-1: FakeStream(
                machine, current(machine, machine.device if device < 0 else device)
            ),
            alloc_pinned_memory=Pinned,
            runtime=types.SimpleNamespace(
                eventRecord=self._record,
                eventQuery=lambda event: 0 if machine.ask(lambda: self.events[event].done) else NOT_READY,
                streamWaitEvent=lambda stream, event: machine.queue(stream, WaitFor(self.events[event])),
                memcpyAsync=lambda target, source, nbytes, kind, stream: machine.queue(
                    stream, Kernel(lambda: ctypes.memmove(target, source, nbytes))
                ),
                getDeviceCount=lambda: n_devices,
                CUDARuntimeError=CUDARuntimeError,
            ),
            nccl=types.SimpleNamespace(
                available=True,
                NCCL_UINT8=1,
                NcclError=NcclError,
                groupStart=self._group_start,
                groupEnd=self._group_end,
                get_unique_id=lambda: (machine.handle(),),
                NcclCommunicator=lambda size, unique_id, rank: FakeComm(machine, self._clique(size, unique_id), rank),
            ),
        )

    def asarray(self, array: np.ndarray | FakeArray) -> FakeArray:
        if isinstance(array, FakeArray):
            return array
        new = empty(self.machine, array.shape, array.dtype)
        new.set(array)
        return new

    def run(
        self,
        size: int,
        program: Callable[..., Any],  # called as program(comm, *args) on each rank
        *args: Any,
    ) -> list[Any]:
        """Run a program on every rank, one thread and device each; results by rank."""
        clique = Clique(size)
        results: list[Any] = [None] * size
        errors: list[BaseException] = []  # the first failed by itself, others may have waited for it

        def main(rank: int) -> None:
            try:
                with FakeDevice(self.machine, rank):
                    results[rank] = program(FakeComm(self.machine, clique, rank), *args)
            except BaseException as error:
                errors.append(error)
                self.machine.failure = error  # ends the others' waits

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.machine.finish()
        return results

    def __enter__(self) -> FakeCuda:
        ours = {"cupy": self.module, "cupy.cuda": self.module.cuda, "cupy.cuda.nccl": self.module.cuda.nccl}
        self._before = {name: sys.modules.get(name) for name in ours}
        sys.modules.update(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for name, module in self._before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module

    def _clique(self, size: int, unique_id: tuple[int, ...]) -> Clique:
        with self.machine.changed:
            return self.cliques.setdefault(unique_id, Clique(size))

    def _event(self, disable_timing: bool = False) -> Any:
        return types.SimpleNamespace(ptr=self.machine.handle())

    def _record(self, event: int, stream: int) -> None:
        self.events[event] = record = Record()
        self.machine.queue(stream, record)

    def _group_start(self) -> None:
        self.machine.here.group = []

    def _group_end(self) -> None:
        queued = self.machine.here.group
        comm, stream, _ = queued[0]
        assert {(each, at) for each, at, _ in queued} == {(comm, stream)}, "one communicator and stream in a group"
        group = Group(comm, [message for _, _, message in queued])
        with self.machine.changed:
            comm.order.append(group)
            comm.n_groups += 1
            self.machine.queue(stream, group)


class QueuedEngine:
    """An engine of the CPU whose verbs are kernels: done when the current stream comes to them."""

    name = "cuda"

    def __init__(self, machine: Machine, engine: Any) -> None:
        self._machine, self._engine = machine, engine
        self.supports = engine.supports

    def __getattr__(self, verb: str) -> Callable[..., None]:
        work = getattr(self._engine, verb)

        def queue(*args: Any) -> None:
            device = self._machine.device
            self._machine.queue(current(self._machine, device), Kernel(lambda: work(*args)), device)

        return queue


@contextlib.contextmanager
def fake_gpus(monkeypatch: Any, seed: int, engine: Any) -> Iterator[FakeCuda]:
    """A fake cupy, and an engine for its memory."""
    from zcomm.engines import select

    with FakeCuda(seed) as cuda:
        monkeypatch.setattr(select, "_cuda_engine", lambda index: QueuedEngine(cuda.machine, engine))
        yield cuda
