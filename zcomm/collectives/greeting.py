"""The first message of a communicator: ranks compare what must be equal and learn who sits on which node."""

from __future__ import annotations

import ctypes
import json
import zlib

import numpy as np

from zcomm.errors import EngineError, MismatchError
from zcomm.plan import Plan
from zcomm.topology import Topology, node_label
from zcomm.transports.transport import Parcel, Transport
from zcomm.version import __version__

GREETING_BYTES = 2048  # JSON, padded with spaces; a fixed size, so that ranks that disagree can still read each other
_COMPARED = ("version", "plan", "topology")


def greet(
    transport: Transport,
    plan: Plan,
    topology: Topology | None,  # None: to be detected
    tag: int,
) -> Topology:
    """Exchange greetings between all ranks and settle the topology.

    Raises MismatchError, on every rank, if one differs from rank 0 in version, plan or topology.
    """
    own = {
        "version": __version__,
        "plan": repr(plan),
        "topology": str(topology.node_of_rank) if topology else "detected",
        "node": node_label(),
    }
    if transport.size == 1:
        return topology or Topology(nodes=1, ranks_per_node=1)
    if transport.device != "cpu":
        raise EngineError(f"greeting over {transport.device} needs the cuda engine, which this version does not have")
    payload = json.dumps(own).encode()
    if len(payload) > GREETING_BYTES:
        own["topology"] = f"of {transport.size} ranks, checksum {zlib.crc32(own['topology'].encode()):08x}"
        payload = json.dumps(own).encode()
    greetings = [json.loads(text) for text in _exchange(transport, payload, tag, plan.timeout_s)]
    for rank, greeting in enumerate(greetings):
        for field in _COMPARED:
            if greeting[field] != greetings[0][field]:
                raise MismatchError(
                    f"rank {rank} of {transport.group_name} has {field} {greeting[field]}, rank 0 has "
                    f"{greetings[0][field]}; make the communicator with the same settings on every rank"
                )
    return topology or Topology.of_labels([greeting["node"] for greeting in greetings])


def _exchange(transport: Transport, payload: bytes, tag: int, timeout_s: float | None) -> list[bytes]:
    """Send payload to every rank; all payloads, by rank."""
    memory = transport.empty(GREETING_BYTES * transport.size)
    parcels = [
        Parcel(rank, memory[rank * GREETING_BYTES : (rank + 1) * GREETING_BYTES]) for rank in range(transport.size)
    ]
    nbytes = GREETING_BYTES * transport.size
    view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(transport.address(memory)))
    view = view.reshape(transport.size, GREETING_BYTES)
    view[transport.rank] = ord(" ")
    view[transport.rank, : len(payload)] = np.frombuffer(payload, np.uint8)
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    own = parcels[transport.rank].payload
    exchange = transport.open([Parcel(peer, own) for peer in peers], [parcels[peer] for peer in peers], tag, timeout_s)
    exchange.start()
    exchange.wait()
    exchange.close()
    return [row.tobytes() for row in view]
