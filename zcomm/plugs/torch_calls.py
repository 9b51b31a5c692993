"""torch.distributed's collectives under their own names and argument order, with `codec=` behind.

    zcomm.all_reduce(grad, op=dist.ReduceOp.AVG, group=group, codec="int8")

Each group gets one communicator, made at the first call, which is therefore collective over the whole group.
"""

from __future__ import annotations

import threading
import weakref
from math import prod
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from zcomm.collectives.communicator import Communicator
from zcomm.errors import BufferError, GroupError
from zcomm.graphs import outside_graphs
from zcomm.keywords import known_keywords
from zcomm.plugs.torch_work import TorchWork
from zcomm.transports.torch_dist import device_in, process_group
from zcomm.wire.codec import Codec
from zcomm.work import Work

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


class _OfGroup:
    """The communicators of one group. Making one waits for the group's other ranks, so each group has its own lock:
    under a common one, threads that make two groups' communicators in another order on another rank would wait for
    each other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_device: dict[str, Communicator] = {}


_looking = threading.Lock()
_communicators: weakref.WeakKeyDictionary[Any, _OfGroup] = weakref.WeakKeyDictionary()


def communicator(
    group: Any = None,  # a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group
    like: Any = None,  # a tensor, or a list of them, of the calls that are meant; None: on the group's own device
) -> Communicator:
    """The communicator that these functions use for a group; its stats() count their calls.

    A group with backends for CPU and GPU ("cpu:gloo,cuda:nccl") has two, one for tensors of each.
    """
    group = process_group(group)
    tensor = like[0] if isinstance(like, list) and like else like
    device = device_in(group, tensor.device if isinstance(tensor, torch.Tensor) else None)
    with _looking:
        of_group = _communicators.setdefault(group, _OfGroup())
    with of_group.lock:
        found = of_group.by_device.get(device)
        if found is None:
            found = of_group.by_device[device] = Communicator(group, device=device)
    return found


@outside_graphs
@known_keywords
def all_reduce(
    tensor: torch.Tensor,  # any shape, float; overwritten with the result
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Sum or average tensor over the group, in place (see Communicator.all_reduce).

    tensor: float32, bfloat16, float16 or float64. codec: any that zcomm.codec reads. Returns a Work if async_op. What
    the codec, the operator, the tensor or the group cannot be raises one of zcomm's errors before a byte moves; ranks
    that disagree, come late or die raise one on every rank, at the latest after the group's timeout.
    """
    return _work(communicator(group, tensor).all_reduce(tensor, op, codec, async_op), tensor)


