"""The topologies that collectives are tested on, and ranks as threads that run a program there."""

from __future__ import annotations

from zcomm import Communicator, Plan, Topology, local

FLAT = {f"{size} flat": (Topology(nodes=1, ranks_per_node=size), False) for size in (2, 3, 4)}
TWO_HOPS = {
    "2x2": (Topology(nodes=2, ranks_per_node=2), True),
    "2x2 round robin": (Topology(node_of_rank=(0, 1, 0, 1)), True),
    "3x2": (Topology(nodes=3, ranks_per_node=2), True),
    "2x4": (Topology(nodes=2, ranks_per_node=4), True),
    "2+1": (Topology(node_of_rank=(0, 0, 1)), True),
    "1+3": (Topology(node_of_rank=(0, 1, 1, 1)), True),
    "3+1+2": (Topology(node_of_rank=(0, 1, 0, 2, 0, 2)), True),
}
PLACEMENTS = {**FLAT, **TWO_HOPS}


def run(placement: tuple[Topology, bool], program, **settings):
    """The program's results on every rank of the placement, called with a communicator."""
    topology, two_hops = placement
    plan = Plan(**{"hierarchical": two_hops, "one_shot_bytes": 0, **settings})

    def main(transport):
        with Communicator(transport, plan, topology) as comm:
            return program(comm)

    return local.run(topology.size, main)
