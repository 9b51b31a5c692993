"""Autograd beside zcomm's calls: a backward that needs values which a call has overwritten raises, as after mul_()."""

from __future__ import annotations

import pytest
import torch

import zcomm

N = 6  # elements of each tensor; two ranks


def ones() -> torch.Tensor:
    return torch.ones(N)


def swap(comm, out: torch.Tensor, x: torch.Tensor, peer: int) -> None:
    sent = comm.send(x, peer, async_op=True)
    comm.recv(out, peer)
    sent.wait()


CALLS = {  # each writes the first tensor and only reads the second
    "all_reduce into an output": lambda comm, out, x: comm.all_reduce(x, output=out),
    "all_reduce in place": lambda comm, out, x: comm.all_reduce(out),
    "all_reduce of a view": lambda comm, out, x: comm.all_reduce(out.reshape(2, 3).t()),
    "all_reduce_coalesced": lambda comm, out, x: comm.all_reduce_coalesced([out, ones().double()]),
    "all_gather_single": lambda comm, out, x: comm.all_gather_single(out, x[:3]),
    "all_gather": lambda comm, out, x: comm.all_gather([ones(), out], x),
    "reduce_scatter_single": lambda comm, out, x: comm.reduce_scatter_single(out[:3], x),
    "reduce_scatter": lambda comm, out, x: comm.reduce_scatter(out, [x, x]),
    "all_to_all_single": lambda comm, out, x: comm.all_to_all_single(out, x),
    "all_to_all": lambda comm, out, x: comm.all_to_all([out, ones()], [x, x]),
    "broadcast": lambda comm, out, x: comm.broadcast(out),
    "scatter": lambda comm, out, x: comm.scatter(out, [x, x]),
    "reduce to each": lambda comm, out, x: [comm.reduce(out if comm.rank == dst else x, dst) for dst in (0, 1)],
    "gather to each": lambda comm, out, x: [comm.gather(x, [ones(), out], dst) for dst in (0, 1)],
    "a message each way": lambda comm, out, x: (
        comm.send(x, 1 - comm.rank, async_op=True),
        comm.recv(out, 1 - comm.rank),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_overwrites_cannot_be_used_by_a_backward_and_what_it_reads_can(call):
    def program(transport):
        comm = zcomm.Communicator(transport, "raw")
        written, read = torch.arange(N) + 1.0, torch.arange(N) - 2.0
        weight = torch.full((N,), 0.5, requires_grad=True)
        spoilt, right = (weight * written).sum(), (weight * read).sum()
        CALLS[call](comm, written, read)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            spoilt.backward()
        right.backward()
        return weight.grad

    for gradient in zcomm.local.run(2, program):
        assert torch.equal(gradient, torch.arange(N) - 2.0)


def test_tensors_of_inference_mode_are_reduced_in_it_and_outside():
    def program(transport):
        comm = zcomm.Communicator(transport, "raw")
        with torch.inference_mode():
            x = torch.arange(12.0).reshape(3, 4) * (comm.rank + 1)
            comm.all_reduce(x.t(), async_op=True).wait()
        comm.all_reduce(x)
        comm.all_reduce_coalesced([x, x.double()])
        return x.clone()

    for result in zcomm.local.run(2, program):
        assert torch.equal(result, torch.arange(12.0).reshape(3, 4) * 12)