@outside_graphs
@known_keywords
def all_gather_single(
    output_tensor: torch.Tensor,  # size x input's elements; written
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Gather every rank's input into output, in rank order (see Communicator.all_gather_single)."""
    comm = communicator(group, output_tensor)
    return _work(comm.all_gather_single(output_tensor, input_tensor, codec, async_op), output_tensor)


@outside_graphs
@known_keywords
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
    return _work(communicator(group, output).reduce_scatter_single(output, input, op, codec, async_op), output)


@outside_graphs
@known_keywords
def all_gather(
    tensor_list: list[torch.Tensor],  # one for each rank; written
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Gather every rank's tensor, each into its own; they may differ in size (see Communicator.all_gather)."""
    return _work(communicator(group, tensor_list).all_gather(tensor_list, tensor, codec, async_op), tensor_list)


@outside_graphs
@known_keywords
def reduce_scatter(
    output: torch.Tensor,  # written
    input_list: list[torch.Tensor],  # one for each rank
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Sum or average each rank's input over the group and keep this rank's (see Communicator.reduce_scatter)."""
    return _work(communicator(group, output).reduce_scatter(output, input_list, op, codec, async_op), output)


@outside_graphs
@known_keywords
def all_to_all_single(
    output: torch.Tensor,  # written
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,  # along the first dimension; None: equal
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Send each rank its part of input's first dimension (see Communicator.all_to_all_single)."""
    came = _in_elements(output, output_split_sizes, "output_split_sizes")
    sent = _in_elements(input, input_split_sizes, "input_split_sizes")
    return _work(communicator(group, output).all_to_all_single(output, input, came, sent, codec, async_op), output)


@outside_graphs
@known_keywords
def all_to_all(
    output_tensor_list: list[torch.Tensor],  # one from each rank; written
    input_tensor_list: list[torch.Tensor],  # one for each rank
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Send each rank its tensor (see Communicator.all_to_all)."""
    comm = communicator(group, output_tensor_list)
    return _work(comm.all_to_all(output_tensor_list, input_tensor_list, codec, async_op), output_tensor_list)


@outside_graphs
@known_keywords
def all_reduce_coalesced(
    tensors: list[torch.Tensor],  # any shapes and float dtypes; overwritten with the results
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """All-reduce many tensors as one message (see Communicator.all_reduce_coalesced)."""
    return _work(communicator(group, tensors).all_reduce_coalesced(tensors, op, codec, async_op), tensors)


@outside_graphs
@known_keywords
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,  # global rank
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Give every rank src's tensor as its bytes decode (see Communicator.broadcast)."""
    comm = communicator(group, tensor)
    return _work(comm.broadcast(tensor, _rank_in_group(group, src, group_src), codec, async_op), tensor)


@outside_graphs
@known_keywords
def reduce(
    tensor: torch.Tensor,  # rank dst's is overwritten
    dst: int | None = None,  # global rank
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Sum or average tensor on rank dst (see Communicator.reduce)."""
    comm = communicator(group, tensor)
    return _work(comm.reduce(tensor, _rank_in_group(group, dst, group_dst), op, codec, async_op), tensor)


@outside_graphs
@known_keywords
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,  # on rank dst, one for each rank, written; not looked at elsewhere
    dst: int | None = None,  # global rank; None: 0
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Gather every rank's tensor on rank dst; they may differ in size (see Communicator.gather)."""
    comm, root = communicator(group, tensor), _rank_in_group(group, dst, group_dst, 0)
    return _work(comm.gather(tensor, gather_list, root, codec, async_op), gather_list or [])


@outside_graphs
@known_keywords
def scatter(
    tensor: torch.Tensor,  # written
    scatter_list: list[torch.Tensor] | None = None,  # on rank src, one for each rank; not looked at elsewhere
    src: int | None = None,  # global rank; None: 0
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> TorchWork | None:
    """Give every rank its own of rank src's tensors; they may differ in size (see Communicator.scatter)."""
    comm, root = communicator(group, tensor), _rank_in_group(group, src, group_src, 0)
    return _work(comm.scatter(tensor, scatter_list, root, codec, async_op), tensor)


@outside_graphs
@known_keywords
def send(
    tensor: torch.Tensor,
    dst: int | None = None,  # global rank
    group: Any = None,
    tag: int = 0,  # not used: messages are matched in order
    group_dst: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> None:
    """Send tensor to rank dst, which calls zcomm.recv with the same codec (see Communicator.send)."""
    isend(tensor, dst, group, tag, group_dst, codec=codec).wait()


@outside_graphs
@known_keywords
def recv(
    tensor: torch.Tensor,  # written
    src: int | None = None,  # global rank
    group: Any = None,
    tag: int = 0,  # not used: messages are matched in order
    group_src: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> int:
    """Receive what rank src sends to this one (see Communicator.recv); returns src as torch does."""
    irecv(tensor, src, group, tag, group_src, codec=codec).wait()
    return src if src is not None else dist.get_global_rank(process_group(group), _rank_in_group(group, src, group_src))


@outside_graphs
@known_keywords
def isend(
    tensor: torch.Tensor,
    dst: int | None = None,  # global rank
    group: Any = None,
    tag: int = 0,  # not used: messages are matched in order
    group_dst: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> TorchWork:
    """send, asynchronously."""
    _no_tag(tag)
    comm = communicator(group, tensor)
    return _under_way(comm.send(tensor, _rank_in_group(group, dst, group_dst), codec, async_op=True), tensor)


@outside_graphs
@known_keywords
def irecv(
    tensor: torch.Tensor,  # written
    src: int | None = None,  # global rank
    group: Any = None,
    tag: int = 0,  # not used: messages are matched in order
    group_src: int | None = None,  # or rank in the group
    *,
    codec: Codec | str = "int8",
) -> TorchWork:
    """recv, asynchronously."""
    _no_tag(tag)
    comm = communicator(group, tensor)
    return _under_way(comm.recv(tensor, _rank_in_group(group, src, group_src), codec, async_op=True), tensor)


all_gather_into_tensor = all_gather_single  # torch's older names
reduce_scatter_tensor = reduce_scatter_single


def _in_elements(tensor: torch.Tensor, rows: list[int] | None, called: str) -> list[int] | None:
    """torch counts splits in rows of the first dimension; an empty list means equal ones, as None does."""
    if rows is None or not isinstance(tensor, torch.Tensor):  # what is no tensor, the communicator refuses by name
        return rows
    if isinstance(rows, list | tuple) and not rows:
        return None
    try:
        row = prod(tensor.shape[1:])
        return [index(n_rows) * row for n_rows in rows]
    except TypeError as error:
        raise BufferError(f"{called} must be whole numbers of rows, one for each rank, got {rows!r}") from error


def _rank_in_group(group: Any, rank: int | None, rank_in_group: int | None, default: int | None = None) -> int:
    """torch names a peer by its global rank, where nothing is said by default, or by its rank in the group."""
    if rank is None and rank_in_group is None:
        rank = default
    if (rank is None) == (rank_in_group is None):
        raise GroupError("name the peer once: by its global rank, or by its rank in the group")
    if rank_in_group is not None:
        return rank_in_group
    try:
        return dist.get_group_rank(process_group(group), rank)
    except ValueError as error:
        raise GroupError(f"global rank {rank} is not in this group") from error


def _no_tag(tag: int) -> None:
    if tag:
        raise GroupError(f"zcomm matches messages in the order they are sent, not by tag; got tag={tag}, leave it out")


def _work(work: Work | None, result: torch.Tensor | list[torch.Tensor]) -> TorchWork | None:
    return None if work is None else TorchWork(work, result)


def _under_way(work: Work | None, result: torch.Tensor) -> TorchWork:
    assert work is not None  # the call was asynchronous
    return TorchWork(work, result)
