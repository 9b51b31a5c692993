"""torch.distributed's collectives under their own names and argument order, with `codec=` behind.

    zcomm.all_reduce(grad, op=dist.ReduceOp.AVG, group=group, codec="int8")

Each group gets one communicator, made at the first call, which is therefore collective over the whole group.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from zcomm.collectives.communicator import Communicator
from zcomm.plugs.torch_work import TorchWork
from zcomm.transports.torch_dist import process_group
from zcomm.wire.codec import Codec
from zcomm.work import Work

_communicators: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def communicator(
    group: Any = None,  # a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group
) -> Communicator:
    """The communicator that these functions use for a group; its stats() count their calls."""
    group = process_group(group)
    found = _communicators.get(group)
    if found is None:
        found = _communicators[group] = Communicator(group)
    return found


def all_reduce(
    tensor: torch.Tensor,  # any shape, float; overwritten with the result
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Sum or average tensor over the group, in place (see Communicator.all_reduce)."""
    return _torch_work(communicator(group).all_reduce(tensor, op, codec, async_op), tensor)


def all_gather_single(
    output_tensor: torch.Tensor,  # size x input's elements; written
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Gather every rank's input into output, in rank order (see Communicator.all_gather_single)."""
    return _torch_work(
        communicator(group).all_gather_single(output_tensor, input_tensor, codec, async_op), output_tensor
    )


def reduce_scatter_single(
    output: torch.Tensor,  # input's elements / size; written
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Sum or average input over the group and keep this rank's part (see Communicator.reduce_scatter_single)."""
    return _torch_work(communicator(group).reduce_scatter_single(output, input, op, codec, async_op), output)


all_gather_into_tensor = all_gather_single  # torch's older names
reduce_scatter_tensor = reduce_scatter_single


def _torch_work(work: Work | None, result: torch.Tensor) -> TorchWork | None:
    return None if work is None else TorchWork(work, result)
