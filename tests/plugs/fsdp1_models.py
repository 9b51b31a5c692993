"""Models under FSDP1."""

from __future__ import annotations

import torch
import torch.distributed as dist
from language_model import Block, Model, loss_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def wrapped(model: nn.Module, **options) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def build(**options) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    return wrapped(Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def gradients(model: nn.Module) -> torch.Tensor:
    """This rank's shards of all gradients."""
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack([loss.detach(), norm.detach().float()])
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=model.process_group)
        losses.extend(mean.tolist())
    return losses


class Vector(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, n_elems: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(n_elems))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.vector * gradient).sum()
