"""Placements of ranks, their porters, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcomm.errors import TopologyError
from zcomm.topology import Topology, node_label

PLACEMENTS = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(lambda rows: Topology(node_of_rank=tuple(rows)))


def test_rows_and_labels_say_the_same():
    rows = Topology(nodes=2, ranks_per_node=2)

    assert rows == Topology.of_labels(["a", "a", "b", "b"]) == Topology(node_of_rank=(7, 7, 3, 3))
    assert rows.node_of_rank == (0, 0, 1, 1)
    assert eval(repr(rows)) == rows
    assert hash(rows) == hash(Topology(nodes=2, ranks_per_node=2))
    assert rows == Topology(node_of_rank=np.array([7, 7, 3, 3])) == Topology(node_of_rank=[7, 7, 3, 3])


def test_the_porter_on_even_nodes_has_the_same_local_index():
    """ZeRO++'s slice reordering: shard p goes to local rank p mod D, position p div D."""
    for nodes, ranks_per_node in ((2, 4), (2, 2), (4, 8)):
        topology = Topology(nodes=nodes, ranks_per_node=ranks_per_node)
        order = [shard for local in topology.ranks_of_node[0] for shard in topology.carried_by(local)]

        # the paper's map: input slice p is moved to position (p mod D) * N + p div D
        position = {p: (p % ranks_per_node) * nodes + p // ranks_per_node for p in range(topology.size)}
        assert order == sorted(position, key=position.__getitem__)
    assert [s for q in (0, 1, 2, 3) for s in Topology(nodes=2, ranks_per_node=4).carried_by(q)] == [
        0,
        4,
        1,
        5,
        2,
        6,
        3,
        7,
    ]


@given(PLACEMENTS)
def test_every_rank_has_one_porter_on_every_node(topology):
    for node in range(topology.nodes):
        carried = [rank for porter in topology.ranks_of_node[node] for rank in topology.carried_by(porter)]
        assert sorted(carried) == list(range(topology.size))
    for rank in range(topology.size):
        assert topology.porter(topology.node_of_rank[rank], rank) == rank


@given(PLACEMENTS)
def test_two_levels_only_where_they_differ_from_one(topology):
    sizes = [len(ranks) for ranks in topology.ranks_of_node]

    assert topology.has_two_levels == (len(sizes) > 1 and max(sizes) > 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": 0, "ranks_per_node": 2},
        {"nodes": 2},
        {"nodes": -1, "ranks_per_node": 2},
        {"nodes": 2, "ranks_per_node": 0},
        {"nodes": 2.0, "ranks_per_node": 2},
        {"nodes": True, "ranks_per_node": 2},
        {},
        {"nodes": 3, "node_of_rank": (0, 0, 1, 1)},
        {"ranks_per_node": 2, "node_of_rank": (0, 0, 1)},
        {"node_of_rank": 5},
        {"node_of_rank": "0011"},
        {"node_of_rank": (0.5, 1)},
        {"node_of_rank": (None, None)},
        {"node_of_rank": ({}, 1)},
        {"node_of_rank": {0: 0, 1: 0}},
    ],
)
def test_what_is_not_a_topology_is_refused(settings):
    with pytest.raises(TopologyError):
        Topology(**settings)


def test_a_topology_of_another_size_is_refused():
    with pytest.raises(TopologyError, match=r"2 nodes x 2 ranks = 4 ranks, but the group has 6"):
        Topology(nodes=2, ranks_per_node=2).check_size(6)


def test_the_launcher_s_node_number_tells_nodes_of_one_host_apart():
    labels = [node_label({"GROUP_RANK": number}) for number in ("0", "0", "1")]

    assert labels[0] == labels[1] != labels[2]
    assert node_label({}) == node_label({})
