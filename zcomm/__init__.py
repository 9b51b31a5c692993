"""zcomm: drop-in collectives that send block-quantized bytes, hierarchically where nodes are far apart.

`import zcomm` needs numpy only; what needs torch or another package is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zcomm import errors
from zcomm.collectives.communicator import Communicator
from zcomm.collectives.feedback import Feedback
from zcomm.collectives.stats import CollectiveStats
from zcomm.plan import Plan
from zcomm.reduce_op import AVG, SUM, ReduceOp, premul_sum
from zcomm.topology import Topology
from zcomm.transports import local
from zcomm.version import __version__
from zcomm.wire.registry import codec
from zcomm.work import Work

if TYPE_CHECKING:
    from zcomm.plugs import ddp, fsdp1, fsdp2, mpi
    from zcomm.plugs import torch_ops as ops
    from zcomm.plugs.torch_calls import (
        all_gather,
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        broadcast,
        irecv,
        isend,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        send,
    )

__all__ = [
    "AVG",
    "SUM",
    "CollectiveStats",
    "Communicator",
    "Feedback",
    "Plan",
    "ReduceOp",
    "Topology",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "codec",
    "ddp",
    "errors",
    "fsdp1",
    "fsdp2",
    "irecv",
    "isend",
    "local",
    "mpi",
    "ops",
    "premul_sum",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "send",
]

_TORCH_CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "send",
)
_MODULES = {
    "ddp": "zcomm.plugs.ddp",
    "fsdp1": "zcomm.plugs.fsdp1",
    "fsdp2": "zcomm.plugs.fsdp2",
    "mpi": "zcomm.plugs.mpi",
    "ops": "zcomm.plugs.torch_ops",
}
_LAZY = {**_MODULES, **dict.fromkeys(_TORCH_CALLS, "zcomm.plugs.torch_calls")}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zcomm' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = importlib.import_module(_LAZY[name])
    return getattr(module, name) if name in _TORCH_CALLS else module


def __dir__() -> list[str]:
    return sorted(__all__)
