"""Groups of the first gloo ranks, what each of them has, and how they are placed."""

from __future__ import annotations

import numpy as np
import oracle
import torch
import torch.distributed as dist

from zcomm.topology import Topology

TWO_BY_TWO = Topology(nodes=2, ranks_per_node=2)


_groups: dict[int, object] = {}


def group_of(size: int):
    """The group of the first `size` ranks, made once."""
    if size not in _groups:
        _groups[size] = dist.new_group(list(range(size)))
    return _groups[size]


def inputs(n_elems: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        torch.from_numpy(oracle.values(rank, n_elems, np.dtype(np.float32))).to(dtype)
        for rank in range(dist.get_world_size())
    ]


def topology_of(size: int) -> Topology | None:
    """What is detected for the first ranks: two on a node."""
    return {3: Topology(node_of_rank=(0, 0, 1)), 4: TWO_BY_TWO}.get(size)
