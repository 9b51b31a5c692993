"""zcomm.ops: the collectives as torch operators. Eager and compiled agree to the bit, gradients are the transposed."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.library import opcheck

import zcomm
from zcomm.errors import BufferError, CodecError, GroupError, ReduceOpError, UnsupportedError
from zcomm.topology import Topology

TWO_BY_TWO = Topology(nodes=2, ranks_per_node=2)
INT8 = zcomm.codec("int8")


def everyones(shape: tuple[int, ...]) -> list[torch.Tensor]:
    n_elems = int(np.prod(shape))
    return [
        torch.from_numpy(oracle.values(rank, n_elems, np.dtype(np.float32))).reshape(shape)
        for rank in range(dist.get_world_size())
    ]


def own(shape: tuple[int, ...]) -> torch.Tensor:
    return everyones(shape)[dist.get_rank()].clone()


# -- values -----------------------------------------------------------------------------------------------------------


def check_values() -> None:
    rank = dist.get_rank()
    shards, fulls = everyones((7000, 3)), everyones((28_000, 3))
    flat_shards, flat_fulls = ([x.numpy().ravel() for x in xs] for xs in (shards, fulls))
    before = fulls[rank].clone()

    gathered = zcomm.ops.all_gather(shards[rank])
    scattered = zcomm.ops.reduce_scatter(fulls[rank], "avg")
    reduced = zcomm.ops.all_reduce(fulls[rank])

    assert gathered.shape == (28_000, 3)
    assert gathered.numpy().tobytes() == oracle.all_gather(INT8, flat_shards).tobytes()
    wanted = oracle.reduce_scatter(INT8, INT8, flat_fulls, TWO_BY_TWO, "AVG")[rank]
    assert scattered.shape == (7000, 3)
    assert scattered.numpy().tobytes() == wanted.tobytes()
    summed = oracle.two_nodes_all_reduce(INT8, INT8, flat_fulls, TWO_BY_TWO, "SUM")
    assert reduced.numpy().tobytes() == summed.tobytes()
    assert torch.equal(fulls[rank], before)


def test_values_are_the_definition_s_and_inputs_stay_as_they_are(torch_world):
    torch_world.run(check_values)


def check_groups() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2])
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    x = own((40,))
    results = [zcomm.ops.all_reduce(x, group=each, codec="raw") for each in (None, mesh, dist.group.WORLD.group_name)]
    assert all(torch.equal(result, results[0]) for result in results)
    if rank < 3:
        total = oracle.added([each.numpy() for each in everyones((40,))[:3]])
        assert zcomm.ops.all_reduce(x, group=group, codec="raw").numpy().tobytes() == total.tobytes()
        assert zcomm.ops.all_gather(x, group.group_name, codec="raw").shape == (120,)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert zcomm.ops.all_gather(x.to(dtype)).dtype == dtype
    assert zcomm.ops.all_gather(torch.zeros(0, 3)).shape == (0, 3)
    assert zcomm.ops.all_reduce(own((30, 20)).t()).is_contiguous()


def test_groups_by_name_object_and_mesh_dtypes_and_strides(torch_world):
    torch_world.run(check_groups)


def check_refusals() -> None:
    with pytest.raises(BufferError, match="no rows to gather"):
        zcomm.ops.all_gather(torch.tensor(1.0))
    with pytest.raises(BufferError, match="share equally"):
        zcomm.ops.reduce_scatter(torch.zeros(6, 4))
    with pytest.raises(ReduceOpError, match="'sum' or 'avg'"):
        zcomm.ops.all_reduce(torch.zeros(6), "max")
    with pytest.raises(BufferError, match="int64"):
        zcomm.ops.all_reduce(torch.arange(6))
    with pytest.raises(GroupError, match="got a int"):
        zcomm.ops.all_reduce(torch.zeros(6), group=5)
    with pytest.raises(GroupError, match="no group is named 'nobody'"):
        zcomm.ops.all_gather(torch.zeros(6), group="nobody")
    with pytest.raises(GroupError, match="2 dimensions"):
        zcomm.ops.all_gather(torch.zeros(6), group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    with pytest.raises(GroupError, match="is not in this group"):
        zcomm.ops.all_gather(torch.zeros(6), group=dist.GroupMember.NON_GROUP_MEMBER)
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, None, ["sum"]):
        with pytest.raises(ReduceOpError, match="'sum' or 'avg'"):
            zcomm.ops.all_reduce(torch.zeros(6), op)
    for wrong in ({"codec": zcomm.codec("int8")}, {"codec": None}, {"grad_codec": 8}):
        with pytest.raises(CodecError, match="a codec's spelling"):
            zcomm.ops.reduce_scatter(torch.zeros(8), **wrong)
    with pytest.raises(BufferError, match="got a ndarray"):
        zcomm.ops.all_gather(torch.zeros(6).numpy())
    with pytest.raises(BufferError, match=r"DTensor; pass the local tensor: \.to_local"):
        zcomm.ops.all_reduce(distribute_tensor(torch.zeros(8), init_device_mesh("cpu", (4,)), [Replicate()]))


def check_forward_mode() -> None:
    x, tangent = own((20, 3)), own((20, 3))
    for call in (zcomm.ops.all_gather, zcomm.ops.reduce_scatter, zcomm.ops.all_reduce):
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            torch.func.jvp(call, (x,), (tangent,))
        with forward_ad.dual_level():
            with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
                call(forward_ad.make_dual(x, tangent) * 2)
            assert torch.equal(call(x, codec="raw"), call(x, codec="raw"))  # no dual


def test_forward_mode_is_refused_where_torch_would_give_no_tangent(torch_world):
    torch_world.run(check_forward_mode)


def test_bad_arguments_are_refused(torch_world):
    torch_world.run(check_refusals)


# -- gradients --------------------------------------------------------------------------------------------------------


def check_gradients(op: str) -> None:
    """Of L = sum over ranks of <w_rank, y_rank>: the transposed collective of the weights, in grad_codec."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if op == "all_gather":
        x, weights = own((500, 2)), everyones((2000, 2))
        y = zcomm.ops.all_gather(x.requires_grad_(), grad_codec="raw")
        wanted = sum(weights)[500 * rank : 500 * (rank + 1)]
    elif op.startswith("reduce_scatter"):
        x, weights = own((2000, 2)), everyones((500, 2))
        y = zcomm.ops.reduce_scatter(x.requires_grad_(), op.split()[1], grad_codec="raw")
        wanted = torch.cat(weights) / (size if "avg" in op else 1)
    else:
        x, weights = own((2000, 2)), everyones((2000, 2))
        y = zcomm.ops.all_reduce(x.requires_grad_(), op.split()[1], grad_codec="raw")
        wanted = sum(weights) / (size if "avg" in op else 1)
    (y * weights[rank]).sum().backward()
    assert torch.allclose(x.grad, wanted, rtol=1e-5, atol=1e-5)
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    "op", ["all_gather", "reduce_scatter sum", "reduce_scatter avg", "all_reduce sum", "all_reduce avg"]
)
def test_gradients_are_the_transposed_collective(torch_world, op):
    torch_world.run(check_gradients, op)


