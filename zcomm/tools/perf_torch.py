"""The ranks as torchrun or `zcomm cluster` gives them: torch.distributed over gloo, or NCCL for GPUs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from zcomm.errors import GroupError, MissingExtra
from zcomm.tools.perf_options import PerfError
from zcomm.transports.pace import RATE_VARIABLE

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtra("this launcher's ranks are torch's, which is missing; pip install torch") from error


class TorchWorld:
    """torch's default group."""

    def __init__(self, device: str) -> None:
        self.library = "gloo" if device == "cpu" else "nccl"
        if device == "cuda":
            if not torch.cuda.is_available():
                raise PerfError("--device cuda needs a GPU that torch can use; torch.cuda.is_available() is False")
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            dist.init_process_group(self.library)
        except (ValueError, RuntimeError) as error:  # MASTER_ADDR and the like; a peer that never came
            raise GroupError(f"torch cannot join the ranks: {str(error).splitlines()[0]}") from error
        self.versions = f"torch {torch.__version__} with {self.library}"
        # A link paced in user space does not slow torch's own collectives: no peers (low-bandwidth-cluster.md).
        self.own_dtypes: tuple[str, ...] = () if RATE_VARIABLE in os.environ else ("float32", "bfloat16")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.group = dist.group.WORLD
        self._device = torch.device(device)
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """A tensor on the device."""
        return torch.from_numpy(values.copy()).to(self._device, getattr(torch, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        """float32 values of a tensor."""
        return array.float().cpu().numpy()

    def own(self, collective: str, output: Any, input: Any) -> None:
        """torch's own collective."""
        if collective == "all_reduce":
            dist.all_reduce(output)
        elif collective == "all_gather":
            self._gather(output, input)
        else:
            self._scatter(output, input)

    def synchronize(self) -> None:
        """Return when the device has finished."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Return when all ranks have come."""
        dist.barrier()
        self.synchronize()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the group."""
        dist.barrier()
        dist.destroy_process_group()
