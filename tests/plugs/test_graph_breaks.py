"""Direct calls inside torch.compile: the graph breaks there, the call is made as it is; fullgraph says what to use."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.topology import Topology

N_ELEMS = 30_001
TWO_BY_TWO = Topology(nodes=2, ranks_per_node=2)


def everyones(call: int) -> list[np.ndarray]:
    return [oracle.values(rank + 10 * call, N_ELEMS, np.dtype(np.float32)) for rank in range(dist.get_world_size())]


def compiled(function):
    """The function compiled, and a list that grows by one for each graph."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend), graphs


def check_calls(kind: str) -> None:
    comm = zcomm.Communicator(None, "int8")
    rank, codec = dist.get_rank(), zcomm.codec("int8")

    def direct(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        zcomm.all_reduce(y, dist.ReduceOp.AVG, codec="int8")
        return y - 1.0

    def asynchronous(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        work = zcomm.all_reduce(y, dist.ReduceOp.AVG, codec="int8", async_op=True)
        z = x.sum()
        work.wait()
        return y - 1.0 + 0 * z

    def own_communicator(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        work = comm.all_reduce(y, "avg", async_op=True)
        work.wait()
        comm.all_gather_single(torch.empty(4 * N_ELEMS), y)
        return y - 1.0

    function = {"direct": direct, "asynchronous": asynchronous, "own communicator": own_communicator}[kind]
    torch._dynamo.reset()  # of what earlier tests on these ranks have compiled
    torch._dynamo.utils.counters.clear()
    run, graphs = compiled(function)
    for call in range(4):
        inputs = everyones(call)
        got = run(torch.from_numpy(inputs[rank].copy()))
        doubled = [x * np.float32(2) for x in inputs]
        wanted = oracle.two_nodes_all_reduce(codec, codec, doubled, TWO_BY_TWO, "AVG") - np.float32(1)
        assert got.numpy().tobytes() == wanted.tobytes()
    assert len(graphs) >= 2  # what is before the call and what is behind it are still compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(graphs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("kind", ["direct", "asynchronous", "own communicator"])
def test_a_call_breaks_the_graph_and_gives_the_same_bits(torch_world, kind):
    torch_world.run(check_calls, kind)


def check_fullgraph() -> str:
    def function(x: torch.Tensor) -> torch.Tensor:
        zcomm.all_reduce(x, codec="int8")
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(10))
    torch._dynamo.reset()
    x = torch.ones(10)
    zcomm.all_reduce(x, codec="raw")  # and outside it still works
    assert (x == 4).all()
    return str(caught.value)


def test_in_one_graph_the_error_names_what_can_stand_there(torch_world):
    for told in torch_world.run(check_fullgraph):
        assert "zcomm.ops has all_gather, reduce_scatter and all_reduce that can" in told


def test_calls_do_not_import_the_compiler():
    program = """
import sys, torch, torch.distributed as dist, zcomm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
zcomm.all_reduce(torch.ones(3), async_op=True, codec="int8").wait()
zcomm.Communicator().all_reduce(torch.ones(3))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "False", done.stderr
