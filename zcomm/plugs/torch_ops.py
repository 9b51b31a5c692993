"""The collectives as torch operators, for torch.compile and autograd: functional, with shapes and gradients known.

    y = zcomm.ops.all_gather(shard, codec="int8")          # inside torch.compile(fullgraph=True), or anywhere

torch.ops.zcomm.all_gather, .reduce_scatter and .all_reduce take the group by its name and the codec by its spelling,
so that both can stand in a graph. The functions of this file have the same arguments as torch.distributed's
functional collectives have, and resolve the group first. Rows are dimension 0. The gradient of a sum over ranks of
losses: a gather's is a reduce-scatter (SUM), a reduce-scatter's a gather, an all-reduce's an all-reduce, each in
`grad_codec`. Forward-mode differentiation, which torch would answer with no tangent, is refused.

Each call is collective, and so is its backward: every rank must run the same graph.
"""

# No `from __future__ import annotations`: torch reads the operators' schemas from the annotations' types.

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from zcomm.collectives.communicator import Communicator
from zcomm.errors import BufferError, CodecError, GroupError, ReduceOpError, UnsupportedError
from zcomm.plugs.torch_calls import communicator
from zcomm.reduce_op import reduce_op

_MEANS = {"sum": False, "avg": True}


def all_gather(
    shard: torch.Tensor,  # (rows, ...), the same shape on every rank
    group: Any = None,  # a name, a ProcessGroup, a one-dimensional mesh, or None for the default group
    *,
    codec: str = "int8",
    grad_codec: str | None = None,  # of the reduce-scatter in backward; None: as codec
) -> torch.Tensor:  # (size x rows, ...)
    """Every rank's shard, in rank order."""
    _check(shard, codec, grad_codec)
    return torch.ops.zcomm.all_gather(shard, _name(group), codec, grad_codec)


def reduce_scatter(
    full: torch.Tensor,  # (size x rows, ...)
    op: str = "sum",  # or "avg"
    group: Any = None,
    *,
    codec: str = "int8",
    grad_codec: str | None = None,  # of the gather in backward; None: as codec
) -> torch.Tensor:  # (rows, ...)
    """This rank's rows of the sum or mean over ranks."""
    _check(full, codec, grad_codec)
    _check_op(op)
    return torch.ops.zcomm.reduce_scatter(full, op, _name(group), codec, grad_codec)


def all_reduce(
    x: torch.Tensor,  # any shape
    op: str = "sum",  # or "avg"
    group: Any = None,
    *,
    codec: str = "int8",
    grad_codec: str | None = None,  # of the all-reduce in backward; None: as codec
) -> torch.Tensor:  # x's shape
    """The sum or mean over ranks, bit-identical everywhere; x stays as it is."""
    _check(x, codec, grad_codec)
    _check_op(op)
    return torch.ops.zcomm.all_reduce(x, op, _name(group), codec, grad_codec)


def _check(x: Any, codec: Any, grad_codec: Any) -> None:
    """Refuse what an operator's schema would refuse without saying what to do, or take wrongly. Traced, as _name is."""
    if not isinstance(x, torch.Tensor):
        raise BufferError(f"got a {type(x).__name__}; expected a torch.Tensor")
    if hasattr(x, "to_local"):
        raise BufferError(f"got a {type(x).__name__}; pass the local tensor: .to_local()")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedError("zcomm.ops has no forward-mode derivative (jvp); use backward, or torch.func.vjp")
    for each in (codec,) if grad_codec is None else (codec, grad_codec):
        if not isinstance(each, str):
            raise CodecError(f"an operator takes a codec's spelling, got {each!r}; pass str(codec)")


def _name(group: Any) -> str:
    """A group's name. Traced by torch.compile, so it looks and computes nothing."""
    if isinstance(group, str):
        return group
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise GroupError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if isinstance(group, dist.ProcessGroup):  # a graph knows its name and little else of it
        return group.group_name
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise GroupError(f"a DeviceMesh of {group.ndim} dimensions holds several groups; pass mesh[name]")
        return group.get_group().group_name
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(f"global rank {dist.get_rank()} is not in this group")
    raise GroupError(f"got a {type(group).__name__}; expected a group's name, a ProcessGroup, a DeviceMesh or None")


