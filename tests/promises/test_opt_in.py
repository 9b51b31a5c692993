"""Promise 7: only calls that ask are compressed; others stay exact; integers and bools are never quantized."""

from __future__ import annotations

import forms
import numpy as np
import oracle
import pytest
import torch
from planted import assert_noticed, faults

import zcomm
from zcomm import buffers
from zcomm.errors import BufferError


def check_refusals() -> None:
    def program(comm):
        for dtype in (np.int8, np.uint8, np.int32, np.int64, np.bool_, np.complex64):
            for codec in ("raw", "int8"):
                x = np.arange(6).astype(dtype)
                before = x.copy()
                for call in (
                    lambda x=x, codec=codec: comm.all_reduce(x, "sum", codec),
                    lambda x=x, codec=codec: comm.broadcast(x, 0, codec),
                    lambda x=x, codec=codec: comm.all_reduce_coalesced([np.ones(2, np.float32), x], "sum", codec),
                ):
                    with pytest.raises(BufferError, match="never quantized"):
                        call()
                assert np.array_equal(x, before)

    forms.run("2", program, check="never")


def check_other_collectives() -> None:
    """On each of four gloo ranks: torch's own calls beside compressed ones give torch's own results, to the bit."""
    import torch.distributed as dist

    rank = dist.get_rank()
    inputs = [torch.from_numpy(oracle.values(each, 3001, np.dtype(np.float32))) for each in range(4)]
    compressed, plain = inputs[rank].clone(), inputs[rank].clone()
    dist.all_reduce(plain)
    work = zcomm.all_reduce(compressed, codec="int4", async_op=True)
    again, counts, flag = inputs[rank].clone(), torch.tensor([rank, 200]), torch.tensor([rank == 2])
    dist.all_reduce(again)
    dist.all_reduce(counts)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    gathered = [torch.empty(3001) for _ in range(4)]
    dist.all_gather(gathered, inputs[rank])
    work.wait()
    assert torch.equal(plain, again), "torch's own all-reduce changed"
    assert torch.allclose(plain, torch.stack(inputs).sum(0), rtol=1e-5, atol=1e-5), "torch's own all-reduce is lossy"
    assert counts.tolist() == [6, 800]
    assert flag.item()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gathered, inputs, strict=True))
    assert not torch.equal(compressed, plain)


def test_integers_are_refused():
    check_refusals()


def test_other_collectives_are_untouched(torch_world):
    torch_world.run(check_other_collectives)


def integers_are_taken_for_floats(monkeypatch):
    known = buffers._dtype_named
    monkeypatch.setattr(buffers, "_READERS", {})
    monkeypatch.setattr(buffers, "_dtype_named", lambda name, role: known(name.replace("int", "float"), role))


@faults(integers_are_taken_for_floats)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(check_refusals, fault, monkeypatch)


def check_under_a_fault() -> bool:
    """A product that compresses every all-reduce of the program, as a replaced backend would."""
    import torch.distributed as dist

    theirs = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        return theirs(tensor.bfloat16().float(), *args, **kwargs) if tensor.is_floating_point() else theirs(tensor)

    dist.all_reduce = all_reduce
    try:
        check_other_collectives()
    except AssertionError:
        return True
    finally:
        dist.all_reduce = theirs
    return False


def test_a_product_that_touches_other_collectives_is_found(torch_world):
    assert torch_world.run(check_under_a_fault) == [True] * 4
