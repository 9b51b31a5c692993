"""Collectives that the demo gives FSDP2 in place of torch's own: copies instead of a network, and a paced network.

FSDP2 calls a gather or reduce-scatter object with keywords, and takes its buffers from `allocate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zcomm.transports.pace import Pacer


class _OrdinaryMemory:
    """For both to inherit."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor."""
        return torch.empty(size, dtype=dtype, device=device)


class LocalAllGather(_OrdinaryMemory):
    """A gather from nobody: copies this rank's slice to where every rank's would be."""

    def __call__(
        self,
        output_tensor: torch.Tensor,  # (world * n,), written
        input_tensor: torch.Tensor,  # (n,), a slice of output_tensor
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Copy."""
        for part in output_tensor.view(-1, input_tensor.numel()):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor)


class LocalReduceScatter(_OrdinaryMemory):
    """A reduce-scatter with nobody: copies this rank's slice."""

    def __call__(
        self,
        output_tensor: torch.Tensor,  # (n,), written
        input_tensor: torch.Tensor,  # (world * n,)
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Copy."""
        output_tensor.copy_(input_tensor.view(-1, output_tensor.numel())[dist.get_rank(group)])


class Paced:
    """One of torch's own collectives over a link that is paced in user space, which torch knows nothing of.

    gloo sends round a ring, (world - 1) shards to the next rank in a gather, twice that in a reduce-scatter (it
    all-reduces); only the last rank of a node has its next rank on another node.
    """

    def __init__(self, collective: Any, rounds: int, itemsize: int, pacer: Pacer) -> None:
        self.collective = collective  # of examples/torch_wire.py
        self.rounds = rounds  # of the ring: 1 for a gather, 2 for a reduce-scatter
        self.itemsize = itemsize  # bytes per element on the wire
        self.pacer = pacer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As the collective does."""
        buffer: torch.Tensor = self.collective.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(self, **call: Any) -> Any:
        """Sleep as long as the link would take, then do it."""
        group = call["group"]
        shard = min(call["output_tensor"].numel(), call["input_tensor"].numel()) * self.itemsize
        following = dist.get_global_rank(group, (group.rank() + 1) % group.size())
        self.pacer.charge(self.rounds * (group.size() - 1) * shard, following)
        return self.collective(**call)