def _communicator(name: str, tensor: torch.Tensor) -> Communicator:
    return communicator(_group(name), tensor)


def _group(name: str) -> dist.ProcessGroup:
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError as error:
        raise GroupError(f"no group is named {name!r}; pass the group itself, or its group_name") from error


def _check_op(op: str) -> None:
    if not isinstance(op, str) or op not in _MEANS:
        raise ReduceOpError(f"op is {op!r}; expected 'sum' or 'avg'")


def _gathered_shape(shard: torch.Tensor, size: int) -> list[int]:
    if shard.ndim == 0:
        raise BufferError("a tensor without dimensions has no rows to gather; pass x.reshape(1)")
    return [size * shard.shape[0], *shard.shape[1:]]


def _scattered_shape(full: torch.Tensor, size: int) -> list[int]:
    if full.ndim == 0 or full.shape[0] % size:
        raise BufferError(
            f"a tensor of shape {tuple(full.shape)} has no rows that {size} ranks can share equally; "
            f"pad dimension 0 to a multiple of {size}"
        )
    return [full.shape[0] // size, *full.shape[1:]]


# -- operators --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("zcomm::all_gather", mutates_args=())
def _all_gather(shard: torch.Tensor, group: str, codec: str, grad_codec: str | None = None) -> torch.Tensor:
    comm = _communicator(group, shard)
    out = shard.new_empty(_gathered_shape(shard, comm.size))
    comm.all_gather_single(out, shard, codec)
    return out


@torch.library.custom_op("zcomm::reduce_scatter", mutates_args=())
def _reduce_scatter(full: torch.Tensor, op: str, group: str, codec: str, grad_codec: str | None = None) -> torch.Tensor:
    _check_op(op)
    comm = _communicator(group, full)
    out = full.new_empty(_scattered_shape(full, comm.size))
    comm.reduce_scatter_single(out, full, reduce_op(op), codec)
    return out


@torch.library.custom_op("zcomm::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, op: str, group: str, codec: str, grad_codec: str | None = None) -> torch.Tensor:
    _check_op(op)
    out = x.clone(memory_format=torch.contiguous_format)
    _communicator(group, x).all_reduce(out, reduce_op(op), codec)
    return out


# -- shapes, for tracing ----------------------------------------------------------------------------------------------


@_all_gather.register_fake
def _(shard: torch.Tensor, group: str, codec: str, grad_codec: str | None = None) -> torch.Tensor:
    return shard.new_empty(_gathered_shape(shard, _group(group).size()))


@_reduce_scatter.register_fake
def _(full: torch.Tensor, op: str, group: str, codec: str, grad_codec: str | None = None) -> torch.Tensor:
    _check_op(op)
    return full.new_empty(_scattered_shape(full, _group(group).size()))


@_all_reduce.register_fake
def _(x: torch.Tensor, op: str, group: str, codec: str, grad_codec: str | None = None) -> torch.Tensor:
    _check_op(op)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# -- gradients --------------------------------------------------------------------------------------------------------


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.codec, ctx.grad_codec = inputs


def _keep_reduction(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.op, ctx.group, ctx.codec, ctx.grad_codec = inputs


def _gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad_codec = ctx.codec if ctx.grad_codec is None else ctx.grad_codec
    return torch.ops.zcomm.reduce_scatter(grad, "sum", ctx.group, grad_codec, ctx.codec), None, None, None


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad_codec = ctx.codec if ctx.grad_codec is None else ctx.grad_codec
    gathered = torch.ops.zcomm.all_gather(grad, ctx.group, grad_codec, ctx.codec)
    if _MEANS[ctx.op]:
        gathered = gathered / _group(ctx.group).size()
    return gathered, None, None, None, None


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad_codec = ctx.codec if ctx.grad_codec is None else ctx.grad_codec
    return torch.ops.zcomm.all_reduce(grad, ctx.op, ctx.group, grad_codec, ctx.codec), None, None, None, None


_all_gather.register_autograd(_gather_backward, setup_context=_keep_gather)
_reduce_scatter.register_autograd(_scatter_backward, setup_context=_keep_reduction)
_all_reduce.register_autograd(_all_reduce_backward, setup_context=_keep_reduction)
