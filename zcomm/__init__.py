"""zcomm: drop-in collectives that send block-quantized bytes, hierarchically where nodes are far apart.

`import zcomm` needs numpy only; what needs torch or another package is imported when it is first used.
"""

# ruff: noqa: F403, F405 - the calls under torch's names are imported for type checkers only

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
    from zcomm.plugs.torch_calls import *

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
    "gather",
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
    "scatter",
    "send",
]

_MODULES = {
    "ddp": "zcomm.plugs.ddp",
    "fsdp1": "zcomm.plugs.fsdp1",
    "fsdp2": "zcomm.plugs.fsdp2",
    "mpi": "zcomm.plugs.mpi",
    "ops": "zcomm.plugs.torch_ops",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in __all__:  # the others are above
        return getattr(importlib.import_module("zcomm.plugs.torch_calls"), name)
    raise AttributeError(f"module 'zcomm' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
