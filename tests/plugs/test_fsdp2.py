"""zcomm.fsdp2.compress: gradients and weights within the codecs' bounds of plain FSDP2, in every way people use it."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from fsdp2_models import build, gradients, mesh_of, train, units
from language_model import ODD, Model, loss_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch_cases import TWO_BY_TWO

import zcomm

# -- gradients --------------------------------------------------------------------------------------------------------

USES = {
    "plain": (lambda model: None, {}),
    "bf16 parameters, fp32 reduction": (
        lambda model: None,
        {"policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "fp16 reduction": (lambda model: None, {"policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}),
    "forced SUM": (lambda model: [unit.set_force_sum_reduction_for_comms(True) for unit in units(model)], {}),
    "divide factor equal to the world": (
        lambda model: [unit.set_gradient_divide_factor(4.0) for unit in units(model)],
        {},
    ),
    "hpZ": (lambda model: None, {"reshard": 2}),
    "HSDP": (lambda model: None, {"mesh": "2x2"}),
}


def largest_local_gradient() -> float:
    """Over all ranks and parameters, before any reduction."""
    torch.manual_seed(0)
    model = Model()
    loss_of(model, 0).backward()
    largest = max(parameter.grad.abs().max() for parameter in model.parameters())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def check_gradients(use: str, codec: str) -> None:
    prepare, options = USES[use]
    plain, compressed = build(**options), build(**options)
    for model in (plain, compressed):
        prepare(model)
    zcomm.fsdp2.compress(compressed, None, codec, quiet=True)
    for model in (plain, compressed):
        loss_of(model, 0).backward()
    wanted, got = gradients(plain), gradients(compressed)
    # First hop: 4 contributions, each off by half a step of at most largest/127. Second: 2 node sums of at most twice
    # that. Averaged: (4 + 2 x 2) / 4 half steps. Scales are rounded up by less than 1/128.
    bound = 2 * largest_local_gradient() / 127 / 2 * (1 + 1 / 128) if codec == "int8" else 0.0
    rounding = 2e-3 if "16" in use else 1e-6
    for name, gradient in wanted.items():
        assert got[name].shape == gradient.shape
        difference = (got[name] - gradient).abs()
        assert (difference <= bound + rounding * gradient.abs().max()).all(), (name, difference.max(), bound)
    assert codec == "raw" or any(not torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_gradients_are_those_of_plain_fsdp2_within_the_bound(torch_world, use, codec):
    torch_world.run(check_gradients, use, codec)


def check_premultiplied() -> None:
    """Stock gloo refuses PREMUL_SUM; zcomm computes it, so a divide factor of 2 doubles the mean over 4 ranks."""
    plain, compressed = build(), build()
    zcomm.fsdp2.compress(compressed, None, "raw", quiet=True)
    for unit in units(compressed):
        unit.set_gradient_divide_factor(2.0)
    for model in (plain, compressed):
        loss_of(model, 0).backward()
    wanted, got = gradients(plain), gradients(compressed)
    for name in wanted:
        assert torch.allclose(got[name], 2 * wanted[name], rtol=1e-4, atol=1e-7)


def test_a_gradient_divide_factor_is_honoured_once(torch_world):
    torch_world.run(check_premultiplied)


def check_one_gradient_to_the_bit() -> None:
    """A bias's gradient is known on every rank; the reduction must be the definition's two hops of it."""
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(8, 600, bias=True), mesh=mesh_of("4"))
    zcomm.fsdp2.compress(layer, None, zcomm.Plan("int4", one_shot_bytes=0), quiet=True)
    everyones = [torch.from_numpy(oracle.values(rank, 600, np.dtype(np.float32))) for rank in range(4)]
    x = torch.zeros(1, 8)
    (layer(x) * everyones[dist.get_rank()]).sum().backward()
    codec = zcomm.codec("int4")
    # each rank's shard: 150 rows of the weight's zero gradient, then 150 of the bias's
    whole = [
        np.concatenate([np.concatenate([np.zeros(1200, np.float32), part]) for part in np.split(g.numpy(), 4)])
        for g in everyones
    ]
    wanted = oracle.reduce_scatter(codec, codec, whole, TWO_BY_TWO, "AVG")[dist.get_rank()]
    assert layer.bias.grad.to_local().numpy().tobytes() == wanted[1200:].tobytes()


def test_the_reduction_is_the_two_hop_definition_to_the_bit(torch_world):
    torch_world.run(check_one_gradient_to_the_bit)


def check_accumulation() -> int:
    plain, compressed = build(), build()
    handle = zcomm.fsdp2.compress(compressed, None, "raw", quiet=True)
    for model in (plain, compressed):
        for step in range(4):
            model.set_requires_gradient_sync(step == 3)
            loss_of(model, step).backward()
    wanted, got = gradients(plain), gradients(compressed)
    for name in wanted:
        assert torch.allclose(got[name], wanted[name], rtol=1e-4, atol=1e-6)
    return handle.stats()["reduce_scatter"].calls


def test_accumulated_gradients_are_reduced_once(torch_world):
    assert torch_world.run(check_accumulation) == [4, 4, 4, 4]  # 3 blocks and the root, for four micro-batches


# -- weights ----------------------------------------------------------------------------------------------------------


def check_gathered_weights(codec: str) -> bytes:
    torch.manual_seed(0)
    layer = nn.Linear(ODD, 3 * ODD, bias=False)
    master = layer.weight.detach().clone()
    fully_shard(layer, mesh=mesh_of("4"))
    zcomm.fsdp2.compress(layer, codec, None, quiet=True)
    layer.unshard()
    gathered = layer.weight.detach().clone()
    layer.reshard()
    rows = -(-3 * ODD // 4)
    padded = torch.zeros(4 * rows, ODD)
    padded[: 3 * ODD] = master
    shards = [shard.flatten().numpy() for shard in padded.chunk(4)]
    wanted = oracle.all_gather(zcomm.codec(codec), shards).reshape(4 * rows, ODD)[: 3 * ODD]
    assert gathered.numpy().tobytes() == wanted.tobytes()
    assert torch.equal(layer.weight.full_tensor().detach(), master)  # what a state dict holds
    return gathered.numpy().tobytes()


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_every_rank_computes_with_the_same_gathered_weights(torch_world, codec):
    gathered = torch_world.run(check_gathered_weights, codec)

    assert gathered.count(gathered[0]) == 4


def check_hpz() -> dict[str, object]:
    model = build(reshard=2)
    handle = zcomm.fsdp2.compress(model, "int8", "int4", quiet=True)
    seen: dict[str, torch.Tensor] = {}
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda module, _: seen.update(forward=module.up.weight.detach().clone()))
    block.up.register_full_backward_pre_hook(lambda module, _: seen.update(backward=module.weight.detach().clone()))
    loss = loss_of(model, 0)
    before = handle.stats()
    assert "node_all_gather" not in before
    loss.backward()
    assert torch.equal(seen["forward"], seen["backward"])
    after = handle.stats()
    assert after["all_gather"].wire_bytes_inter == before["all_gather"].wire_bytes_inter  # nothing between nodes
    assert after["node_all_gather"].calls == 4
    assert after["node_all_gather"].wire_bytes_inter == 0
    node_groups = {id(group) for unit in units(model) for group in zcomm.plugs.fsdp2._node_groups([unit])}
    return {"node groups": len(node_groups)}


def test_hpz_gathers_inside_the_node_and_gives_the_forward_s_weights(torch_world):
    assert torch_world.run(check_hpz) == [{"node groups": 1}] * 4


def check_hpz_alone() -> None:
    """With torch's own gathers of whole weights, those inside a node are compressed if that is asked for."""
    for node_weights, counted in (("raw", {}), ("int8", {"node_all_gather": 4})):
        model = build(reshard=2)
        handle = zcomm.fsdp2.compress(model, None, None, node_weights=node_weights, quiet=True)
        loss_of(model, 0).backward()
        assert {name: each.calls for name, each in handle.stats().items()} == counted
        assert all(each.compression_ratio > 3 for each in handle.stats().values())


