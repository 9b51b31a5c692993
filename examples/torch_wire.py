"""FSDP2 through torch's own collectives, with another dtype on the wire than the parameters have.

What a torch user can do today without zcomm, and what zcomm is compared with: cast, let torch gather and reduce-scatter
the narrower elements, cast back. The gather returns a Work that casts when it is waited for, so it overlaps with
compute as zcomm's does. (bf16 *compute* would send bf16 too, but is 5 to 10 times slower than fp32 on many CPUs.)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CastWhenDone(dist.Work):
    """A gather under way; waiting for it widens what came. (FSDP2 waits for subclasses of dist.Work only.)"""

    def __init__(self, gather: dist.Work, narrow: torch.Tensor, wide: torch.Tensor) -> None:
        super().__init__()
        self.gather, self.narrow, self.wide = gather, narrow, wide

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the gather is done, then cast into FSDP2's buffer."""
        self.gather.wait()
        self.wide.copy_(self.narrow)
        return True


class AllGather:
    """FSDP2's all-gather, sent as `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2's own buffer, in the parameters' dtype."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,  # (world * n,), written
        input_tensor: torch.Tensor,  # (n,), this rank's slice of output_tensor
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Start the gather."""
        narrow = torch.empty(output_tensor.shape, dtype=self.dtype, device=output_tensor.device)
        gather = all_gather_single(narrow, input_tensor.to(self.dtype), group=group, async_op=True)
        return CastWhenDone(gather, narrow, output_tensor)


class ReduceScatter:
    """FSDP2's reduce-scatter, sent as `dtype`: FSDP2 casts gradients into the buffers and out of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of the wire's dtype instead of the gradients'."""
        return torch.empty(size, dtype=self.dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,  # (n,), written
        input_tensor: torch.Tensor,  # (world * n,)
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce and scatter; FSDP2 ignores what this returns, so it is complete at return."""
        reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


def use(model: nn.Module, dtype: torch.dtype) -> None:
    """Send every FSDP2 group's collectives as dtype, and gather each group while the one before computes."""
    install(model, AllGather(dtype), ReduceScatter(dtype))
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def install(model: nn.Module, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
    """Give every FSDP2 group in model these two collectives (the setters are not recursive)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(all_gather)
            module.set_custom_reduce_scatter(reduce_scatter)
