"""Promise 9: a late or dead rank is an error within the timeout that names collective, number, group and rank."""

from __future__ import annotations

import re
import time

import numpy as np
from impatience import AMPLE_S, waiting_in_vain
from planted import SHORT_S, assert_noticed, faults

from zcomm import Communicator, Plan, local
from zcomm.collectives.context import CallContext
from zcomm.errors import PeerTimeout, TransportError
from zcomm.transports import local as local_transport

LATE = 1


def check(size: int, timeout_s: float = SHORT_S) -> None:
    def of_rank(transport):
        comm = Communicator(transport, Plan("int4", timeout_s=AMPLE_S, one_shot_bytes=0))
        comm.all_reduce(np.ones(2000, np.float32))
        if comm.rank == LATE:
            return None
        heard = []
        for asynchronous in (False, True):
            started = time.monotonic()
            try:
                with waiting_in_vain(comm, {LATE}, timeout_s):
                    work = comm.all_reduce(np.ones(2000, np.float32), async_op=asynchronous)
                    if work is not None:
                        work.wait()
            except TransportError as error:
                heard.append((type(error), str(error), time.monotonic() - started))
        return heard

    for rank, heard in enumerate(local.run(size, of_rank)):
        if rank == LATE:
            continue
        assert len(heard) == 2, "a call without a rank was done"
        for number, (kind, message, waited_s) in enumerate(heard, start=2):
            assert kind is PeerTimeout
            assert waited_s >= timeout_s * 0.9
            assert re.match(rf"all_reduce number {number} on rank {rank} of local world of {size}, ", message), message
            assert f"nothing came from rank {LATE} within {timeout_s} s" in message, message
            assert "2000 float32 as int4" in message, message


def test_a_rank_that_does_not_come_is_named_with_the_call():
    for size in (2, 3, 4):
        check(size)


def errors_do_not_say_which_call(monkeypatch):
    monkeypatch.setattr(CallContext, "__exit__", lambda *args: None)


def the_late_rank_is_not_named(monkeypatch):
    monkeypatch.setattr(local_transport, "PeerTimeout", lambda message: PeerTimeout("timed out"))


def the_own_rank_is_named(monkeypatch):
    wait = local_transport._LocalExchange.wait

    def confused(self):
        try:
            wait(self)
        except PeerTimeout as error:
            raise PeerTimeout(str(error).replace(f"rank {LATE}", f"rank {self._transport.rank}")) from None

    monkeypatch.setattr(local_transport._LocalExchange, "wait", confused)


@faults(errors_do_not_say_which_call, the_late_rank_is_not_named, the_own_rank_is_named)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check(3), fault, monkeypatch)
