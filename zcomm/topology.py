"""Which rank sits on which node, and who carries what between nodes.

A node is whatever shares a fast link. Any placement of ranks is a topology: rows, round robin, nodes of different size.
Between nodes every rank's data has one *porter* on each other node: the rank that sends the node's share of it out
(reduce-scatter) and takes it in for the whole node (all-gather). On even nodes the porter is the rank with the same
local index, which is ZeRO++'s slice reordering; taking indices modulo the node's size makes it work for any other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

from zcomm.errors import TopologyError
from zcomm.keywords import known_keywords


@known_keywords
@dataclass(frozen=True)
class Topology:
    """Nodes of a group, given as nodes x ranks_per_node (ranks in rows) or as node_of_rank."""

    nodes: int = 0
    ranks_per_node: int = 0  # 0 where nodes differ in size
    node_of_rank: tuple[int, ...] = ()  # numbered in order of their first rank

    def __post_init__(self) -> None:
        labels = _whole_numbers(self.node_of_rank)
        if labels:
            numbers: dict[int, int] = {}
            rows = tuple(numbers.setdefault(node, len(numbers)) for node in labels)
            sizes = {rows.count(node) for node in range(len(numbers))}
            found = (len(numbers), sizes.pop() if len(sizes) == 1 else 0)
            for name, given, is_so in zip(
                ("nodes", "ranks_per_node"), (self.nodes, self.ranks_per_node), found, strict=True
            ):
                if given and given != is_so:
                    raise TopologyError(
                        f"{name}={given} does not fit node_of_rank={self.node_of_rank}, which has {name}={is_so}"
                    )
        else:
            for name, given in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
                if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                    raise TopologyError(f"{name} must be a whole number of at least 1, got {given!r}")
            rows = tuple(rank // self.ranks_per_node for rank in range(self.nodes * self.ranks_per_node))
            found = (self.nodes, self.ranks_per_node)
        object.__setattr__(self, "nodes", found[0])
        object.__setattr__(self, "ranks_per_node", found[1])
        object.__setattr__(self, "node_of_rank", rows)

    @classmethod
    def of_labels(cls, labels: Sequence[str]) -> Topology:
        """Ranks with equal labels (host names, say) share a node."""
        numbers: dict[str, int] = {}
        return cls(node_of_rank=tuple(numbers.setdefault(label, len(numbers)) for label in labels))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.node_of_rank)

    @property
    def shape(self) -> str:
        """For people: "2 nodes x 4 ranks", or each rank's node where nodes differ in size."""
        if not self.ranks_per_node:
            return f"nodes {self.node_of_rank}"
        nodes, ranks = ("" if number == 1 else "s" for number in (self.nodes, self.ranks_per_node))
        return f"{self.nodes} node{nodes} x {self.ranks_per_node} rank{ranks}"

    @cached_property
    def ranks_of_node(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.node_of_rank) if node == wanted) for wanted in range(self.nodes)
        )

    @property
    def has_two_levels(self) -> bool:
        """Whether two hops differ from one: several nodes, and one of them with several ranks."""
        return 1 < self.nodes < self.size

    def porter(
        self,
        node: int,  # where the porter sits
        rank: int,  # whose data it carries
    ) -> int:
        """The rank on node that carries data of rank; rank itself on its own node."""
        ranks = self.ranks_of_node[node]
        home = self.ranks_of_node[self.node_of_rank[rank]]
        return ranks[home.index(rank) % len(ranks)]

    def carried_by(self, porter: int) -> tuple[int, ...]:
        """The ranks whose data porter carries, ascending; itself among them."""
        node = self.node_of_rank[porter]
        return tuple(rank for rank in range(self.size) if self.porter(node, rank) == porter)

    def check_size(self, size: int) -> None:
        """Raise TopologyError unless this topology is of a group of size ranks."""
        if self.size != size:
            raise TopologyError(f"topology of {self.shape} = {self.size} ranks, but the group has {size}")


def _whole_numbers(node_of_rank: Any) -> tuple[int, ...]:
    """The nodes of a list, tuple or array. Raises TopologyError for anything else."""
    try:
        if isinstance(node_of_rank, Mapping | Set):
            raise TypeError("not in the order of ranks")
        return tuple(index(node) for node in node_of_rank)
    except TypeError as error:
        raise TopologyError(
            f"node_of_rank must hold a whole number for each rank, (0, 0, 1, 1) say, got {node_of_rank!r}"
        ) from error


def node_label(environment: Mapping[str, str] = os.environ) -> str:
    """What tells this process's node from others: the launcher's node number where it gives one, and the host name."""
    launcher = environment.get("GROUP_RANK") or environment.get("SLURM_NODEID") or ""
    return f"{launcher}@{socket.gethostname()}"
