"""Promise 1: a replicated result is bit-identical on all ranks; sums run in float32, in rank order."""

from __future__ import annotations

import ctypes

import forms
import numpy as np
import oracle
import pytest
from planted import assert_noticed, faults

import zcomm
from zcomm.collectives.run import RANK_SHIFT, Run

PLACEMENTS = [name for name in forms.PLACEMENTS if name != "1"]


def values(rank: int, n_elems: int) -> np.ndarray:
    return oracle.values(rank, n_elems, np.dtype(np.float32))


def check(placement: str, codecs: tuple[str, ...] = forms.CODECS) -> None:
    """Every replicated form, in one exchange and in several, with every codec; and what raw's bits must be."""
    topology = forms.PLACEMENTS[placement]

    def program(comm):
        results = {}
        for codec in codecs if comm.plan.one_shot_bytes == 0 else codecs[::5]:
            for name in forms.REPLICATED:
                x = values(comm.rank, 331 * comm.size)
                results[codec, name] = forms.carry_out(forms.FORMS[name](comm, x, "avg", np.copy), codec=codec)
        return results

    inputs = [values(rank, 331 * topology.size) for rank in range(topology.size)]
    raw = zcomm.codec("raw").for_dtype(zcomm.buffers.DType.FLOAT32)
    for one_shot_bytes in (0, 512, 1 << 20):  # 512: two nodes alike swap their sums
        by_rank = forms.run(placement, program, one_shot_bytes=one_shot_bytes, check="never", seed=4)
        for key in by_rank[0]:
            assert len({results[key].tobytes() for results in by_rank}) == 1, key
        two_hops = topology if topology.has_two_levels and one_shot_bytes < 1 << 20 else None
        wanted = oracle.all_reduce(raw, raw, inputs, two_hops, "AVG")
        if "raw" in codecs:
            assert by_rank[0]["raw", "all_reduce"].tobytes() == wanted.tobytes(), "not the sum in rank order"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_replicated_result_is_the_same_bits_on_every_rank(placement):
    check(placement)


def the_owner_keeps_its_exact_values(monkeypatch):
    decode = Run.decode

    def kept(self, codec, pieces):
        decode(self, codec, pieces)
        rank = self._seed >> RANK_SHIFT
        if len(pieces) > 1 and self._source.n_elems == pieces[rank].n_elems:
            itemsize = self._target.dtype.itemsize
            at = self._target.address + pieces[rank].start * itemsize
            ctypes.memmove(at, self._source.address, self._source.nbytes)

    monkeypatch.setattr(Run, "decode", kept)


def each_rank_adds_its_own_first(monkeypatch):
    for name in ("reduce", "reduce_encode"):
        method = getattr(Run, name)

        def own_first(self, codec, sums, *rest, method=method, **more):
            rank = (self._seed >> RANK_SHIFT) % len(sums[0].wires) if sums else 0
            turned = [one._replace(wires=one.wires[rank:] + one.wires[:rank]) for one in sums]
            method(self, codec, turned, *rest, **more)

        monkeypatch.setattr(Run, name, own_first)


def sums_run_backwards(monkeypatch):
    encode = Run.reduce_encode

    def backwards(self, codec, sums, *rest, **more):
        encode(self, codec, [one._replace(wires=one.wires[::-1]) for one in sums], *rest, **more)

    monkeypatch.setattr(Run, "reduce_encode", backwards)


@faults(the_owner_keeps_its_exact_values, each_rank_adds_its_own_first, sums_run_backwards)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check("3", ("raw", "int4")), fault, monkeypatch)
