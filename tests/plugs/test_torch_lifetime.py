"""What torch calls leave behind: nothing. Groups destroyed, lists reused, programs that end, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from impatience import AMPLE_S

import zcomm
from zcomm.errors import (
    GroupError,
)
from zcomm.plugs import torch_calls


def check_destroyed_group() -> None:
    import gc
    import threading
    import weakref

    group = dist.new_group([0, 1, 2, 3])
    comm = zcomm.Communicator(group)
    x = torch.ones(5000)
    comm.all_reduce(x, async_op=True).wait()
    zcomm.all_reduce(x, group=group, codec="int8")
    cached = weakref.ref(torch_calls.communicator(group))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert cached() is None
    with pytest.raises(GroupError, match="destroyed"):
        comm.all_reduce(x)
    name = comm._transport.group_name
    del comm
    gc.collect()
    for thread in threading.enumerate():
        if name in thread.name:
            thread.join(AMPLE_S)
            assert not thread.is_alive(), "the worker's thread outlived its communicator"


def test_a_destroyed_group_takes_its_communicator_and_thread_with_it(torch_world):
    torch_world.run(check_destroyed_group)


def check_works_in_flight_when_their_group_is_destroyed(elems: int) -> None:
    import gc
    import threading
    import weakref

    group = dist.new_group([0, 1, 2, 3])
    comm = zcomm.Communicator(group, "raw")
    go_on = threading.Event()
    here = threading.current_thread()  # does the callback where the work is complete already; must not wait for itself
    comm.all_reduce(torch.ones(3), async_op=True).add_done_callback(
        lambda _: threading.current_thread() is here or go_on.wait(AMPLE_S)
    )
    tensors = [torch.arange(elems, dtype=torch.float32) * (dist.get_rank() + 1) + call for call in range(6)]
    works = [comm.all_reduce(x, async_op=True) for x in tensors]
    new_kind = torch.full((7,), float(dist.get_rank()))  # compared with other ranks' first, and begun in the worker
    works.append(comm.all_reduce(new_kind, async_op=True))
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(GroupError, match="destroyed"):
        comm.all_reduce(torch.ones(3))
    with pytest.raises(GroupError, match="destroyed"):
        comm.send(torch.ones(3), (comm.rank + 1) % 4)
    dist.barrier()  # no rank goes on before all have destroyed it
    go_on.set()
    for call, (work, x) in enumerate(zip(works, tensors, strict=False)):
        work.wait()
        assert torch.equal(x, torch.arange(elems, dtype=torch.float32) * 10 + 4 * call)
    works[-1].wait()
    assert new_kind.tolist() == [6.0] * 7
    comm.close()
    kept = weakref.ref(group)
    del group, comm, works, work
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("elems", [1, 1001, 300_000])
def test_works_in_flight_outlive_their_group(torch_world, elems):
    """As torch's own do. Else one rank would wait for what another, quicker to destroy the group, never sent."""
    torch_world.run(check_works_in_flight_when_their_group_is_destroyed, elems)


def check_a_list_reused_before_wait() -> None:
    tensors = [torch.ones(10), torch.ones(3)]
    kept = list(tensors)
    work = zcomm.all_reduce_coalesced(tensors, async_op=True, codec="raw")
    tensors.clear()
    work.wait()
    assert all(bool((x == 4).all()) for x in kept)


def test_a_list_may_be_reused_before_its_call_is_complete(torch_world):
    torch_world.run(check_a_list_reused_before_wait)


def test_leaving_with_works_in_flight_is_a_clean_end(tmp_path):
    """Dropped works, a destroyed group, an exit status: the program ends as it would without zcomm."""
    # the barrier: both have called by then, if not completed
    for ending, status in (("", 0), ("dist.barrier(); dist.destroy_process_group()", 0), ("raise SystemExit(3)", 3)):
        store = tmp_path / f"store{len(ending)}"
        program = f"""
import sys, torch, torch.distributed as dist, zcomm
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
for _ in range(5):
    zcomm.all_reduce(torch.ones(100_000), async_op=True, codec="int8")
{ending}
"""
        for process, told in _ended(program, store):
            assert process.returncode == status, told


@pytest.mark.parametrize("call", ["irecv", "isend"])
def test_a_message_without_its_other_end_does_not_abort_the_program_s_end(tmp_path, call):
    """Both ranks leave at once, and each one's thread would wake when the other's connection closes."""
    for ending, status in (("dist.destroy_process_group()", 0), ("raise SystemExit(3)", 3)):
        program = f"""
import sys, torch, torch.distributed as dist, zcomm, zcomm.work
zcomm.work.EXIT_GRACE_S = 0.1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
work = zcomm.{call}(torch.ones(3), 1 - dist.get_rank())
dist.barrier()
{ending}
"""
        ended = _ended(program, tmp_path / f"store{len(ending)}")
        for process, told in ended:
            assert process.returncode == status, told
        assert any("calls in flight" in told for _, told in ended)  # giving up on one rank may end the other's


def _ended(program: str, store: Path) -> list[tuple[subprocess.Popen[str], str]]:
    """Two ranks of a program, when both have ended, and what they told."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(store), str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [(process, process.communicate(timeout=AMPLE_S)[1]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def check_memory(calls: int) -> tuple[int, int]:

    generator = np.random.default_rng(7)  # the same sizes on every rank
    comm = zcomm.Communicator(None, "int8")
    most = 200_000
    comm.all_reduce(torch.ones(most))
    start = None
    for call in range(calls):
        comm.all_reduce(torch.ones(int(generator.integers(1, most))))
        if call == calls // 10:
            start = resident_bytes()
    grown = resident_bytes() - start
    free = comm._conductor.scratch.free_bytes
    comm.close()
    return grown, free


def resident_bytes() -> int:
    """Without what is mapped from files: of that the system keeps in memory what it likes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def test_memory_stays_flat_over_two_thousand_calls_of_changing_size(torch_world):
    for grown, free in torch_world.run(check_memory, 2000):
        assert grown < 8 << 20
        assert free < 2 << 20


def check_scratch_of_inference_mode() -> None:
    comm = zcomm.Communicator(None, "raw")
    x, y = torch.arange(400.0) + 1000 * comm.rank, torch.empty(400)
    with torch.inference_mode():
        comm.all_to_all_single(torch.empty(400), x.clone())  # in two hops, whose porters write to their scratch
    comm.all_to_all_single(y, x)
    assert y.tolist() == [1000.0 * rank + 100 * comm.rank + i for rank in range(4) for i in range(100)]
    comm.close()


def test_scratch_taken_in_inference_mode_is_used_outside_of_it(torch_world):
    torch_world.run(check_scratch_of_inference_mode)
