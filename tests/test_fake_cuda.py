"""The stand-in for cupy has no name that cupy lacks, and catches what it is there to catch."""

from __future__ import annotations

import types
import warnings
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeArray, FakeComm, FakeCuda, FakeStream


def names(module: Any, prefix: str = "") -> list[str]:
    found = []
    for name, value in vars(module).items():
        if not name.startswith("_"):
            found.append(prefix + name)
            if isinstance(value, types.SimpleNamespace):
                found += names(value, f"{prefix}{name}.")
    return found


def test_cupy_has_every_name_of_the_stand_in():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cupy's, where NCCL is not installed
        cupy = pytest.importorskip("cupy")
        from cupy.cuda import nccl

    for name in names(FakeCuda().module):
        if nccl.available or not name.startswith("cuda.nccl."):
            here = cupy
            for part in name.split("."):
                assert hasattr(here, part), f"cupy has no {name}"
                here = getattr(here, part)
    for ours, theirs in ((FakeArray, cupy.ndarray), (FakeStream, cupy.cuda.Stream)):
        assert [name for name in vars(ours) if not hasattr(theirs, name) and not name.startswith("_")] == []
    if nccl.available:
        public = {name for name in vars(FakeComm) if not name.startswith("_")}
        assert [name for name in public if not hasattr(nccl.NcclCommunicator, name)] == []


def test_a_stream_that_does_not_wait_is_caught():
    """The same program with and without the event that orders it: right in every order, and wrong in some."""

    def program(seed: int, ordered: bool) -> float:
        with FakeCuda(seed) as cuda, cuda.module.cuda.Device(0):
            first, second = cuda.module.cuda.Stream(), cuda.module.cuda.Stream()
            runtime = cuda.module.cuda.runtime
            with first:
                x = cuda.module.full(4, 1.0, np.float32)
                event = cuda.module.cuda.Event()
                runtime.eventRecord(event.ptr, first.ptr)
            with second:
                if ordered:
                    runtime.streamWaitEvent(second.ptr, event.ptr)
                return float(x.get()[0])

    assert {program(seed, True) for seed in range(20)} == {1.0}
    assert len({program(seed, False) for seed in range(20)}) == 2


def test_memory_that_is_written_after_it_is_let_go_is_caught():
    def program(comm: Any) -> None:
        with cuda.module.cuda.Stream() as own:
            x = cuda.module.empty(4)
            other = cuda.module.cuda.Stream()
            address = x.data.ptr
            del x  # while the other stream has yet to write
            own.synchronize()
            cuda.module.cuda.runtime.memcpyAsync(address, source.ctypes.data, 16, 1, other.ptr)

    source = np.ones(4, np.float32)
    with FakeCuda() as cuda, pytest.raises(AssertionError, match="after it was let go"):
        cuda.run(1, program)


def test_messages_of_other_lengths_and_messages_that_never_meet_are_caught(monkeypatch):
    monkeypatch.setattr("fake_cuda_machine.STUCK_S", 0.3)

    def exchange(comm: Any, nbytes: int, peer: int) -> None:
        nccl, stream = cuda.module.cuda.nccl, cuda.module.cuda.Stream()
        x = cuda.module.empty(100)
        nccl.groupStart()
        (comm.send if comm.rank == 0 else comm.recv)(x.data.ptr, nbytes, 1, peer, stream.ptr)
        nccl.groupEnd()
        stream.synchronize()

    with FakeCuda() as cuda, pytest.raises(AssertionError, match=r"10 bytes meet 11|11 bytes meet 10"):
        cuda.run(2, lambda comm: exchange(comm, 10 + comm.rank, 1 - comm.rank))
    with FakeCuda() as cuda, pytest.raises(AssertionError, match="deadlock"):
        cuda.run(3, lambda comm: exchange(comm, 10, (comm.rank + 1) % 3))
