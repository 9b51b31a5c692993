"""All-to-all in one hop and in two: every part where it belongs, the same bits either way, fewer messages across."""

from __future__ import annotations

import collections
import threading

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import PLACEMENTS, TWO_HOPS, run

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.collectives.all_to_all import BUNDLE_BYTES, MOST_CHUNKS

FLOAT32 = np.dtype(np.float32)
WORLDS = {
    **PLACEMENTS,
    "1": (Topology(nodes=1, ranks_per_node=1), True),
    "2x4 round robin": (Topology(node_of_rank=(0, 1) * 4), True),
    "5+1+2": (Topology(node_of_rank=(0, 0, 0, 1, 0, 2, 2, 0)), True),
}


def counts_of(size: int, call: int) -> np.ndarray:
    """(size, size) elements that each rank sends to each; others in every call, some none."""
    if call == 0:
        return np.full((size, size), 100)
    rank, peer = np.indices((size, size))
    return (rank * 37 + peer * 101 * call) % (300 + 1000 * call) * ((rank + 2 * peer + call) % 5 > 0)


def inputs_of(counts: np.ndarray) -> list[np.ndarray]:
    return [oracle.values(rank, int(row.sum()), FLOAT32) for rank, row in enumerate(counts)]


def expected(counts: np.ndarray, rank: int, codec_from) -> np.ndarray:
    """What comes to a rank: each part as its bytes decode, by codec_from(sender)."""
    inputs, starts = inputs_of(counts), np.cumsum(np.pad(counts, ((0, 0), (1, 0))), axis=1)
    parts = [
        oracle.through(codec_from(peer), inputs[peer][starts[peer, rank] : starts[peer, rank + 1]])
        for peer in range(len(counts))
    ]
    return np.concatenate(parts)


def send_all(comm, counts: np.ndarray, async_op: bool = False):
    """The output, and the work if there is one."""
    receives = counts[:, comm.rank].tolist()
    out = np.full(sum(receives), np.nan, np.float32)
    sends = counts[comm.rank].tolist()
    splits = (None, None) if (counts == 100).all() else (receives, sends)
    return out, comm.all_to_all_single(out, inputs_of(counts)[comm.rank], *splits, async_op=async_op)


@pytest.mark.parametrize("name", ["raw", "int8", "int4:64"])
@pytest.mark.parametrize("chunk_elems", [1, 1 << 20])
@pytest.mark.parametrize("world", WORLDS)
def test_every_part_comes_where_it_belongs_in_either_form(world, name, chunk_elems):
    topology, _ = WORLDS[world]
    tables = [counts_of(topology.size, call) for call in range(4)]
    codec = zcomm.codec("raw" if topology.size == 1 else name)

    def program(comm):
        return [send_all(comm, counts)[0] for counts in tables]

    for two_hops in (True, False):
        results = run((topology, two_hops), program, codec=name, chunk_elems=chunk_elems)

        for rank, outs in enumerate(results):
            for counts, out in zip(tables, outs, strict=True):
                assert out.tobytes() == expected(counts, rank, lambda _: codec).tobytes()


@pytest.mark.parametrize("world", TWO_HOPS)
def test_parts_inside_a_node_travel_in_its_codec_and_are_quantized_once(world):
    topology, _ = TWO_HOPS[world]
    counts = counts_of(topology.size, 2)

    results = run((topology, True), lambda comm: send_all(comm, counts)[0], codec="int4", intra_codec="raw")

    node = topology.node_of_rank
    for rank, out in enumerate(results):
        wanted = expected(
            counts, rank, lambda peer, rank=rank: zcomm.codec("raw" if node[peer] == node[rank] else "int4")
        )
        assert out.tobytes() == wanted.tobytes()


