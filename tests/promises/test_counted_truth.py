"""Promise 13: stats() counts calls, raw and wire bytes by level and seconds, and a transport that is watched agrees."""

from __future__ import annotations

import forms
import numpy as np
import pytest
from planted import assert_noticed, faults

import zcomm
from zcomm import Communicator, Plan, local
from zcomm.collectives import call
from zcomm.collectives.agreement import CARD_BYTES
from zcomm.collectives.run import Run
from zcomm.collectives.schedule import Layout
from zcomm.collectives.stats import total

N = 512


def watched(transport, node_of_rank) -> dict[str, int]:
    """Bytes that a transport is given to send from now on, by level."""
    sent = {"intra": 0, "inter": 0}
    opened = transport.open

    def watch(outgoing, *rest):
        for parcel in outgoing:
            is_near = node_of_rank[parcel.peer] == node_of_rank[transport.rank]
            sent["intra" if is_near else "inter"] += parcel.payload.size
        return opened(outgoing, *rest)

    transport.open = watch
    return sent


def check(placement: str) -> None:
    topology = forms.PLACEMENTS[placement]
    size, nodes = topology.size, topology.nodes

    def of_rank(transport, codec):
        plan = Plan(codec, check="never", one_shot_bytes=0)
        with Communicator(transport, plan, topology) as comm:
            base = transport.wire_bytes_sent
            assert base == (size - 1) * CARD_BYTES
            counted = {}
            for name, form in forms.FORMS.items():
                comm.reset_stats()
                before = transport.wire_bytes_sent
                sent = watched(transport, topology.node_of_rank)
                forms.carry_out(form(comm, np.ones(N * size, np.float32), "sum", np.copy), async_op=True)
                del transport.open
                stats = total(comm.stats())
                assert stats.calls == 1, name
                assert stats.wire_bytes_intra == sent["intra"], (name, codec)
                assert stats.wire_bytes_inter == sent["inter"], (name, codec)
                assert stats.wire_bytes == transport.wire_bytes_sent - before, (name, codec)
                if stats.wire_bytes:
                    assert stats.codec_s > 0
                counted[name] = stats
            return counted

    for codec in ("raw", "bf16", "int8", "int4", "mxfp4", "nvfp4", "hadamard:int4"):
        shard, whole = zcomm.codec(codec).nbytes(N), N * 4
        for counted in local.run(size, of_rank, codec):
            if topology.ranks_per_node and topology.has_two_levels:
                per_node = size // nodes
                scatter = ((per_node - 1) * nodes * shard, (nodes - 1) * shard)
            elif not topology.has_two_levels:
                scatter = ((size - 1) * shard, 0)
            else:
                continue  # uneven nodes: watched, without a formula
            for name, times in (("reduce_scatter_single", 1), ("all_gather_single", 1), ("all_reduce", 2)):
                stats = counted[name]
                assert (stats.wire_bytes_intra, stats.wire_bytes_inter) == (times * scatter[0], times * scatter[1])
                assert stats.raw_bytes == times * sum(scatter) // shard * whole, name


@pytest.mark.parametrize("placement", [name for name in forms.PLACEMENTS if name != "1"])
def test_bytes_are_the_codec_s_summed_by_level_in_stats_and_on_the_wire(placement):
    check(placement)


def near_and_far_are_mixed_up(monkeypatch):
    count = call._count

    def mixed(stats, settled):
        schedule = settled.schedule
        count(
            stats,
            settled._replace(
                schedule=schedule._replace(
                    wire_bytes_intra=schedule.wire_bytes_inter, wire_bytes_inter=schedule.wire_bytes_intra
                )
            ),
        )

    monkeypatch.setattr(call, "_count", mixed)


def padding_is_not_counted(monkeypatch):
    route = Layout.route

    def shorter(self, outgoing, incoming, n_elems_out):
        made = route(self, outgoing, incoming, n_elems_out)
        self._intra -= 1 if made.outgoing else 0
        return made

    monkeypatch.setattr(Layout, "route", shorter)


def raw_bytes_are_those_of_the_wire(monkeypatch):
    schedule = Layout.schedule

    def equal(self, *args):
        made = schedule(self, *args)
        return made._replace(raw_bytes=made.wire_bytes_intra + made.wire_bytes_inter)

    monkeypatch.setattr(Layout, "schedule", equal)


def coding_takes_no_time(monkeypatch):
    monkeypatch.setattr(Run, "codec_s", property(lambda self: 0.0, lambda self, value: None))


@faults(near_and_far_are_mixed_up, padding_is_not_counted, raw_bytes_are_those_of_the_wire, coding_takes_no_time)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check("2x2"), fault, monkeypatch)
