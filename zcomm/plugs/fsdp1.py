"""Compressed FSDP1: the gradient reductions of a FullyShardedDataParallel model, by its communication hook.

    model = FSDP(model, ...)
    model.register_comm_hook(zcomm.fsdp1.State("int4"), zcomm.fsdp1.hook)

FSDP1 calls the hook with one flat gradient for each unit it wraps, already in `reduce_dtype`: with a place for this
rank's shard where parameters are sharded, without one under NO_SHARD. It does not divide where a hook is registered,
so the hook returns the mean.

Weight gathers are not touched: FSDP1 offers no hook for them. HYBRID_SHARD and its ZeRO-2 kin take no hook at all.
For both use FSDP2 (zcomm.fsdp2).
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from zcomm.errors import BufferError, UnsupportedError
from zcomm.plan import Plan
from zcomm.plugs.hook_state import HookState
from zcomm.reduce_op import AVG
from zcomm.topology import Topology
from zcomm.wire.codec import Codec

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class State(HookState):
    """Settings and communicator of one FSDP1 model's hook."""


def hook(
    state: State,
    gradient: torch.Tensor,  # flat, padded to a multiple of the ranks; under NO_SHARD overwritten with the mean
    shard: torch.Tensor | None = None,  # this rank's part, written; None under NO_SHARD
) -> None:
    """Average a unit's gradient. For `FullyShardedDataParallel.register_comm_hook(state, hook)`."""
    if not isinstance(state, State):
        raise BufferError(
            f"the hook's state is a {type(state).__name__}; "
            "register it as register_comm_hook(zcomm.fsdp1.State(...), zcomm.fsdp1.hook)"
        )
    if shard is None:
        state.communicator.all_reduce(gradient, AVG)
    else:
        state.communicator.reduce_scatter_single(shard, gradient, AVG)


def compress(
    model: FullyShardedDataParallel,  # the outermost
    gradients: Plan | Codec | str = "int4",
    *,
    topology: Topology | None = None,  # None: detected
) -> State:
    """Register the hook with a state over the model's own process group; the state.

    Raises UnsupportedError for HYBRID_SHARD, and where units are sharded over different groups.
    """
    if not isinstance(model, FullyShardedDataParallel):
        raise BufferError(f"model is a {type(model).__name__}; expected a FullyShardedDataParallel")
    units = FullyShardedDataParallel.fsdp_modules(model)
    for unit in units:
        if unit.sharding_strategy in _HYBRID:
            raise UnsupportedError(
                f"FSDP1 takes no communication hook under {unit.sharding_strategy.name}; use FULL_SHARD, "
                "SHARD_GRAD_OP or NO_SHARD here, or FSDP2 with zcomm.fsdp2"
            )
        if unit.process_group is not model.process_group:
            raise UnsupportedError(
                "units of this model are sharded over different process groups, and FSDP1 does not tell a hook which; "
                "wrap them all with one process_group"
            )
    state = State(gradients, model.process_group, None, topology)
    model.register_comm_hook(state, hook)
    return state
