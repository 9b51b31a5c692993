"""Promise 6: no skipped compression that was not asked for, decided from shared facts and counted with its reason; no
copy between devices."""

from __future__ import annotations

import forms
import numpy as np
import pytest
import torch
from planted import assert_noticed, faults

import zcomm
from zcomm.collectives import arguments, call, settle
from zcomm.collectives.choice import choose
from zcomm.errors import BufferError


def check() -> None:
    def program(comm):
        n = 256 * comm.size
        for codec in ("int8", "int4", "bf16"):
            for name, form in forms.FORMS.items():
                comm.reset_stats()
                form(comm, np.ones(n, np.float32), "sum", np.copy).call(codec=codec)
                (stats,) = comm.stats().values()
                assert stats.uncompressed == {}, (name, codec)
                if stats.wire_bytes > 1000:
                    assert stats.compression_ratio > (1.9 if codec == "bf16" else 3), (name, codec)
        for elsewhere in (torch.ones(4, device="meta"),):
            for use in (lambda x=elsewhere: comm.all_reduce(x), lambda x=elsewhere: comm.send(x, 1 - comm.rank)):
                with pytest.raises(BufferError, match="copies nothing between devices"):
                    use()

    forms.run("2", program, check="never")

    def small(comm):
        for n in (99, 100, 101):
            comm.all_reduce(np.ones(n, np.float32), "sum", "int4")
        (stats,) = comm.stats().values()
        assert stats.uncompressed == {"fewer than min_elems=101 elements": 2}
        return comm._transport.wire_bytes_sent

    sent = forms.run("3", small, min_elems=101, check="never", one_shot_bytes=1 << 20)
    raw, int4 = zcomm.codec("raw").nbytes, zcomm.codec("int4").nbytes
    settings = 2 * zcomm.collectives.agreement.CARD_BYTES
    assert sent == [2 * (raw(99) + raw(100) + int4(101)) + settings] * 3

    def automatic(comm):
        x = np.ones(100_000, np.float32)
        comm.all_reduce(x, "sum", "int4")
        (stats,) = comm.stats().values()
        return stats.uncompressed

    assert forms.run("3", automatic, auto=True, check="never") == [{"auto: all ranks are on one node": 1}] * 3
    assert forms.run("2x2", automatic, auto=True, check="never") == [{}] * 4


def test_what_is_not_compressed_was_asked_for_and_is_counted():
    check()


def compression_is_skipped(monkeypatch):
    def raw(plan, topology, request):
        return choose(plan, topology, request._replace(codec=zcomm.codec("raw"), intra_codec=zcomm.codec("raw")))

    monkeypatch.setattr(settle, "choose", raw)


def reasons_are_not_counted(monkeypatch):
    count = call._count
    monkeypatch.setattr(call, "_count", lambda stats, settled: count(stats, settled._replace(uncompressed=None)))


def other_devices_are_read_as_if_they_were_this_one(monkeypatch):
    def copied(array, role, device):
        here = torch.zeros(array.shape) if getattr(array, "is_meta", False) else array
        return arguments.span_of(here, role)

    monkeypatch.setattr(arguments, "flattened", copied)


@faults(compression_is_skipped, reasons_are_not_counted, other_devices_are_read_as_if_they_were_this_one)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(check, fault, monkeypatch)
