"""From what the user has, a process group, a mesh, an MPI or NCCL communicator, to the transport over it."""

from __future__ import annotations

from typing import Any

from zcomm.errors import BufferError, GroupError
from zcomm.transports.transport import Transport


def open_transport(
    group: Any,  # a torch ProcessGroup, 1-D DeviceMesh, MPI or NCCL communicator, Transport; None: torch's default
    device: str | None = None,  # where the arrays will be: "cpu", "cuda:0"; None: where the group itself moves bytes
) -> Transport:
    """The transport over group. Imports torch, mpi4py, cupy only for what is theirs, torch also for None."""
    if any(kind.__module__.split(".")[0] == "mpi4py" for kind in type(group).__mro__):
        if device not in (None, "cpu"):
            from zcomm.transports.mpi_device import MpiDeviceTransport

            return MpiDeviceTransport(group, device)
        from zcomm.transports.mpi import MpiTransport

        return MpiTransport(group)
    if isinstance(group, Transport):
        if device not in (None, group.device):
            raise BufferError(f"the transport moves bytes on {group.device}, not on {device}; leave the device out")
        return group
    module = type(group).__module__.split(".")[0]
    if module in ("cupy", "cupy_backends") and hasattr(group, "rank_id"):
        from zcomm.transports.nccl import NcclTransport

        return NcclTransport(group, device)
    if module == "cupyx":
        raise GroupError(
            f"got a {type(group).__name__} of cupyx.distributed; expected the cupy.cuda.nccl.NcclCommunicator itself "
            "(docs/nccl.md shows how to make one)"
        )
    if group is None or module == "torch" or hasattr(group, "group_name"):
        from zcomm.transports.torch_dist import TorchTransport

        return TorchTransport(group, device)
    if isinstance(group, int):  # torch's GroupMember.NON_GROUP_MEMBER
        raise GroupError(
            "this process is not in the group (new_group returned NON_GROUP_MEMBER here); only its members may call"
        )
    raise GroupError(
        f"got a {type(group).__name__}; expected a torch.distributed ProcessGroup or DeviceMesh, "
        "an mpi4py communicator, a cupy.cuda.nccl.NcclCommunicator, or a zcomm transport"
    )
