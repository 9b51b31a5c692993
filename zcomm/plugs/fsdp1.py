"""Compressed FSDP1: the gradient reductions of a FullyShardedDataParallel model, by its communication hook.

    model = FSDP(model, ...)
    model.register_comm_hook(zcomm.fsdp1.State("int4"), zcomm.fsdp1.hook)

FSDP1 calls the hook with one flat gradient for each unit it wraps, already in `reduce_dtype`: with a place for this
rank's shard where parameters are sharded, without one under NO_SHARD. It does not divide where a hook is registered,
so the hook returns the mean.

A residual of error feedback belongs to one unit's elements. FSDP1 gives all units' hooks one state and does not say
whose gradient it is, so `compress(model, feedback=True)` gives each unit its own, which knows the unit's name.

Weight gathers are not touched: FSDP1 offers no hook for them. HYBRID_SHARD and its ZeRO-2 kin take no hook at all.
For both use FSDP2 (zcomm.fsdp2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from zcomm.collectives.feedback import Feedback, Residual
from zcomm.errors import BufferError, UnsupportedError
from zcomm.keywords import known_keywords
from zcomm.plan import Plan
from zcomm.plugs.hook_state import HookState
from zcomm.reduce_op import AVG
from zcomm.topology import Topology
from zcomm.wire.codec import Codec

_WRAPPERS = ("", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")  # the last is torch.compile's
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class State(HookState):
    """Settings, communicator and residuals of one FSDP1 model's hook."""

    def residual(
        self,
        unit: str,  # its name in the model
        n_elems: int,  # of its gradient, padded
    ) -> Residual | None:
        """The residual of a unit's gradient; what is known of the unit in another size is dropped."""
        if self.feedback is None:
            return None
        key = f"{unit}: {n_elems} elements"
        known = self.feedback.keys()
        stale = [each for each in known if each != key and each.rpartition(": ")[0] == unit] if key not in known else []
        if stale:
            self.feedback.forget(*stale)
        return self.feedback.of(key)


class Unit(NamedTuple):
    """What `compress` registers where there is feedback: the state, and whose gradients the hook is given."""

    state: State
    name: str  # in the model


def hook(
    state: State | Unit,
    gradient: torch.Tensor,  # flat, padded to a multiple of the ranks; under NO_SHARD overwritten with the mean
    shard: torch.Tensor | None = None,  # this rank's part, written; None under NO_SHARD
) -> None:
    """Average a unit's gradient. For `FullyShardedDataParallel.register_comm_hook(state, hook)`."""
    residual = None
    if isinstance(state, Unit):
        residual, state = state.state.residual(state.name, gradient.numel()), state.state
    elif not isinstance(state, State):
        raise BufferError(
            f"the hook's state is a {type(state).__name__}; "
            "register it as register_comm_hook(zcomm.fsdp1.State(...), zcomm.fsdp1.hook)"
        )
    elif state.feedback is not None:
        raise UnsupportedError(
            "FSDP1 does not tell a hook whose gradient it holds, so feedback cannot keep units apart; "
            "register by zcomm.fsdp1.compress(model, ..., feedback=...)"
        )
    communicator = state.communicator_for(gradient)
    if shard is None:
        communicator.all_reduce(gradient, AVG, feedback=residual)
    else:
        communicator.reduce_scatter_single(shard, gradient, AVG, feedback=residual)


@known_keywords
def compress(
    model: FullyShardedDataParallel,  # the outermost
    gradients: Plan | Codec | str = "int4",
    *,
    topology: Topology | None = None,  # None: detected
    feedback: bool | Feedback = False,  # what each unit's gradient lost in one step is added to the next
) -> State:
    """Register the hook with a state over the model's own process group; the state.

    Raises UnsupportedError for HYBRID_SHARD, where units are sharded over different groups, and for a model that has a
    hook already or is not the outermost.
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
    state = State(gradients, model.process_group, None, topology, feedback)
    try:
        model.register_comm_hook(state, hook)
    except AssertionError as error:
        raise UnsupportedError(
            f"FSDP1 takes one communication hook for each model, registered on the outermost module: {error}; call "
            "compress once, on the outermost FullyShardedDataParallel"
        ) from error
    if state.feedback is not None:
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                if module._comm_hook_state is not state:
                    raise UnsupportedError(
                        f"this torch, {torch.__version__}, keeps hooks elsewhere; leave feedback out"
                    )
                module._comm_hook_state = Unit(state, _without_wrappers(name))
    return state


def _without_wrappers(name: str) -> str:
    """A unit's name as the model has it before it is wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or "root"