def test_gathers_inside_the_node_can_be_compressed_alone(torch_world):
    torch_world.run(check_hpz_alone)


def check_hpz_stays_fresh() -> None:
    """After an optimizer step, in eval, and after loading, the next forward uses the new weights."""
    with_hpz, without = build(reshard=2), build()
    for model in (with_hpz, without):
        zcomm.fsdp2.compress(model, "int8", "raw", quiet=True)
    assert train(with_hpz, 3) == train(without, 3)
    for model in (with_hpz, without):
        model.eval()
    with torch.no_grad():
        assert torch.equal(loss_of(with_hpz, 9), loss_of(without, 9))
    state = {name: value.clone() for name, value in without.state_dict().items()}
    before = loss_of(with_hpz, 0)
    before.backward()
    train(with_hpz, 2)
    with_hpz.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(loss_of(with_hpz, 0), before)


def test_no_stale_copy_with_hpz(torch_world):
    torch_world.run(check_hpz_stays_fresh)


# -- training ---------------------------------------------------------------------------------------------------------


def check_losses() -> dict[str, list[float]]:
    losses = {"plain": train(build())}
    for name, settings in {
        "int8": ("int8", "int8", {}),
        "zeropp": ("int8", "int4", {"reshard": 2}),
    }.items():
        weights, grads, options = settings
        for prefetch in (False, True):
            model = build(**options)
            zcomm.fsdp2.compress(model, weights, grads, prefetch=prefetch, quiet=True)
            losses[f"{name} {prefetch}"] = train(model)
    return losses


