"""From what the user has, a process group, a mesh, an MPI communicator, a local rank, to the transport over it."""

from __future__ import annotations

from typing import Any

from zcomm.errors import GroupError
from zcomm.transports.transport import Transport


def open_transport(
    group: Any,  # a torch ProcessGroup, a 1-D DeviceMesh, an MPI communicator, a Transport; None: torch's default group
) -> Transport:
    """The transport over group. Imports torch only for a torch group or None, mpi4py only for a communicator of it."""
    if any(kind.__module__.split(".")[0] == "mpi4py" for kind in type(group).__mro__):
        from zcomm.transports.mpi import MpiTransport

        return MpiTransport(group)
    if isinstance(group, Transport):
        return group
    module = type(group).__module__.split(".")[0]
    if group is None or module == "torch" or hasattr(group, "group_name"):
        from zcomm.transports.torch_dist import TorchTransport

        return TorchTransport(group)
    if isinstance(group, int):  # torch's GroupMember.NON_GROUP_MEMBER
        raise GroupError(
            "this process is not in the group (new_group returned NON_GROUP_MEMBER here); only its members may call"
        )
    raise GroupError(
        f"got a {type(group).__name__}; expected a torch.distributed ProcessGroup or DeviceMesh, "
        "an mpi4py communicator, or a zcomm transport"
    )
