"""Promise 12: errors say what came, what was expected and what to do; bad arguments raise on every rank, before bytes
move, and the next call works."""

from __future__ import annotations

import forms
import numpy as np
import pytest
from planted import assert_noticed, faults

import zcomm
from zcomm import Topology
from zcomm.collectives import arguments
from zcomm.errors import ZcommError

f = np.float32
# A bad call; what came; what was expected or is to be done.
BAD = {
    "count of an output": (
        lambda c: c.all_gather_single(np.ones(7, f), np.ones(4, f)),
        "7 elements",
        "3 ranks x 4 = 12",
    ),
    "count of an input": (lambda c: c.reduce_scatter_single(np.ones(4, f), np.ones(13, f)), "13 elements", "counts="),
    "counts": (lambda c: c.all_gather_single(np.ones(9, f), np.ones(3, f), counts=[3, 3]), "[3, 3]", "3 whole numbers"),
    "dtype": (lambda c: c.all_reduce(np.ones(4, np.int32)), "int32", "float32, bfloat16, float16, float64"),
    "two dtypes": (lambda c: c.all_gather_single(np.ones(12), np.ones(4, f)), "float64", "the same dtype"),
    "operator": (lambda c: c.all_reduce(np.ones(4, f), "max"), "'max'", "Use torch.distributed or MPI"),
    "codec": (lambda c: c.all_reduce(np.ones(4, f), codec="int9"), "'int9'", "known: "),
    "block": (lambda c: c.all_reduce(np.ones(4, f), codec="int8:100"), "got 100", "multiple of 8"),
    "root": (lambda c: c.broadcast(np.ones(4, f), 3), "src=3", "expected 0 to 2"),
    "read-only": (lambda c: c.all_reduce(FROZEN), "read-only", "can be written"),
    "kind": (lambda c: c.all_reduce([1.0, 2.0]), "builtins.list", "torch.Tensor, numpy.ndarray"),
    "list": (lambda c: c.all_gather([np.ones(4, f)] * 2, np.ones(4, f)), "got 2", "a list of 3 tensors"),
    "overlap": (lambda c: c.all_to_all_single(OVERLAP[:6], OVERLAP[3:9]), "overlap", "separate memory"),
    "splits": (
        lambda c: c.all_to_all_single(np.ones(9, f), np.ones(9, f), [3, 3, 3], [3, 3, 4]),
        "9 elements",
        "3 + 3 + 4 = 10",
    ),
}
OVERLAP, FROZEN = np.ones(9, f), np.zeros(4, f)
FROZEN.flags.writeable = False
SETTINGS = {
    "topology": (lambda: Topology(nodes=0, ranks_per_node=2), "got 0", "at least 1"),
    "plan": (lambda: zcomm.Plan(chunk_elems=0), "got 0", "at least 1"),
    "timeout": (lambda: zcomm.Plan(timeout_s=-1), "got -1", "0.001 to"),
    "premul": (lambda: zcomm.premul_sum("x"), "'x'", "a number"),
    "premul that no float holds": (lambda: zcomm.premul_sum(10**400), "too large", "a number that a float holds"),
    "rotation of a rotation": (
        lambda: zcomm.codec("hadamard:" * 5000 + "int4"),
        "got hadamard:hadamard:",
        "use hadamard:int4",
    ),
    "wait": (lambda: zcomm.Work(None).wait("1 s"), "'1 s'", "a number of seconds"),
}


def check() -> None:
    def program(comm):
        before, heard = comm._transport.wire_bytes_sent, []
        for name, (call, came, expected) in BAD.items():
            with pytest.raises(ZcommError) as caught:
                call(comm)
            message = str(caught.value)
            assert came in message, (name, message)
            assert expected in message, (name, message)
            heard.append(f"{caught.type.__name__}: {message}")
        assert comm._transport.wire_bytes_sent == before, "bytes moved"
        comm.all_reduce(x := np.ones(4, f), codec="raw")
        assert (x == 3).all()
        assert comm.stats()["all_reduce"].calls == 1
        return heard

    heard = forms.run("3", program, check="never")

    assert heard == [heard[0]] * 3, "ranks do not fail alike"
    for name, (make, came, expected) in SETTINGS.items():
        with pytest.raises(ZcommError) as caught:
            make()
        assert came in str(caught.value), (name, str(caught.value))
        assert expected in str(caught.value), (name, str(caught.value))


def test_every_refusal_says_what_came_what_was_expected_and_moves_no_byte():
    check()


def errors_do_not_say_what_was_expected(monkeypatch):
    monkeypatch.setattr(arguments, "sum_of", lambda counts: "")


def read_only_arrays_are_written_to(monkeypatch):
    monkeypatch.setattr(arguments, "check_writable", lambda array, role: None)


def arguments_are_checked_after_bytes_have_moved(monkeypatch):
    read = arguments.Arguments.read

    def late(self, array, role):
        self.sent.wire_bytes_sent += 1
        return read(self, array, role)

    monkeypatch.setattr(arguments.Arguments, "read", late)
    init = arguments.Arguments.__init__

    def knowing(self, transport):
        init(self, transport)
        self.sent = transport

    monkeypatch.setattr(arguments.Arguments, "__init__", knowing)


def ranks_fail_each_in_its_own_words(monkeypatch):
    root = arguments.Arguments.root

    def worded(self, rank, role):
        try:
            return root(self, rank, role)
        except ZcommError as error:
            raise type(error)(f"rank {self.rank}: {error}") from None

    monkeypatch.setattr(arguments.Arguments, "root", worded)


@faults(
    errors_do_not_say_what_was_expected,
    read_only_arrays_are_written_to,
    arguments_are_checked_after_bytes_have_moved,
    ranks_fail_each_in_its_own_words,
)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(check, fault, monkeypatch)
