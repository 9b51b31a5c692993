"""The language model under FSDP2, over a mesh of four ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from language_model import Model, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

_meshes: dict[str, object] = {}


def mesh_of(kind: str):
    """A device mesh of the four ranks, made once: "4" or "2x2"."""
    if kind not in _meshes:
        if kind == "4":
            _meshes[kind] = init_device_mesh("cpu", (4,))
        else:
            _meshes[kind] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return _meshes[kind]


def build(mesh: str = "4", policy: MixedPrecisionPolicy | None = None, reshard: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    options = {"mesh": mesh_of(mesh), "mp_policy": policy or MixedPrecisionPolicy()}
    if reshard is not None:
        options["reshard_after_forward"] = reshard
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.full_tensor().float() for name, parameter in model.named_parameters()}


def train(model: nn.Module, steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
