"""The referee: bytes that crossed a node's link, as its network interface counted them.

Of an emulated node these are eth0's counters; where the link is paced in user space instead, what the pacer let pass.
Any rank may read its own node's counters at any time. (/sys/class/net shows the machine's interfaces, not the node's:
sysfs belongs to the namespace that mounted it.) What TCP sent again is in the bytes, and is counted by itself too: a
busy machine drops packets and answers late, as a network does, so bytes are compared beside that number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from zcomm.errors import ClusterError
from zcomm.tools.cluster_network import INTERFACE
from zcomm.transports.pace import Pacer


@dataclass(frozen=True)
class NodeCounters:
    """Bytes sent and received by one node, and how many TCP segments it sent that it had sent before."""

    node: int
    tx_bytes: int
    rx_bytes: int
    resent_segments: int = 0  # each at most a packet; their bytes are in tx_bytes too

    def since(self, earlier: NodeCounters) -> NodeCounters:
        """What passed after earlier was read."""
        return NodeCounters(
            self.node,
            self.tx_bytes - earlier.tx_bytes,
            self.rx_bytes - earlier.rx_bytes,
            self.resent_segments - earlier.resent_segments,
        )

    def plus(self, later: NodeCounters) -> NodeCounters:
        """Both together."""
        return NodeCounters(
            self.node,
            self.tx_bytes + later.tx_bytes,
            self.rx_bytes + later.rx_bytes,
            self.resent_segments + later.resent_segments,
        )


def node_counters() -> NodeCounters:
    """The counters of the node this rank runs on, now.

    Raises ClusterError outside `zcomm cluster`.
    """
    if "ZCOMM_CLUSTER" not in os.environ:
        raise ClusterError(
            "node_counters() was called outside an emulated cluster; start it by: zcomm cluster -- PROGRAM"
        )
    node = int(os.environ["NODE_RANK"])
    pacer = Pacer.from_environment()
    if pacer is not None:
        with pacer:
            return NodeCounters(node, *pacer.counters(node))
    return read_interface("self", node)


def read_interface(
    process: int | str,  # a pid, or "self"
    node: int,
) -> NodeCounters:
    """The counters of eth0, and of TCP, in the network namespace of process."""
    with open(f"/proc/{process}/net/dev") as table:
        for row in table:
            name, _, numbers = row.partition(":")
            if name.strip() == INTERFACE:
                columns = numbers.split()
                return NodeCounters(
                    node, tx_bytes=int(columns[8]), rx_bytes=int(columns[0]), resent_segments=_resent_segments(process)
                )
    raise ClusterError(f"no {INTERFACE} in the network namespace of process {process}; is it a node of a cluster?")


def _resent_segments(process: int | str) -> int:
    with open(f"/proc/{process}/net/snmp") as table:
        names, numbers = (row.split() for row in table if row.startswith("Tcp:"))
    return int(numbers[names.index("RetransSegs")])
