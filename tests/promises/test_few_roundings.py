"""Promise 2: one quantization per hop, whatever the number of ranks; one message to each peer and hop."""

from __future__ import annotations

import collections

import forms
import numpy as np
import oracle
import pytest
from planted import assert_noticed, faults

import zcomm
from zcomm import Communicator, Plan, local
from zcomm.collectives import run as run_module
from zcomm.collectives import settle
from zcomm.collectives.run import Run
from zcomm.engines.engine import NO_FINISH
from zcomm.engines.select import engine_for

N = 768  # elements of each shard: whole blocks


class Counting:
    """An engine that tells how many elements it encodes; ranks are threads, and to append is one step for them all."""

    def __init__(self, engine, counted: list[int]) -> None:
        self._engine, self._counted = engine, counted

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def encode(self, codec, source, n_elems, *rest):
        self._counted.append(n_elems)
        self._engine.encode(codec, source, n_elems, *rest)

    def encode_pieces(self, codec, source, dtype, wire, pieces, *rest):
        self._counted.append(sum(n_elems for _, n_elems, _ in pieces))
        self._engine.encode_pieces(codec, source, dtype, wire, pieces, *rest)

    def reduce_encode(self, codec, wires, n_elems, *rest):
        self._counted.append(n_elems)
        self._engine.reduce_encode(codec, wires, n_elems, *rest)


def check(placement: str, one_shot_bytes: int = 0) -> None:
    topology = forms.PLACEMENTS[placement]
    size, nodes, two_hops = topology.size, topology.nodes, topology.has_two_levels
    whole = size * N
    # Elements encoded on all ranks together: each rank's contribution, each node's sum, the sum.
    reduce_scatter = size * whole + (nodes * whole if two_hops else 0)
    wanted = {
        "reduce_scatter_single": reduce_scatter,
        "all_gather_single": whole,
        "all_reduce": reduce_scatter + (0 if one_shot_bytes else whole),
        "broadcast": whole,
        "all_to_all_single": size * whole,
        "reduce": reduce_scatter,
        "gather_single": whole,
        "scatter_single": whole,
    }
    codec = zcomm.codec("int8")
    inputs = [oracle.values(rank, whole, np.dtype(np.float32)) for rank in range(size)]

    def of_rank(transport, name):
        opened, messages = transport.open, []

        def counted_open(outgoing, *rest):
            messages.extend(parcel.peer for parcel in outgoing)
            return opened(outgoing, *rest)

        plan = Plan("int8", one_shot_bytes=one_shot_bytes, check="never")
        with Communicator(transport, plan, topology) as comm:
            transport.open = counted_open
            got = forms.carry_out(forms.FORMS[name](comm, inputs[comm.rank], "sum", np.copy))
            transport.open = opened
        return got, messages

    for name, n_encoded in wanted.items():
        counted: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settle, "engine_for", lambda *a, counted=counted: Counting(engine_for(*a), counted))
            results = local.run(size, of_rank, name)
        assert sum(counted) == n_encoded, name
        for _, messages in results:
            if not two_hops:
                hops = 2 if name == "all_reduce" else 1
                assert len(messages) <= hops * (size - 1), name
            most_hops = {"all_reduce": 5, "reduce_scatter_single": 2, "all_gather_single": 3}.get(name, 3)
            assert max(collections.Counter(messages).values(), default=0) <= most_hops, name
        if name == "reduce_scatter_single" and not two_hops:  # the error of one rounding of each contribution
            for rank, (got, _) in enumerate(results):
                parts = [x[rank * N : (rank + 1) * N] for x in inputs]
                bound = sum(codec.error_bound(part) for part in parts) + 1e-5
                assert (np.abs(got - np.sum(parts, axis=0, dtype=np.float64)) <= bound).all()


@pytest.mark.parametrize("placement", ["2", "3", "4", "8", "2x2", "2+1", "2x4", "1+3"])
def test_each_hop_rounds_once_and_each_peer_gets_one_message(placement):
    check(placement)


@pytest.mark.parametrize("placement", ["2x2", "2x4"])
def test_two_nodes_that_swap_sums_round_those_once(placement):
    check(placement, one_shot_bytes=512)


def every_sum_is_rounded_once_more(monkeypatch):
    """As a ring does, which re-quantizes what it passes on."""
    reduce = Run.reduce

    def again(self, codec, sums, finish):
        for one in sums:
            if one.n_elems:
                base = self._slab.address
                wires = [base + wire for wire in one.wires[:1]]
                self._engine.reduce_encode(codec, wires, one.n_elems, NO_FINISH, codec, wires[0], None)
        reduce(self, codec, sums, finish)

    monkeypatch.setattr(Run, "reduce", again)


def scales_travel_by_themselves(monkeypatch):
    parcel = run_module._parcel

    def bind(schedule, memory):
        def halves(messages):
            for message in messages:
                half = message._replace(nbytes=16)
                rest = message._replace(offset=message.offset + 16, nbytes=message.nbytes - 16, mark=1)
                yield from (parcel(one, memory) for one in (half, rest))

        return [run_module.Bound([*halves(route.outgoing)], [*halves(route.incoming)]) for route in schedule.routes]

    monkeypatch.setattr(run_module, "_bind", bind)


@faults(every_sum_is_rounded_once_more, scales_travel_by_themselves)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check("3"), fault, monkeypatch)
