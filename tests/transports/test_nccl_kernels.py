"""A whole all-reduce as a GPU would do it: the cuda engine's own launches and kernels, run late on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from fake_cuda import FakeCuda, current
from fake_cuda_machine import Kernel

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import cuda_on_cpu

import zcomm
from zcomm import Communicator, Plan, Topology
from zcomm.buffers import DType
from zcomm.engines import cuda_kernels, select
from zcomm.engines.cuda import CudaEngine

F32 = np.dtype(np.float32)
CODECS = ("int8", "int4:asym")
PARSED = [zcomm.codec(spec) for spec in CODECS]
KERNELS = cuda_kernels.every_kernel([*PARSED, zcomm.codec("raw")], [(each, each) for each in PARSED], [DType.FLOAT32])

pytestmark = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="there is no g++ to build the kernels with")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_on_cpu.build(tmp_path_factory.mktemp("kernels"), KERNELS)


class QueuedLauncher:
    """Kernels are launched when the current stream comes to them."""

    def __init__(self, cuda: FakeCuda, library: Path) -> None:
        self._machine = cuda.machine
        self._inner = cuda_on_cpu.CpuLauncher(library, KERNELS)
        self.max_ctas = self._inner.max_ctas
        self.launched = self._inner.launched

    def launch(self, kernel: str, n_ctas: int, n_threads: int, job: np.ndarray) -> None:
        argument = job.copy()  # CUDA copies a kernel's argument when it is launched
        stream = current(self._machine, self._machine.device)
        self._machine.queue(stream, Kernel(lambda: self._inner.launch(kernel, n_ctas, n_threads, argument)))

    def table(self, addresses: Sequence[int]) -> tuple[int, Any]:
        return self._inner.table(addresses)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("topology", [Topology(nodes=1, ranks_per_node=3), Topology(nodes=2, ranks_per_node=2)])
def test_an_all_reduce_by_the_kernels_is_the_definition(topology, spec, seed, library, monkeypatch):
    size, levels = topology.size, topology if topology.has_two_levels else None
    inputs = [oracle.values(rank, 3001, F32) for rank in range(size)]
    plan = Plan(spec, chunk_elems=700, one_shot_bytes=0)
    with FakeCuda(seed) as cuda:
        launcher = QueuedLauncher(cuda, library)
        monkeypatch.setattr(select, "_cuda_engine", lambda index: CudaEngine(launcher))

        def program(nccl):
            with Communicator(nccl, plan, topology) as comm, cuda.module.cuda.Stream():
                x = cuda.asarray(inputs[comm.rank])
                comm.all_reduce(x, "avg")
                return x.get()

        results = cuda.run(size, program)

    codec = zcomm.codec(spec)
    expected = oracle.all_reduce(codec, codec, inputs, levels, "AVG").tobytes()
    assert all(x.tobytes() == expected for x in results)


def test_pieces_of_a_step_are_launched_together(library, monkeypatch):
    inputs = [oracle.values(rank, 8 * 2048, F32) for rank in range(8)]
    with FakeCuda() as cuda:
        launcher = QueuedLauncher(cuda, library)
        monkeypatch.setattr(select, "_cuda_engine", lambda index: CudaEngine(launcher))

        def program(nccl):
            with Communicator(nccl, Plan("int8", one_shot_bytes=0), Topology(nodes=1, ranks_per_node=8)) as comm:
                x = cuda.asarray(inputs[comm.rank])
                comm.all_reduce(x)
                return x.get()

        results = cuda.run(8, program)

    codec = zcomm.codec("int8")
    expected = oracle.all_reduce(codec, codec, inputs, None, "SUM").tobytes()
    assert all(x.tobytes() == expected for x in results)
    assert len(launcher.launched) == 8 * 4  # for others, for itself; the sum again; everybody's decoded


def test_error_feedback_by_the_kernels_is_what_host_memory_gives(library, monkeypatch):
    topology, plan = Topology(nodes=2, ranks_per_node=2), Plan("int8", chunk_elems=700, one_shot_bytes=0)

    def program(transport, to, back):
        feedback, results = zcomm.Feedback(beta=0.8), []
        with Communicator(transport, plan, topology) as comm:
            for step in range(4):
                values = oracle.values(10 * step + comm.rank, 3001, F32)
                values[2048:] *= np.float32(2.0**-130)  # subnormal numbers, residuals too
                x = to(values)
                comm.all_reduce(x, "avg", feedback=feedback.of("x"))
                results.append(back(x).tobytes())
            parts = feedback.state_dict()["x"]["parts"]
        return results, {name: part.tobytes() for name, part in parts.items()}

    with FakeCuda() as cuda:
        launcher = QueuedLauncher(cuda, library)
        monkeypatch.setattr(select, "_cuda_engine", lambda index: CudaEngine(launcher))

        def of_gpu(nccl):
            with cuda.module.cuda.Stream():
                return program(nccl, cuda.asarray, lambda x: x.get())

        by_kernels = cuda.run(4, of_gpu)

    assert by_kernels == zcomm.local.run(4, lambda transport: program(transport, np.array, np.asarray))
    assert any("sum<" in kernel for kernel in launcher.launched)
