"""The examples of docs/nccl.md: cupy's on stand-ins for cupy and mpi4py, both on real GPUs where there are some."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import fake_gpus
from impatience import AMPLE_S

from zcomm.engines import select

ROOT = Path(__file__).parents[2]
TORCH, CUPY = re.findall(
    r"<!-- runs: gpus -->\n```python\n(.*?)```", (ROOT / "docs" / "nccl.md").read_text(), re.DOTALL
)


def test_the_cupy_example_runs_on_stand_ins(monkeypatch, capsys):
    size, here, spread, said = 4, threading.local(), threading.Barrier(4), []

    class World:
        rank = property(lambda self: here.rank)
        size = 4

        def bcast(self, value: Any) -> Any:
            if here.rank == 0:
                said.append(value)
            spread.wait(AMPLE_S)
            return said[0]

    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=types.SimpleNamespace(COMM_WORLD=World())))
    with fake_gpus(monkeypatch, 3, select.engine_named("native")) as cuda:

        def main(comm: Any) -> None:
            here.rank = comm.rank_id()
            exec(CUPY, {"__name__": "__main__"})

        cuda.run(size, main)

    lines = sorted(line for line in capsys.readouterr().out.splitlines() if line)
    assert len(lines) == size
    for rank, line in enumerate(lines):
        value, raw, wire = re.fullmatch(rf"rank {rank}: ([\d.]+); ([\d,]+) bytes became ([\d,]+)", line).groups()
        assert float(value) == pytest.approx(1.5, rel=0.02)
        assert int(raw.replace(",", "")) > 3.9 * int(wire.replace(",", ""))


@pytest.mark.gpu
@pytest.mark.parametrize("example", [TORCH, CUPY], ids=["torch", "cupy"])
def test_the_examples_run_on_gpus(example, tmp_path):
    n_gpus = pytest.importorskip("cupy").cuda.runtime.getDeviceCount()
    program = tmp_path / "program.py"
    program.write_text(example)
    if example is TORCH:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_gpus)]
    else:
        import mpi_world

        if mpi_world.why_not():
            pytest.skip(mpi_world.why_not())
        launch = mpi_world.launch(n_gpus, sys.executable)

    import mpi_world

    done = subprocess.run(
        [*launch, str(program)],
        env=mpi_world.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=AMPLE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^rank \d+: ", done.stdout, re.MULTILINE)) == n_gpus