def check_gradient_codec() -> None:
    """Without grad_codec the backward is quantized by codec: to the bit, the compressed reduce-scatter."""
    rank = dist.get_rank()
    weights = everyones((40_000,))  # in two hops: more than goes in one exchange
    x = own((10_000,)).requires_grad_()
    (zcomm.ops.all_gather(x, codec="int8") * weights[rank]).sum().backward()
    wanted = oracle.reduce_scatter(INT8, INT8, [w.numpy() for w in weights], TWO_BY_TWO, "SUM")[rank]
    assert x.grad.numpy().tobytes() == wanted.tobytes()


def test_the_backward_of_a_gather_is_the_compressed_reduce_scatter(torch_world):
    torch_world.run(check_gradient_codec)


def check_double_backward() -> None:
    x = own((8,)).requires_grad_()
    y = zcomm.ops.all_reduce(x, "avg", codec="raw")
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 6 * y.detach(), rtol=1e-4)  # mean of means of 6 y


def test_gradients_of_gradients(torch_world):
    torch_world.run(check_double_backward)


# -- compiling --------------------------------------------------------------------------------------------------------


def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A tensor-parallel layer: columns gathered, a mean, and a scattered sum."""
    full = zcomm.ops.all_gather(weight, codec="int4", grad_codec="int8")
    hidden = torch.nn.functional.gelu(x @ full.t())
    hidden = zcomm.ops.all_reduce(hidden, "avg")
    return zcomm.ops.reduce_scatter(hidden * 2.0, "sum", codec="int8").square().mean()


def exact_model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Products and differences only, which every compiler rounds alike; little to compile."""
    return zcomm.ops.reduce_scatter(zcomm.ops.all_gather(weight, codec="int4") * x) - 1.0


def check_compiled(backend: str) -> None:
    run, shape = (model, (8, 16)) if backend == "aot_eager" else (exact_model, (80, 16))
    outcomes = []
    for each in (run, torch.compile(run, backend=backend, fullgraph=True)):
        x, weight = own(shape), own((20, 16)).requires_grad_()
        y = each(x, weight)
        y.sum().backward()
        outcomes.append((y.detach(), weight.grad))
    torch._dynamo.reset()
    (eager, eager_gradient), (compiled, compiled_gradient) = outcomes
    assert torch.equal(compiled, eager)
    assert torch.equal(compiled_gradient, eager_gradient)


def test_compiled_in_one_graph_is_the_same_to_the_bit(torch_world):
    torch_world.run(check_compiled, "aot_eager")


@pytest.mark.slow
def test_inductor_s_graph_gives_the_same_bits(torch_world):
    torch_world.run(check_compiled, "inductor")


def check_dynamic_shapes() -> None:
    compiled = torch.compile(lambda x: zcomm.ops.all_gather(x * 2, codec="raw"), backend="aot_eager", dynamic=True)
    for rows in (3, 5, 9):
        assert torch.equal(compiled(own((rows, 2))), 2 * torch.cat(everyones((rows, 2))))
    torch._dynamo.reset()


def check_groups_in_a_graph() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    for group in (dist.group.WORLD, dist.new_group([0, 1, 2, 3]), mesh, mesh["all"], None, dist.group.WORLD.group_name):

        def summed(x: torch.Tensor, group=group) -> torch.Tensor:
            return zcomm.ops.all_reduce(x * 2, group=group, codec="raw")

        compiled = torch.compile(summed, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(own((30,))), summed(own((30,))))
    torch._dynamo.reset()


def test_any_form_of_group_can_stand_in_a_graph(torch_world):
    torch_world.run(check_groups_in_a_graph)


def test_dynamic_shapes(torch_world):
    torch_world.run(check_dynamic_shapes)


def check_operators() -> None:
    name = dist.group.WORLD.group_name
    opcheck(torch.ops.zcomm.all_gather.default, (own((20, 3)).requires_grad_(), name, "int8", None))
    opcheck(torch.ops.zcomm.reduce_scatter.default, (own((20, 3)).requires_grad_(), "avg", name, "int8", None))
    opcheck(torch.ops.zcomm.all_reduce.default, (own((20, 3)).requires_grad_(), "sum", name, "int8", None))


def test_torch_s_own_checks_of_an_operator(torch_world):
    torch_world.run(check_operators)
