"""zcomm: drop-in collectives that send block-quantized bytes, hierarchically where nodes are far apart.

`import zcomm` imports nothing else: each name brings its module, and torch or another package, when it is first used.
"""

# ruff: noqa: F403, F405 - imported for type checkers only

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from zcomm.submodules import SubmoduleFinder
from zcomm.version import __version__

if TYPE_CHECKING:
    from zcomm import errors
    from zcomm.collectives.communicator import Communicator
    from zcomm.collectives.feedback import Feedback
    from zcomm.collectives.stats import CollectiveStats
    from zcomm.plan import Plan
    from zcomm.plugs import ddp, fsdp1, fsdp2, mpi
    from zcomm.plugs import torch_ops as ops
    from zcomm.plugs.torch_calls import *
    from zcomm.reduce_op import AVG, SUM, ReduceOp, premul_sum
    from zcomm.topology import Topology
    from zcomm.transports import local
    from zcomm.wire.registry import codec
    from zcomm.work import Work

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
    "errors": "zcomm.errors",
    "fsdp1": "zcomm.plugs.fsdp1",
    "fsdp2": "zcomm.plugs.fsdp2",
    "local": "zcomm.transports.local",
    "mpi": "zcomm.plugs.mpi",
    "ops": "zcomm.plugs.torch_ops",
}
_HOMES = {
    "AVG": "zcomm.reduce_op",
    "SUM": "zcomm.reduce_op",
    "CollectiveStats": "zcomm.collectives.stats",
    "Communicator": "zcomm.collectives.communicator",
    "Feedback": "zcomm.collectives.feedback",
    "Plan": "zcomm.plan",
    "ReduceOp": "zcomm.reduce_op",
    "Topology": "zcomm.topology",
    "Work": "zcomm.work",
    "codec": "zcomm.wire.registry",
    "premul_sum": "zcomm.reduce_op",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zcomm' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        if name in _MODULES:
            value = importlib.import_module(_MODULES[name])
        else:
            value = getattr(importlib.import_module(_HOMES.get(name, "zcomm.plugs.torch_calls")), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torch.distributed"):
            raise
        from zcomm.errors import MissingExtra

        raise MissingExtra(f"zcomm.{name} needs torch; pip install 'zcomm-collectives[torch]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names whose package is installed: help() and inspect ask for the value of each, and the others raise."""
    missing = {package for package in ("torch", "mpi4py") if not _is_installed(package)}
    return sorted(name for name in __all__ if _package_of(name) not in missing)


def _package_of(name: str) -> str | None:
    if name == "mpi":
        return "mpi4py"
    return None if name in _HOMES or name in ("__version__", "errors", "local") else "torch"


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


sys.meta_path.append(SubmoduleFinder(__name__, _MODULES))