def test_a_long_part_is_cut_into_a_bounded_number_of_chunks():
    counts = np.array([[0, 5000, 3, 70_001], [1, 0, 0, 0], [0, 0, 9000, 0], [12_345, 0, 0, 256]])
    topology = Topology(nodes=2, ranks_per_node=2)

    def program(comm):
        out = send_all(comm, counts)[0]
        (settled,) = comm._conductor._settler._kept.values()
        return out, len(settled.schedule.chunks)

    results = run((topology, True), program, codec="int4", chunk_elems=1)

    for rank, (out, chunks) in enumerate(results):
        assert chunks <= MOST_CHUNKS
        assert out.tobytes() == expected(counts, rank, lambda _: zcomm.codec("int4")).tobytes()
    assert max(chunks for _, chunks in results) > 8  # of 256 elements and more
    assert len({chunks for _, chunks in results}) == 2  # ranks of a node have as many, nodes may differ


@pytest.mark.parametrize("longer", [MOST_CHUNKS * 256 + 1, 3 * MOST_CHUNKS * 256 - 1])
def test_a_part_comes_whole_where_a_longer_one_has_fewer_cuts(longer):
    counts = np.full((4, 4), MOST_CHUNKS * 256)  # as many cuts as there may be
    np.fill_diagonal(counts, longer)

    results = run((Topology(nodes=2, ranks_per_node=2), True), lambda comm: send_all(comm, counts)[0], chunk_elems=1)

    for rank, out in enumerate(results):
        assert out.tobytes() == expected(counts, rank, lambda _: zcomm.codec("int8")).tobytes()


def test_asynchronous_calls_keep_their_order_with_other_collectives():
    topology = Topology(node_of_rank=(0, 1, 0, 1, 1))
    tables = [counts_of(5, call) for call in range(1, 7)]

    def program(comm):
        works, outs, sums = [], [], []
        for counts in tables:
            out, work = send_all(comm, counts, async_op=True)
            total = np.full(50, comm.rank + 1, np.float32)
            works += [work, comm.all_reduce(total, async_op=True)]
            outs.append(out)
            sums.append(total)
        for work in reversed(works):
            work.wait()
        return outs, sums

    for rank, (outs, sums) in enumerate(run((topology, True), program, codec="raw")):
        for counts, out in zip(tables, outs, strict=True):
            assert out.tobytes() == expected(counts, rank, lambda _: zcomm.codec("raw")).tobytes()
        assert all((total == 15).all() for total in sums)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_placement_any_counts_any_chunks(data):
    node_of_rank = tuple(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=7), label="node of rank"))
    size = len(node_of_rank)
    parts = st.one_of(st.integers(0, 3), st.sampled_from([255, 256, 257, 600, 3001, 4096, 4097, 20_000]))
    rows = st.lists(st.lists(parts, min_size=size, max_size=size), min_size=size, max_size=size)
    counts = np.array(data.draw(rows, label="counts"))
    outer, inner = (
        data.draw(st.sampled_from(["raw", "int8", "int3:64", "bf16"]), label=at) for at in ("outer", "inner")
    )
    chunk_elems = data.draw(st.sampled_from([1, 3000, 1 << 20]), label="chunk_elems")
    topology = Topology(node_of_rank=node_of_rank)

    def program(comm):
        return send_all(comm, counts)[0]

    results = run((topology, True), program, codec=outer, intra_codec=inner, chunk_elems=chunk_elems)

    node = topology.node_of_rank
    for rank, out in enumerate(results):

        def codec_from(peer, rank=rank):
            inside = topology.has_two_levels and node[peer] == node[rank]
            return zcomm.codec(inner if inside else outer)

        assert out.tobytes() == expected(counts, rank, codec_from).tobytes()


