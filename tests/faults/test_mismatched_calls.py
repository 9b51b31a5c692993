"""Ranks that disagree: the same sentence on every rank, naming the odd one and the field; or a timeout. Never a hang,
never an abort, never a wrong number.

Calls are compared the first time, or always; where they are not compared, a call's fingerprint is in its messages'
tags, so that ranks which call differently cannot take each other's bytes: they time out.
"""

from __future__ import annotations

from collections.abc import Callable

import forms
import numpy as np
import pytest
from impatience import AMPLE_S, shorten, waiting_in_vain

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.collectives import agreement
from zcomm.errors import BufferError, GroupError, MismatchError, PeerTimeout, TransportError

SHORT_S = 0.25  # that is waited in vain
ODD = 1
f = np.float32


def called_by(size: int, program: Callable, plan: Plan, topology: Topology | None = None) -> list[str]:
    """What each rank was told, or "" if its call was done; no rank's failure is passed on to the others."""
    told = [""] * size

    def main(transport):
        comm = Communicator(transport, plan, topology)
        try:
            program(comm, comm.rank == ODD)
        except (MismatchError, TransportError, BufferError) as error:
            told[comm.rank] = f"{type(error).__name__}: {error}"

    local.run(size, main)
    return told


# What the odd rank calls, and what the others do; and the field that an error must name.
DIFFERENT: dict[str, tuple[Callable, Callable, str]] = {
    "count": (lambda c: c.all_reduce(np.ones(500, f)), lambda c: c.all_reduce(np.ones(1000, f)), "count 500"),
    "padded count": (lambda c: c.all_reduce(np.ones(1001, f)), lambda c: c.all_reduce(np.ones(1000, f)), "count 1001"),
    "one and none": (lambda c: c.all_reduce(np.ones(0, f)), lambda c: c.all_reduce(np.ones(1, f)), "count 0"),
    "codec": (lambda c: c.all_reduce(np.ones(9, f), codec="int4"), lambda c: c.all_reduce(np.ones(9, f)), "codec int4"),
    "block": (
        lambda c: c.all_reduce(np.ones(9, f), codec="int8:512"),
        lambda c: c.all_reduce(np.ones(9, f)),
        "codec int8:512",
    ),
    "rounding": (
        lambda c: c.all_reduce(np.ones(9, f), codec="int8:stochastic"),
        lambda c: c.all_reduce(np.ones(9, f)),
        "codec int8:stochastic",
    ),
    "op": (lambda c: c.all_reduce(np.ones(9, f), "avg"), lambda c: c.all_reduce(np.ones(9, f)), "op AVG"),
    "factor": (
        lambda c: c.all_reduce(np.ones(9, f), zcomm.premul_sum(0.5)),
        lambda c: c.all_reduce(np.ones(9, f), zcomm.premul_sum(0.25)),
        "op PREMUL_SUM(0.5)",
    ),
    "dtype": (
        lambda c: c.all_reduce(np.ones(9, np.float16)),
        lambda c: c.all_reduce(np.ones(9, f)),
        "dtype float16",
    ),
    "collective": (
        lambda c: c.broadcast(np.ones(9, f)),
        lambda c: c.all_reduce(np.ones(9, f)),
        "collective broadcast",
    ),
    "gathered or reduced": (
        lambda c: c.all_gather_single(np.ones(9 * c.size, f), np.ones(9, f)),
        lambda c: c.reduce_scatter_single(np.ones(9, f), np.ones(9 * c.size, f)),
        "collective all_gather",
    ),
    "root of a broadcast": (
        lambda c: c.broadcast(np.ones(9, f), 1),
        lambda c: c.broadcast(np.ones(9, f), 0),
        "has ",
    ),
    "root of a gather": (
        lambda c: c.gather_single(np.ones(9 * c.size, f), np.ones(9, f), 1),
        lambda c: c.gather_single(np.ones(9 * c.size, f), np.ones(9, f), 0),
        "root 1",
    ),
    "uneven counts": (
        lambda c: c.all_gather_single(np.ones(9, f), np.ones([5, 3, 1][c.rank], f), counts=[5, 3, 1]),
        lambda c: c.all_gather_single(np.ones(9, f), np.ones([5, 2, 2][c.rank], f), counts=[5, 2, 2]),
        "count (5, 3, 1)",
    ),
    "splits": (
        lambda c: c.all_to_all_single(np.ones(9, f), np.ones(9, f), [3, 3, 3], [3, 3, 3]),
        lambda c: c.all_to_all_single(np.ones(10, f), np.ones(9, f), [3, 4, 3], [3, 3, 3]),
        "sends 3 elements to rank 0, which expects 4",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_compared_calls_that_differ_fail_alike_and_name_the_odd_rank_and_field(difference, check, asynchronous):
    odd_call, usual_call, named = DIFFERENT[difference]

    def program(comm, is_odd):
        waiting = _Asynchronous(comm) if asynchronous else comm
        (odd_call if is_odd else usual_call)(waiting)

    told = called_by(3, program, Plan("int8", check=check, timeout_s=AMPLE_S))

    assert told[0].startswith("MismatchError: ")
    assert told == [told[0]] * 3
    assert named in told[0]
    assert f"rank {ODD} " in told[0]


# Uncompared, these end: each rank that calls otherwise awaits no bytes (docs/sharp-bits.md).
WAITS_FOR_NOTHING = ("one and none", "root of a broadcast")


class _Asynchronous:
    """A communicator whose calls are made asynchronously, then waited for."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def __getattr__(self, name):
        call = getattr(self._comm, name)
        return lambda *args, **kwargs: call(*args, async_op=True, **kwargs).wait()


@pytest.mark.parametrize("difference", [name for name in DIFFERENT if name not in WAITS_FOR_NOTHING])
def test_calls_that_are_not_compared_and_differ_time_out_and_mix_nothing(difference):
    odd_call, usual_call, _ = DIFFERENT[difference]

    def program(comm, is_odd):
        shorten(comm, SHORT_S)
        (odd_call if is_odd else usual_call)(comm)

    told = called_by(3, program, Plan("int8", check="never", timeout_s=AMPLE_S))

    assert any("number 1 on rank" in message and "within" in message for message in told)
    for rank, message in enumerate(told):
        assert message == "" or message.startswith("PeerTimeout"), (rank, message)


@pytest.mark.parametrize("check", ["first", "always", "never"])
def test_the_order_of_calls_that_are_known_already(check):
    """Two kinds of call, both made before, then made in another order by one rank."""
    a, b = np.ones(100, f), np.ones(200, f)

    def program(comm, is_odd):
        for x in (a, b):
            comm.all_reduce(x.copy())
        if check != "always":
            shorten(comm, SHORT_S)
        for x in (b, a) if is_odd else (a, b):
            comm.all_reduce(x.copy())

    told = called_by(3, program, Plan("int8", check=check, timeout_s=AMPLE_S))

    if check == "always":
        assert told == [told[0]] * 3
        assert f"rank {ODD} has count 200, rank 0 has 100" in told[0]
    else:
        assert all(message.startswith("PeerTimeout: all_reduce number 3") for message in told)


@pytest.mark.parametrize("check", ["first", "always", "never"])
@pytest.mark.parametrize("placement", ["3", "2+1", "2x2"])
@pytest.mark.parametrize("codec", ["int4", "int8", "mxfp4", "raw"])
def test_parts_of_an_all_to_all_that_differ_are_never_decoded(check, placement, codec):
    """250 and 254 elements fill as many bytes. After an all-to-all that was compared, splits that differ are found by
    comparing again, or time out; no rank gets a number that was meant otherwise."""
    size = forms.PLACEMENTS[placement].size

    def program(comm, is_odd):
        even = [256] * size
        x = np.arange(256.0 * size, dtype=f)
        comm.all_to_all_single(np.empty(256 * size, f), x, even, even)
        if check != "always":
            shorten(comm, SHORT_S)
        sends, receives = [254] * size, [254] * size
        if is_odd:
            sends[0] = 250  # rank 0 expects 254
        out = np.full(sum(receives), -1.0, f)
        comm.all_to_all_single(out, np.arange(sum(sends), dtype=f), receives, sends)

    told = called_by(size, program, Plan(codec, check=check, timeout_s=AMPLE_S), forms.PLACEMENTS[placement])

    assert told[0] != ""
    if check == "always":
        assert told == [told[0]] * size
        assert f"rank {ODD} sends 250 elements to rank 0, which expects 254" in told[0]
    else:
        assert told[0].startswith(
            ("PeerTimeout: all_to_all number 2 on rank 0", "MismatchError: all_to_all of local world of")
        )


def test_messages_of_another_count_codec_or_dtype_are_never_taken():
    sent = [(np.ones(254, f), "int8"), (np.ones(250, f), "int4"), (np.ones(250, np.float16), "int8")]
    for x, codec in sent:

        def program(comm, is_odd, x=x, codec=codec):
            shorten(comm, SHORT_S)
            if comm.rank == 0:
                comm.send(x, 1, codec)
            else:
                comm.recv(np.ones(250, f), 0, "int8")

        told = called_by(2, program, Plan(timeout_s=AMPLE_S))

        assert told[1].startswith("PeerTimeout: recv from rank 0 number 1 on rank 1"), codec


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (Plan("int4"), "codec int4, rank 0 has int8"),
        (Plan("int8:512"), "codec int8:512, rank 0 has int8"),
        (Plan(intra_codec="raw"), "intra_codec raw, rank 0 has None"),
        (Plan(hierarchical=False), "hierarchical False, rank 0 has True"),
        (Plan(chunk_elems=77), "chunk_elems 77"),
        (Plan(seed=5), "seed 5, rank 0 has 0"),
        (Plan(check="always"), "check always, rank 0 has first"),
        (Plan(min_elems=3), "min_elems 3, rank 0 has 0"),
        (Plan(timeout_s=7), "timeout_s 7.0, rank 0 has None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_plans_that_differ_fail_where_the_communicator_is_made_and_name_the_setting(size, odd, named):
    told = []

    def main(transport):
        with pytest.raises(MismatchError) as caught:
            Communicator(transport, odd if transport.rank == ODD else Plan())
        told.append(str(caught.value))

    local.run(size, main)

    assert told == [told[0]] * size
    assert named in told[0]
    assert f"rank {ODD} has plan" in told[0]


def test_topologies_that_differ_are_named():
    for odd, named in (
        (Topology(nodes=1, ranks_per_node=4), "topology (0, 0, 0, 0)"),
        (Topology(node_of_rank=(0, 1, 0, 1)), "topology (0, 1, 0, 1)"),
        (None, "topology detected"),
    ):

        def main(transport, odd=odd, named=named):
            topology = odd if transport.rank == ODD else Topology(nodes=2, ranks_per_node=2)
            with pytest.raises(MismatchError, match=f"rank {ODD} has {named}".replace("(", r"\(").replace(")", r"\)")):
                Communicator(transport, topology=topology)

        local.run(4, main)


def test_bytes_that_are_no_card_are_a_mismatch(monkeypatch):
    def program(transport):
        with pytest.raises(MismatchError, match="is no card of zcomm"):
            Communicator(transport)

    for nonsense in ("\u00d7", "[", ""):
        monkeypatch.setattr(agreement.json, "dumps", lambda card, nonsense=nonsense: nonsense)
        local.run(2, program)


def test_versions_that_differ_are_named(monkeypatch):
    exchange = agreement.exchange

    def as_if_older(transport, own, *args):
        if transport.rank == ODD and "version" in own:
            own = own | {"version": "0.0.7"}
        return exchange(transport, own, *args)

    monkeypatch.setattr(agreement, "exchange", as_if_older)

    def main(transport):
        with pytest.raises(MismatchError, match=f"rank {ODD} has version 0.0.7, rank 0 has {zcomm.__version__}"):
            Communicator(transport)

    local.run(3, main)


def test_several_odd_ranks_are_all_named_and_the_majority_is_right():
    def main(transport):
        plan = Plan(seed={2: 5, 6: 6}.get(transport.rank, 1))
        with pytest.raises(MismatchError, match=r"rank 2 has plan.* 5, rank 0 has 1 \(also odd: ranks \[6\]\)"):
            Communicator(transport, plan)

    local.run(8, main)


def test_settings_of_any_length_can_be_compared():
    """Forty uneven nodes and the longest codecs: the card has room, and a difference is found."""
    size = 40
    nodes = tuple(rank * 7 % 13 for rank in range(size))

    def main(transport):
        plan = Plan("hadamard:int4:65536:stochastic", intra_codec="hadamard:int8:65536:stochastic", seed=2**32 - 1)
        comm = Communicator(transport, plan, Topology(node_of_rank=nodes))
        assert comm.topology.nodes == 13
        with pytest.raises(MismatchError, match="rank 39"):
            Communicator(transport, plan, Topology(node_of_rank=(*nodes[:-1], 99 if transport.rank == 39 else 5)))

    local.run(size, main)


# -- afterwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_mismatch_put_right_leaves_nothing_behind(asynchronous):
    def program(comm):
        for _ in range(4):
            wrong = np.ones(300 if comm.rank == ODD else 301, f)
            with pytest.raises(MismatchError):
                work = comm.all_reduce(wrong, async_op=asynchronous)
                work.wait()
            for n in (300, 301, 300):
                x = np.arange(n, dtype=f)
                comm.all_reduce(x, codec="raw")
                assert (x == 3 * np.arange(n)).all()

    forms.run("3", program)


def test_good_calls_before_and_behind_a_mismatch_in_flight_are_done():
    def program(comm):
        xs = [np.full(50 + i, 1.0, f) for i in range(9)]
        xs[4] = np.ones(7 if comm.rank == ODD else 8, f)
        works = [comm.all_reduce(x, codec="raw", async_op=True) for x in xs]
        with pytest.raises(MismatchError, match=f"rank {ODD} has count 7"):
            works[4].wait()
        for i, work in enumerate(works):
            if i != 4:
                work.wait()
                assert (xs[i] == 3).all()

    forms.run("3", program)


def test_a_bad_argument_on_one_rank_alone_is_told_there_and_is_a_late_rank_to_the_others():
    """Nobody but that rank can know of it: the others wait as for any rank that does not come (docs/sharp-bits.md)."""

    def program(comm, is_odd):
        with waiting_in_vain(comm, {ODD}, SHORT_S):
            comm.all_reduce(np.ones(4, np.int32 if is_odd else f))

    told = called_by(3, program, Plan(timeout_s=AMPLE_S))

    assert told[ODD].startswith("BufferError: tensor has dtype int32")
    for rank in (0, 2):
        assert told[rank].startswith("PeerTimeout: all_reduce number 1 on rank")
        assert f"nothing came from rank {ODD}" in told[rank]


def test_roots_and_peers_outside_the_group_are_refused():
    def program(comm):
        x, n = np.ones(4, f), comm.size
        for wrong in (-1, n, n + 7, 1.0, None, "0", True):
            for call in (
                lambda wrong=wrong: comm.broadcast(x, wrong),
                lambda wrong=wrong: comm.reduce(x, wrong),
                lambda wrong=wrong: comm.gather_single(np.ones(4 * n, f), x, wrong),
                lambda wrong=wrong: comm.scatter_single(x, np.ones(4 * n, f), wrong),
                lambda wrong=wrong: comm.send(x, wrong),
                lambda wrong=wrong: comm.recv(x, wrong),
            ):
                with pytest.raises(GroupError, match=f"expected 0 to {n - 1}"):
                    call()

    forms.run("3", program)


def test_a_timeout_says_what_it_waited_for():
    def main(transport):
        comm = Communicator(transport, Plan("int4", timeout_s=AMPLE_S))
        if transport.rank == ODD:
            return None
        with waiting_in_vain(comm, {ODD}, SHORT_S), pytest.raises(PeerTimeout) as caught:
            comm.reduce_scatter_single(np.ones(5, f), np.ones(15, f), "avg")
        return str(caught.value)

    for rank, told in enumerate(local.run(3, main)):
        if rank != ODD:
            assert f"reduce_scatter number 1 on rank {rank} of local world of 3, 15 float32 as int4" in told
            assert f"nothing came from rank {ODD} within {SHORT_S} s" in told
            assert "check that every rank is alive and made the same call" in told
