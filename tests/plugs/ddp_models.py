"""Models under DDP, their batches, and what all ranks must have alike."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, ODD = 64, 67
SMALL_BUCKETS = {"bucket_cap_mb": 0.05}  # four buckets at first, others after the first backward


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ODD, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, ODD, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


def build(dtype: torch.dtype = torch.float32, **options) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Model().to(dtype), **options)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, ODD, (4, 9), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])


def assert_same_bits_on_all_ranks(tensors, group=None) -> None:
    """By a checksum that the ranks compare."""
    checksum = torch.tensor([zlib.crc32(b"".join(t.detach().contiguous().view(torch.uint8).numpy() for t in tensors))])
    everyones = [torch.empty_like(checksum) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, checksum, group=group)
    assert len(set(map(int, everyones))) == 1


def train(
    model: DistributedDataParallel, steps: int, first: int = 0, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Losses of this rank. After each step all ranks must hold the same parameters, to the bit."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_bits_on_all_ranks(model.parameters(), model.process_group)
        losses.append(loss.item())
    return losses


class Vector(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, n_elems: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(n_elems, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.vector * gradient).sum()
