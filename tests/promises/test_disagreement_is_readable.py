"""Promise 8: ranks that disagree fail on every rank, before payloads move, with the odd rank and the field named."""

from __future__ import annotations

import forms
import numpy as np
import pytest
from impatience import AMPLE_S, shorten
from planted import SHORT_S, assert_noticed, faults

import zcomm
from zcomm import Communicator, Plan, local
from zcomm.collectives import agreement, conductor, kind
from zcomm.errors import MismatchError, TransportError

ODD = 2
CALLS = {
    "collective": (lambda c: c.broadcast(np.ones(40, np.float32)), lambda c: c.all_reduce(np.ones(40, np.float32))),
    "count": (lambda c: c.all_reduce(np.ones(41, np.float32)), lambda c: c.all_reduce(np.ones(40, np.float32))),
    "dtype": (lambda c: c.all_reduce(np.ones(40)), lambda c: c.all_reduce(np.ones(40, np.float32))),
    "codec": (
        lambda c: c.all_reduce(np.ones(40, np.float32), codec="int8:64"),
        lambda c: c.all_reduce(np.ones(40, np.float32)),
    ),
    "op": (lambda c: c.all_reduce(np.ones(40, np.float32), "avg"), lambda c: c.all_reduce(np.ones(40, np.float32))),
}


def told(size: int, check: str, field: str, timeout_s: float) -> list[str]:
    """What each rank hears where the odd one calls otherwise; a rank that hears nothing says "done"."""

    def of_rank(transport):
        comm = Communicator(transport, Plan("int8", check=check, timeout_s=AMPLE_S))
        if check == "always":
            CALLS[field][1](comm)
        shorten(comm, timeout_s)
        before = sum(stats.codec_s for stats in comm.stats().values())
        try:
            CALLS[field][comm.rank != ODD](comm)
        except (MismatchError, TransportError) as error:
            if isinstance(error, MismatchError):
                assert sum(stats.codec_s for stats in comm.stats().values()) == before, "payloads were made already"
            return f"{type(error).__name__}: {error}"
        return "done"

    return local.run(size, of_rank)


def check(timeout_s: float) -> None:
    for size in (3, 4, 8):
        for how in ("first", "always"):
            for field in CALLS:
                by_rank = told(size, how, field, timeout_s)
                assert by_rank == [by_rank[0]] * size, field
                assert by_rank[0].startswith("MismatchError: "), field
                assert f"rank {ODD} has {field} " in by_rank[0], field


def check_settings(timeout_s: float) -> None:
    for odd, named in ((Plan("int4"), "plan codec int4, rank 0 has int8"), (Plan(seed=3), "plan seed 3, rank 0 has 0")):

        def of_rank(transport, odd=odd, named=named):
            with pytest.raises(MismatchError) as caught:
                Communicator(transport, odd if transport.rank == ODD else Plan())
            assert f"rank {ODD} has {named}" in str(caught.value)

        local.run(4, of_rank)


def check_uncompared(timeout_s: float) -> None:
    """Calls that are not compared cannot be mixed up either: their tags differ."""
    for field in ("count", "dtype", "codec", "op"):
        by_rank = told(3, "never", field, timeout_s)
        assert all(message.startswith("PeerTimeout") for message in by_rank), (field, by_rank)


def test_every_rank_hears_which_rank_and_field_is_odd():
    check(AMPLE_S)


def test_settings_are_compared_where_a_communicator_is_made():
    check_settings(AMPLE_S)


def test_what_is_not_compared_times_out():
    check_uncompared(SHORT_S)


def calls_are_not_compared(monkeypatch):
    monkeypatch.setattr(conductor.Conductor, "_is_new", lambda self, fingerprint: False)


def operators_are_not_compared(monkeypatch):
    compare = agreement.compare
    monkeypatch.setattr(
        agreement, "compare", lambda cards, fields, where: compare(cards, tuple(f for f in fields if f != "op"), where)
    )


def the_first_rank_is_always_blamed(monkeypatch):
    compare = agreement.compare

    def blame(cards, fields, where):
        try:
            compare(cards, fields, where)
        except MismatchError as error:
            raise MismatchError(str(error).replace(f"rank {ODD}", "rank 0")) from None

    monkeypatch.setattr(agreement, "compare", blame)


@faults(calls_are_not_compared, operators_are_not_compared, the_first_rank_is_always_blamed)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check(SHORT_S), fault, monkeypatch)


def settings_are_not_compared(monkeypatch):
    monkeypatch.setattr(agreement, "compare", lambda *args: None)


@faults(settings_are_not_compared)
def test_a_product_that_compares_no_settings_is_found(fault, monkeypatch):
    assert_noticed(lambda: check_settings(SHORT_S), fault, monkeypatch)


def calls_leave_no_trace_in_their_tags(monkeypatch):
    monkeypatch.setattr(kind, "fingerprint_of", lambda request: 0)


@faults(calls_leave_no_trace_in_their_tags)
def test_a_product_that_mixes_uncompared_calls_is_found(fault, monkeypatch):
    assert_noticed(lambda: check_uncompared(SHORT_S), fault, monkeypatch)


def test_comparing_costs_nothing_after_the_first_calls():
    """By "first", two cards to every other rank, settings and one kind of call; by "always" one more for each call."""
    from zcomm.collectives.agreement import CARD_BYTES

    payload = 2 * zcomm.codec("int8").nbytes(40)
    for how, cards in (("first", 2), ("always", 8), ("never", 1)):

        def program(comm):
            for _ in range(7):
                comm.all_reduce(np.ones(40, np.float32))
            return comm._transport.wire_bytes_sent

        assert forms.run("3", program, check=how) == [7 * payload + 2 * cards * CARD_BYTES] * 3
