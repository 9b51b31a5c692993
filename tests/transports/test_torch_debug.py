"""Under TORCH_DISTRIBUTED_DEBUG=DETAIL, which counts gloo's messages, torch's own collectives stand beside zcomm's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

N_RANKS = 3
AMPLE_S = 240  # ends a hang
PROGRAM = f"""
import gc, sys, torch, torch.distributed as dist, zcomm
from zcomm.transports.torch_dist import _uncounted

rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], {N_RANKS}), rank=rank, world_size={N_RANKS})

def torch_s_own(group=None):
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [dist.get_world_size(group)] * 4

works = [zcomm.all_reduce(torch.full((100_000,), float(rank)), async_op=True, codec="raw") for _ in range(5)]
torch_s_own()  # while messages are in flight
for work in works:
    work.wait()
    assert (work.result()[0] == 0 + 1 + 2).all()

x = torch.full((40,), float(rank))
zcomm.broadcast(x, 1, codec="raw")
assert (x == 1).all()
torch_s_own()
zcomm.gather(x, [torch.empty(40) for _ in range({N_RANKS})] if rank == 0 else None, 0)
torch_s_own()

group = dist.new_group([2, 0])
if rank != 1:
    zcomm.broadcast(x, 0, group=group)
    torch_s_own(group)
dist.barrier()
dist.destroy_process_group()
del group, works, work
gc.collect()
assert not _uncounted
"""


def test_messages_of_unequal_number_are_no_mismatch_to_torch(tmp_path):
    environment = os.environ | {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "GLOO_SOCKET_IFNAME": "lo",
        "GROUP_RANK": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(N_RANKS)
    ]
    try:
        told = [process.communicate(timeout=AMPLE_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()

    assert [process.returncode for process in ranks] == [0] * N_RANKS, "\n".join(told)
