"""Promise 5: SUM, AVG and PREMUL_SUM as torch means them: one sum in float32, then one operation, then narrowing."""

from __future__ import annotations

import forms
import numpy as np
import pytest
from planted import assert_noticed, faults

import zcomm
from zcomm.collectives import kind
from zcomm.collectives.run import Run
from zcomm.engines.engine import NO_FINISH
from zcomm.errors import ReduceOpError


def check(placement: str) -> None:
    size = forms.PLACEMENTS[placement].size
    inputs = [(np.arange(24 * size) % 7 + rank + 1).astype(np.float32) for rank in range(size)]

    def program(comm):
        for name in forms.REDUCING:
            for op, factor in (
                ("sum", 1.0),
                ("avg", 1 / size),
                (zcomm.AVG, 1 / size),
                (zcomm.premul_sum(0.25), 0.25),
                (zcomm.premul_sum(3), 3.0),
            ):
                got = forms.carry_out(forms.FORMS[name](comm, inputs[comm.rank], op, np.copy), codec="raw")
                wanted = forms.exact(name, inputs, comm.rank)
                wanted = (wanted / size if factor == 1 / size else wanted * factor).astype(np.float32)
                assert np.array_equal(got, wanted), (name, str(op))
        narrow = np.full(9, 60_000, np.float16)  # the sum fits no float16, its mean does: narrowing comes last
        comm.all_reduce(narrow, "avg", "raw")
        assert (narrow == 60_000).all()
        with pytest.raises(ReduceOpError, match="SUM, AVG or PREMUL_SUM"):
            comm.all_reduce(narrow, "max")

    for one_shot_bytes in (0, 1 << 20):
        forms.run(placement, program, check="never", one_shot_bytes=one_shot_bytes)


@pytest.mark.parametrize("placement", forms.PLACEMENTS)
def test_a_mean_is_divided_once(placement):
    check(placement)


def averages_are_sums(monkeypatch):
    """What FSDP2 over gloo did, silently."""
    finish = kind.finish_of
    monkeypatch.setattr(kind, "finish_of", lambda op, n: NO_FINISH if op and op.name == "AVG" else finish(op, n))


def averages_are_divided_at_every_hop(monkeypatch):
    for name in ("reduce", "reduce_encode"):
        method = getattr(Run, name)

        def always(self, *args, method=method, finish):
            method(self, *args, finish=True)

        monkeypatch.setattr(Run, name, always)


def a_mean_is_of_one_rank_less(monkeypatch):
    finish = kind.finish_of
    monkeypatch.setattr(kind, "finish_of", lambda op, n: finish(op, n - 1))


def factors_are_forgotten(monkeypatch):
    finish = kind.finish_of
    monkeypatch.setattr(kind, "finish_of", lambda op, n: finish(op, n)._replace(factor=1.0))


@faults(averages_are_sums, averages_are_divided_at_every_hop, a_mean_is_of_one_rank_less, factors_are_forgotten)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check("2x2"), fault, monkeypatch)
