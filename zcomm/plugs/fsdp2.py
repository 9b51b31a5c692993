"""Compressed FSDP2: the weight gathers and gradient reductions of a model that `fully_shard` has wrapped.

    for block in model.blocks:
        fully_shard(block, reshard_after_forward=ranks_per_node)    # hpZ: the backward gather stays inside the node
    fully_shard(model)
    zcomm.fsdp2.compress(model, weights="int8", gradients="int4")   # qwZ and qgZ

qwZ, hpZ and qgZ are ZeRO++'s three parts (arXiv 2306.10209). FSDP2 calls a module's custom all-gather and
reduce-scatter with one flat buffer per wrapped module; everything else, sharding, prefetch, accumulation, mixed
precision, state dicts, stays torch's own. The sharded master weights are never touched, so checkpoints are exact.

[Note: overlap on CPU] FSDP2 has side streams only on accelerators. On CPU a gather overlaps with compute only if it
returns a `dist.Work`, and forward gathers only if the next module is prefetched (prefetch=True). A reduce-scatter must
be complete when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcomm.collectives.communicator import Communicator
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.errors import BufferError, MissingExtra, PlanError, TopologyError, UnsupportedError
from zcomm.keywords import known_keywords
from zcomm.plan import Plan, plan_of
from zcomm.plugs.torch_work import TorchWork
from zcomm.reduce_op import reduce_op
from zcomm.topology import Topology
from zcomm.transports.torch_dist import device_in
from zcomm.wire.codec import Codec

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
except ImportError as error:
    raise MissingExtra(
        f"zcomm.fsdp2 needs torch 2.9 or newer, which lets FSDP2 take custom collectives; this is {torch.__version__}"
    ) from error

_COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@known_keywords
def compress(
    model: nn.Module,  # after fully_shard
    weights: Plan | Codec | str | None = "int8",  # of the gathers over the whole shard group; None: torch's own
    gradients: Plan | Codec | str | None = "int4",  # of the reductions; None: torch's own
    *,
    node_weights: Plan | Codec | str | None = "raw",  # of hpZ's backward gathers in a node; raw: the forward's weights
    topology: Topology | None = None,  # of the shard group; None: detected
    prefetch: bool = False,  # gather the next module's weights during a forward, in model.modules() order
    quiet: bool = False,
) -> Compressed:
    """Compress the collectives of every FSDP module in model. Collective: all ranks call it alike.

    Steps: 1. find the FSDP modules; 2. let modules that reshard to the same node groups share one pair of process
    groups (torch makes a pair per module); 3. install the collectives; 4. set prefetch; 5. say what was done, on
    rank 0, and at the first collective over which nodes.

    Of modules that an earlier call compressed, this one's settings count; what else that call compressed stays so.
    Raises BufferError if model holds no FSDP module, UnsupportedError for a module with several parameter groups and
    where no module is sharded (torch's `replicate`).
    """
    if not isinstance(model, nn.Module):
        raise BufferError(f"compress takes a model, got a {type(model).__name__}; pass the module given to fully_shard")
    if not isinstance(prefetch, bool):
        raise PlanError(f"prefetch must be True or False, got {prefetch!r}")
    if topology is not None and not isinstance(topology, Topology):
        raise TopologyError(f"topology must be a zcomm.Topology, got {topology!r}")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        kind = type(model).__name__
        raise BufferError(
            f"{kind} holds no FSDP2 module; call torch.distributed.fsdp.fully_shard on it first"
            + (
                " (it is wrapped by FSDP1, which zcomm.fsdp2 does not serve)"
                if kind == "FullyShardedDataParallel"
                else ""
            )
        )
    groups = [group for module in modules for group in _parameter_groups(module)]
    full = {group.mesh_info.shard_process_group for group in groups if hasattr(group.mesh_info, "shard_process_group")}
    if topology is not None:
        for group in full:
            topology.check_size(group.size())
    _refuse_what_fsdp2_has_no_place_for(modules, full)
    tells = not quiet and dist.get_rank() == 0
    compressed = Compressed(modules, full, weights, gradients, node_weights, topology, tells)
    for earlier in _installed_before(groups):
        earlier.give_up(modules)
    n_shared = _share_node_groups(groups)
    compressed.install(prefetch)
    if tells:
        print(compressed.describe(n_shared, prefetch), flush=True)
    return compressed


class Compressed:
    """What compress installed: its counts, and how to take it out again."""

    def __init__(
        self,
        modules: list[Any],
        full_groups: set[Any],  # shard groups; any other group that a gather comes with is hpZ's
        weights: Plan | Codec | str | None,
        gradients: Plan | Codec | str | None,
        node_weights: Plan | Codec | str | None,
        topology: Topology | None,
        tells_nodes: bool,  # once they are known
    ) -> None:
        self.modules = modules
        self._full_groups = full_groups
        self._gather = _by_group(weights, topology)
        is_torch_s = weights is None and node_weights == "raw"  # nothing asks for zcomm here
        self._node_gather = _by_group(None if is_torch_s else node_weights, None)
        self._reduce = _by_group(gradients, topology)
        self._prefetches = False
        self._tells_nodes = tells_nodes

    def install(self, prefetch: bool) -> None:
        """Give every module its collectives, and forward prefetch if asked for."""
        self._prefetches = prefetch
        if prefetch:
            _prefetch_forward(self.modules)
        for module in self.modules:
            if self._gather is not None or self._node_gather is not None:
                module.set_custom_all_gather(
                    _CompressedAllGather(self, self._gather, self._node_gather, self._full_groups)
                )
            if self._reduce is not None:
                module.set_custom_reduce_scatter(_CompressedReduceScatter(self, self._reduce))

    def remove(self) -> None:
        """Give every module that is still this call's torch's own collectives back; free what was made. Collective."""
        self.give_up(list(self.modules))

    def give_up(self, modules: list[Any]) -> None:
        """Give these modules torch's own collectives back; free what was made if none is left. Collective."""
        given = set(map(id, modules))
        for module in self.modules:
            if id(module) in given:
                module.set_custom_all_gather(DefaultAllGather())
                module.set_custom_reduce_scatter(DefaultReduceScatter())
                if self._prefetches:
                    module.set_modules_to_forward_prefetch([])
        self.modules = [module for module in self.modules if id(module) not in given]
        if not self.modules:
            for communicators in self._all():
                communicators.close()

    def stats(self) -> Stats:
        """Calls, bytes and seconds on this rank of all_gather, node_all_gather (hpZ) and reduce_scatter so far."""
        named = {
            "all_gather": self._gather,
            "node_all_gather": self._node_gather,
            "reduce_scatter": self._reduce,
        }
        totals = {name: each.total() for name, each in named.items() if each is not None}
        return {name: total for name, total in totals.items() if total.calls}

    def reset_stats(self) -> None:
        """Count anew from here."""
        for communicators in self._all():
            communicators.reset_stats()

    def describe(self, n_shared: int, prefetch: bool) -> str:
        """What was done, for people."""
        world = max((group.size() for group in self._full_groups), default=1)
        lines = [f"zcomm: {len(self.modules)} FSDP modules over {world} ranks"]
        if world == 1:
            lines.append("  nothing to compress: FSDP2 calls no collective in a shard group of one rank")
        for what, each in (("weight gathers", self._gather), ("gradient reductions", self._reduce)):
            lines.append(f"  {what}: {each.plan.codec if each is not None else 'torch, uncompressed'}")
        if n_shared or any(group not in self._full_groups for group in _node_groups(self.modules)):
            how = self._node_gather.plan.codec if self._node_gather is not None else "torch, uncompressed"
            lines.append(f"  backward gathers inside a node (hpZ): {how}; {n_shared} duplicate process groups freed")
        if prefetch:
            lines.append("  forward prefetch: each module gathers the next one's weights")
        return "\n".join(lines)

    def found(self, topology: Topology) -> None:
        """Say of which nodes a shard group is, the first time that is known."""
        if self._tells_nodes:
            self._tells_nodes = False
            hint = "" if topology.nodes > 1 else ": within one node compression pays only where its links are slow"
            print(f"zcomm: the shard group is {topology.shape}{hint}", flush=True)

    def _all(self) -> Iterator[_Communicators]:
        return (each for each in (self._gather, self._node_gather, self._reduce) if each is not None)


@dataclass
class _Communicators:
    """One communicator for each group and device that FSDP2 comes with, made when it first does, on all its ranks."""

    plan: Plan
    topology: Topology | None
    communicators: dict[tuple[Any, torch.device], Communicator]
    passed_through: CollectiveStats

    def over(self, group: dist.ProcessGroup, tensor: torch.Tensor) -> Communicator:
        """The one for tensors where this one is."""
        key = group, tensor.device
        found = self.communicators.get(key)
        if found is None:
            device = device_in(group, tensor.device)
            found = self.communicators[key] = Communicator(group, self.plan, self.topology, device)
        return found

    def total(self) -> CollectiveStats:
        """Over all groups."""
        each = [stats for comm in self.communicators.values() for stats in comm.stats().values()]
        return sum(each, self.passed_through + CollectiveStats())

    def reset_stats(self) -> None:
        """Count anew from here."""
        self.passed_through = CollectiveStats()
        for comm in self.communicators.values():
            comm.reset_stats()

    def close(self) -> None:
        """Free all."""
        for comm in self.communicators.values():
            comm.close()
        self.communicators.clear()

    def pass_through(self, dtype: torch.dtype) -> None:
        """Count a buffer that torch's own collective carries."""
        self.passed_through.calls += 1
        reason = f"{dtype} buffer, carried by torch.distributed"
        self.passed_through.uncompressed[reason] = self.passed_through.uncompressed.get(reason, 0) + 1


class _Allocation:
    """Both collectives take ordinary memory."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class _CompressedAllGather(_Allocation, AllGather):
    """Gathers a module's weights: over its shard group compressed, over hpZ's node group as asked."""

    def __init__(
        self,
        installed_by: Compressed,
        over_shards: _Communicators | None,
        over_node: _Communicators | None,
        full_groups: set[Any],
    ) -> None:
        self.installed_by = installed_by
        self._over_shards = over_shards
        self._over_node = over_node
        self._full_groups = full_groups
        self._torch = DefaultAllGather()

    def __call__(
        self,
        output_tensor: torch.Tensor,  # (size x n,)
        input_tensor: torch.Tensor,  # (n,), this rank's part of output_tensor
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather into output. On CPU the Work is returned even for a synchronous call: see [Note: overlap on CPU]."""
        is_whole = group in self._full_groups
        communicators = self._over_shards if is_whole else self._over_node
        if communicators is None:
            return self._torch(output_tensor, input_tensor, group, async_op)
        if input_tensor.dtype not in _COMPRESSIBLE:  # parameters of several dtypes travel as one buffer of uint8
            communicators.pass_through(input_tensor.dtype)
            return self._torch(output_tensor, input_tensor, group, async_op)
        overlapping = async_op or output_tensor.device.type == "cpu"
        communicator = communicators.over(group, output_tensor)
        if is_whole:
            self.installed_by.found(communicator.topology)
        work = communicator.all_gather_single(output_tensor, input_tensor, async_op=overlapping)
        return None if work is None else TorchWork(work, output_tensor)


class _CompressedReduceScatter(_Allocation, ReduceScatter):
    """Reduces a module's gradients onto its shard group. AVG, SUM and PREMUL_SUM as FSDP2 asks."""

    def __init__(self, installed_by: Compressed, over_shards: _Communicators) -> None:
        self.installed_by = installed_by
        self._over_shards = over_shards
        self._torch = DefaultReduceScatter()

    def __call__(
        self,
        output_tensor: torch.Tensor,  # (n,)
        input_tensor: torch.Tensor,  # (size x n,)
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce into output; complete when it returns, as FSDP2 ignores what is returned."""
        if input_tensor.dtype not in _COMPRESSIBLE:  # complex gradients
            self._over_shards.pass_through(input_tensor.dtype)
            return self._torch(output_tensor, input_tensor, group, op, async_op)
        communicator = self._over_shards.over(group, input_tensor)
        self.installed_by.found(communicator.topology)
        communicator.reduce_scatter_single(output_tensor, input_tensor, reduce_op(op))
        return None


def _by_group(setting: Plan | Codec | str | None, topology: Topology | None) -> _Communicators | None:
    return None if setting is None else _Communicators(plan_of(setting), topology, {}, CollectiveStats())


def _refuse_what_fsdp2_has_no_place_for(modules: list[Any], full_groups: set[Any]) -> None:
    for module in modules:
        n_groups = len(_parameter_groups(module))
        if n_groups > 1:
            raise UnsupportedError(
                f"a {type(module).__name__} has {n_groups} parameter groups, over meshes that its shard_placement_fn "
                "gives; FSDP2 takes a collective for modules of one: wrap what has another mesh as a module of its own"
            )
    if not full_groups and any(_parameter_groups(module) for module in modules):
        raise UnsupportedError(
            "no module of this model is sharded: replicate() averages gradients by torch's own all-reduce and has no "
            "place for another; use DistributedDataParallel with zcomm.ddp, or fully_shard"
        )


def _installed_before(groups: list[Any]) -> list[Compressed]:
    """What earlier calls of compress installed in these parameter groups."""
    comms = [comm for group in groups for comm in (group._all_gather_comm, group._reduce_scatter_comm)]
    found = [comm.installed_by for comm in comms if isinstance(comm, _CompressedAllGather | _CompressedReduceScatter)]
    return list({id(each): each for each in found}.values())


def _parameter_groups(module: Any) -> list[Any]:
    """FSDP2's parameter groups of a module; one attribute before torch 2.12, a list since."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _node_groups(modules: list[Any]) -> set[Any]:
    """The process groups of hpZ's backward gathers."""
    infos = [group.post_forward_mesh_info for module in modules for group in _parameter_groups(module)]
    return {info.shard_process_group for info in infos if info is not None and hasattr(info, "shard_process_group")}


def _share_node_groups(groups: list[Any]) -> int:
    """Give parameter groups that reshard to the same node groups one mesh, and free the others' process groups.

    fully_shard(reshard_after_forward=<int>) makes two process groups for every module it wraps; a hundred layers would
    hold two hundred. Returns how many were freed.
    """
    kept: dict[Any, Any] = {}
    spare: list[Any] = []  # meshes whose process groups nobody needs
    for group in groups:
        info = group.post_forward_mesh_info
        if info is None or info is group.mesh_info or info.mesh is group.mesh_info.mesh:
            continue
        key = (
            group.mesh_info.shard_process_group,
            tuple(info.mesh.mesh.flatten().tolist()),
            info.mesh.mesh.shape,
        )
        first = kept.setdefault(key, info)
        if first is info:
            continue
        if not spare:
            _meet(group.mesh_info)
        group.post_forward_mesh_info = first
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = first
        spare.append(info.mesh)
    for mesh in spare:
        for dimension in range(mesh.ndim):
            dist.destroy_process_group(mesh.get_group(dimension))
    return sum(mesh.ndim for mesh in spare)


def _meet(mesh_info: Any) -> None:
    """Wait for all ranks of a mesh: a group closed on one rank fails on another that is still connecting it."""
    for dimension in range(mesh_info.mesh.ndim):
        dist.barrier(group=mesh_info.mesh.get_group(dimension))


def _prefetch_forward(modules: list[Any]) -> None:
    """Each module gathers the next one's weights while it computes; the root, which comes first, the first one's."""
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