def messages(topology: Topology, two_hops: bool, counts: np.ndarray, **settings):
    """Messages and bytes between nodes of one call that is not compared; the ranks' stats."""
    sent: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()

    def main(transport):
        comm = Communicator(transport, Plan(hierarchical=two_hops, check="never", **settings), topology)
        before, opened = transport.wire_bytes_sent, transport.open

        def count(outgoing, incoming, tag, timeout_s):
            across = [
                parcel.payload.nbytes
                for parcel in outgoing
                if topology.node_of_rank[parcel.peer] != topology.node_of_rank[transport.rank]
            ]
            with lock:
                sent.update(messages=len(across), nbytes=sum(across))
            return opened(outgoing, incoming, tag, timeout_s)

        transport.open = count
        send_all(comm, counts)
        stats = comm.stats()["all_to_all"]
        assert stats.wire_bytes == transport.wire_bytes_sent - before
        return stats

    return sent, local.run(topology.size, main)


@pytest.mark.parametrize("world", TWO_HOPS)
def test_two_hops_send_fewer_messages_across_with_the_same_bytes(world):
    topology, _ = TWO_HOPS[world]
    counts = np.full((topology.size, topology.size), 100)
    nodes = [len(ranks) for ranks in topology.ranks_of_node]

    flat, _ = messages(topology, False, counts, codec="int8")
    two_hops, stats = messages(topology, True, counts, codec="int8")

    part = zcomm.codec("int8").nbytes(100)
    pairs = topology.size**2 - sum(n * n for n in nodes)
    assert flat == {"messages": pairs, "nbytes": pairs * part}
    assert two_hops == {"messages": topology.size * (len(nodes) - 1), "nbytes": pairs * part}
    assert two_hops["messages"] < flat["messages"]
    assert sum(each.wire_bytes_inter for each in stats) == pairs * part


@pytest.mark.parametrize("world", TWO_HOPS)
def test_parts_too_large_for_a_bundle_go_directly_beside_the_bundles(world):
    topology, _ = TWO_HOPS[world]
    size, node = topology.size, np.array(topology.node_of_rank)
    counts = np.full((size, size), 10)
    counts[:, 0] = 20_000  # raw: a bundle of several, or of one, is over the limit for rank 0 alone
    pairs = {rank: int((node != node[rank]).sum()) for rank in range(size)}

    sent, stats = messages(topology, True, counts, codec="raw", chunk_elems=1 << 20)

    others = topology.nodes - 1
    assert BUNDLE_BYTES < 80_000
    assert sent["messages"] == pairs[0] + (size - 1) * others
    flat, _ = messages(topology, False, counts, codec="raw")
    assert sent["nbytes"] == flat["nbytes"]
    neighbours = [len(topology.ranks_of_node[each]) - 1 for each in node]
    assert [each.wire_bytes_intra for each in stats] == [
        sum(
            zcomm.codec("raw").nbytes(int(counts[rank, to]))
            for to in range(size)
            if node[to] == node[rank] and to != rank
        )
        + relayed(topology, rank) * zcomm.codec("raw").nbytes(10)
        + 8 * size * neighbours[rank]
        for rank in range(size)
    ]

    results = run((topology, True), lambda comm: send_all(comm, counts)[0], codec="int8", chunk_elems=3000)
    for rank, out in enumerate(results):
        assert out.tobytes() == expected(counts, rank, lambda _: zcomm.codec("int8")).tobytes()


def relayed(topology: Topology, rank: int) -> int:
    """Ranks of other nodes that rank's neighbours carry for, without rank 0, which is sent to directly."""
    node = topology.node_of_rank[rank]
    return sum(
        topology.node_of_rank[to] != node and topology.porter(node, to) != rank for to in range(1, topology.size)
    )


def test_splits_that_do_not_match_are_named_on_every_rank():
    def program(comm):
        sends, receives = [10] * 4, [10] * 4
        if comm.rank == 2:
            sends = [10, 9, 10, 10]
        with pytest.raises(zcomm.errors.MismatchError) as caught:
            comm.all_to_all_single(np.empty(40, np.float32), np.ones(sum(sends), np.float32), receives, sends)
        return str(caught.value)

    told = run((Topology(nodes=2, ranks_per_node=2), True), program)

    assert told.count(told[0]) == 4
    assert "rank 2 sends 9 elements to rank 1, which expects 10" in told[0]