def test_training_follows_the_uncompressed_run_and_prefetch_changes_no_bit(torch_world):
    by_rank = torch_world.run(check_losses)

    assert by_rank.count(by_rank[0]) == 4
    losses = by_rank[0]
    for name in ("int8", "zeropp"):
        assert losses[f"{name} True"] == losses[f"{name} False"]
        assert np.allclose(losses[f"{name} True"], losses["plain"], rtol=0.01)
        assert losses[f"{name} True"] != losses["plain"]  # something was compressed


def check_uneven() -> None:
    for rows, columns in ((3, 5), (4, 1), (1, 1), (129, 7)):
        torch.manual_seed(0)
        plain, compressed = (nn.Sequential(nn.Linear(columns, rows), nn.Linear(rows, 2)) for _ in range(2))
        compressed.load_state_dict(plain.state_dict())
        for model in (plain, compressed):
            for layer in model:
                fully_shard(layer, mesh=mesh_of("4"))
            fully_shard(model, mesh=mesh_of("4"))
        zcomm.fsdp2.compress(compressed, "raw", "raw", quiet=True)
        for step in range(4):
            x = torch.randn(3, columns, generator=torch.Generator().manual_seed(step * 4 + dist.get_rank()))
            for model in (plain, compressed):
                model(x).square().mean().backward()
        for a, b in zip(plain.parameters(), compressed.parameters(), strict=True):
            assert torch.allclose(a.grad.full_tensor(), b.grad.full_tensor(), rtol=1e-4, atol=1e-6)


def test_parameters_smaller_than_the_world_and_uneven_ones(torch_world):
    torch_world.run(check_uneven)


def check_mixed_dtypes() -> str:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).bfloat16())
    for parameter in layer[1].parameters():
        parameter.requires_grad_(False)
    fully_shard(layer, mesh=mesh_of("4"))
    handle = zcomm.fsdp2.compress(layer, "int8", None, quiet=True)
    layer.unshard()
    weight = layer[1].weight.detach().clone()
    layer.reshard()
    assert torch.equal(weight, layer[1].weight.full_tensor().detach())
    (reason,) = handle.stats()["all_gather"].uncompressed
    return reason


def test_a_buffer_of_mixed_dtypes_passes_through_and_is_counted(torch_world):
    for reason in torch_world.run(check_mixed_dtypes):
        assert "uint8" in reason


def check_nan() -> None:
    layer = fully_shard(nn.Linear(4, 4096, bias=False), mesh=mesh_of("4"))
    zcomm.fsdp2.compress(layer, None, "int8", quiet=True)
    x = torch.ones(1, 4)
    weights = torch.ones(4096)
    if dist.get_rank() == 2:
        weights[17] = float("nan")
    (layer(x) * weights).sum().backward()
    whole = layer.weight.grad.full_tensor()
    assert whole.flatten()[17 * 4 : 18 * 4].isnan().all()
    assert whole.isnan().sum() == 256  # its block and no other


def test_a_nan_gradient_on_one_rank_is_seen_by_all(torch_world):
    torch_world.run(check_nan)
