"""Communicators over one group never share tags: ranges are agreed on, given back, and refused when none is left."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from impatience import shorten

import zcomm
from zcomm import Communicator, Plan, local
from zcomm.errors import GroupError, PeerTimeout
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR, TagRanges


def test_the_lowest_range_that_is_free_everywhere_is_taken():
    ranges = TagRanges(4, first_tag=1 << 30)

    taken = [ranges.take(), ranges.take(elsewhere=0b0110), ranges.take()]
    assert [(tag - (1 << 30)) // TAGS_PER_COMMUNICATOR for tag in taken] == [0, 3, 1]
    assert ranges.taken() == 0b1011
    assert ranges.take(elsewhere=0b0100) is None
    ranges.give_back(taken[1])
    assert ranges.take(elsewhere=0b0100) == taken[1]


def test_nothing_is_given_back_once_a_call_has_failed():
    ranges = TagRanges(2)
    first = ranges.take()
    ranges.freeze()
    ranges.give_back(first)

    assert ranges.taken() == 0b01


def summed(comm: Communicator) -> float:
    x = np.full(10, comm.rank + 1, np.float32)
    comm.all_reduce(x, codec="raw")
    return float(x[9])


def test_ranks_may_close_communicators_in_any_order():
    """After each round the ranks hold other ranges, and still agree on one for the next communicator."""

    def program(transport):
        transport.tags.count = 6
        order = np.random.default_rng(transport.rank)
        held: list[Communicator] = []
        for _ in range(30):
            held.append(Communicator(transport, "raw"))
            assert [summed(comm) for comm in held] == [6.0] * len(held)
            if len(held) > 1:  # never more than two, of whichever rank; together that is never more than six ranges
                held.pop(order.integers(2)).close()
                held[0].close()
                held.clear()
        return transport.tags.taken()

    assert local.run(3, program) == [0, 0, 0]


def test_a_communicator_that_is_dropped_gives_its_tags_back():
    def program(transport):
        transport.tags.count = 1
        for _ in range(4):
            comm = Communicator(transport)
            assert summed(comm) == 3.0
            del comm

    local.run(2, program)


def test_a_communicator_that_failed_keeps_its_tags():
    def program(transport):
        transport.tags.count = 2
        comm = Communicator(transport, Plan(check="never"))
        if transport.rank == 0:
            shorten(comm, 0.2)
            with pytest.raises(PeerTimeout):
                comm.all_reduce(np.ones(10, np.float32))
        comm.close()
        again = Communicator(transport)
        assert summed(again) == 3.0
        return transport.tags.taken()

    assert local.run(2, program) == [0b11, 0b10]


def one_too_many() -> tuple[int, list[str], float]:
    import torch.distributed as dist

    group = dist.new_group([0, 1, 2, 3])
    open_ones, told = [], []
    for _ in range(67):
        try:
            open_ones.append(Communicator(group, "raw"))
        except GroupError as error:
            told.append(str(error))
    open_ones.pop(5 + dist.get_rank() // 2).close()  # not the same on all ranks
    if dist.get_rank() // 2:
        open_ones.pop(5).close()
    else:
        open_ones.pop(6).close()
    sums = [summed(Communicator(group, "raw"))]
    return len(open_ones), told, sums[0]


def test_the_65th_communicator_over_one_group_is_refused_on_every_rank(torch_world):
    for n_open, told, total in torch_world.run(one_too_many):
        assert n_open == 62
        assert len(told) == 3
        assert all("tags for 64 communicators, and all are taken: close() those" in each for each in told)
        assert total == 10.0


def test_a_refused_communicator_leaves_the_others_as_they_are():
    def program(transport):
        transport.tags.count = 1
        comm = Communicator(transport)
        with pytest.raises(GroupError, match="tags for 1 communicators"):
            zcomm.Communicator(transport)
        return summed(comm)

    assert local.run(2, program) == [3.0, 3.0]


def test_a_communicator_may_be_collected_while_another_is_given_its_range():
    """Python collects garbage wherever it is, also where the lock is held; the same thread must not wait for itself."""
    ranges = TagRanges(4)
    first, second = ranges.take(), ranges.take()
    assert (first, second) == (0, TAGS_PER_COMMUNICATOR)

    class Elsewhere(int):
        def __ror__(self, taken):
            ranges.give_back(first)
            return taken | int(self)

    thread = threading.Thread(target=ranges.take, args=(Elsewhere(0),), daemon=True)
    thread.start()
    thread.join(10)

    assert not thread.is_alive()
    assert ranges.taken() == 0b110
