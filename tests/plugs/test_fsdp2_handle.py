"""zcomm.fsdp2.compress gives a handle: it counts, can be removed and replaced; bad settings are refused at once."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import build, gradients, mesh_of, train, units
from language_model import Model, loss_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import zcomm
from zcomm.collectives.agreement import CARD_BYTES
from zcomm.errors import BufferError, UnsupportedError
from zcomm.topology import Topology


def check_counts() -> None:
    model = build()
    handle = zcomm.fsdp2.compress(model, "int8", "int4", quiet=True)
    train(model, 2)
    stats = handle.stats()
    assert stats["all_gather"].calls == 14  # each step: 4 forward, 3 backward (the root stays gathered)
    assert stats["reduce_scatter"].calls == 8
    counted = sum(each.wire_bytes for each in stats.values())
    sent = sum(comm._transport.wire_bytes_sent for each in handle._all() for comm in each.communicators.values())
    cards = 2 * 3 * CARD_BYTES * (1 + 2)  # two communicators, three peers; settings, and two kinds of call
    assert counted == sent - cards
    assert 3.5 < stats["all_gather"].compression_ratio < 4
    handle.reset_stats()
    assert sum(each.calls for each in handle.stats().values()) == 0


def test_counts_are_those_of_the_transport(torch_world):
    torch_world.run(check_counts)


def check_nodes_are_told(weights: str | None, topology: Topology, wanted: str) -> None:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        model = build()
        zcomm.fsdp2.compress(model, weights, "int4", topology=topology)
        assert "shard group is" not in told.getvalue()
        train(model, 2)
    lines = [line for line in told.getvalue().splitlines() if "shard group is" in line]
    assert lines == ([wanted] if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("weights", ["int8", None])
def test_the_nodes_are_told_once_they_are_known(torch_world, weights):
    torch_world.run(check_nodes_are_told, weights, Topology(2, 2), "zcomm: the shard group is 2 nodes x 2 ranks")
    hint = ": within one node compression pays only where its links are slow"
    torch_world.run(check_nodes_are_told, weights, Topology(1, 4), "zcomm: the shard group is 1 node x 4 ranks" + hint)


def check_removal() -> None:
    model, plain = build(), build()
    handle = zcomm.fsdp2.compress(model, "int2", "int2", quiet=True)
    handle.remove()
    loss_of(model, 0).backward()
    loss_of(plain, 0).backward()
    for a, b in zip(gradients(model).values(), gradients(plain).values(), strict=True):
        assert torch.equal(a, b)


def test_what_was_installed_can_be_removed(torch_world):
    torch_world.run(check_removal)


def check_replacement() -> None:
    model, plain = build(), build()
    first = zcomm.fsdp2.compress(model, "int2", "int2", prefetch=True, quiet=True)
    loss_of(model, 0).backward()
    model.zero_grad()
    second = zcomm.fsdp2.compress(model, weights=None, gradients=None, quiet=True)
    assert all(not unit._get_fsdp_state()._states_to_forward_prefetch for unit in units(model))
    loss_of(model, 0).backward()
    loss_of(plain, 0).backward()
    for a, b in zip(gradients(model).values(), gradients(plain).values(), strict=True):
        assert torch.equal(a, b)
    assert second.stats() == {}
    assert not any(each.communicators for each in first._all())


def test_compressing_again_replaces_what_was_there(torch_world):
    torch_world.run(check_replacement)


def check_part() -> None:
    """A part of the model compressed otherwise, as one does with an embedding, and what was given up removed."""
    model = build()
    first = zcomm.fsdp2.compress(model, "int8", "int4", quiet=True)
    part = zcomm.fsdp2.compress(model.blocks[0], "bf16", "bf16", quiet=True)
    loss_of(model, 0).backward()
    assert part.stats()["reduce_scatter"].calls == 1
    assert 1.9 < part.stats()["reduce_scatter"].compression_ratio < 2.1
    assert first.stats()["reduce_scatter"].calls == len(units(model)) - 1
    assert first.stats()["all_gather"].compression_ratio > 3.5
    second = zcomm.fsdp2.compress(model, "int8", "int4", quiet=True)
    first.remove()
    part.remove()
    loss_of(model, 1).backward()
    assert second.stats()["reduce_scatter"].calls == len(units(model))
    assert not any(each.communicators for handle in (first, part) for each in handle._all())


def test_a_part_compressed_otherwise_leaves_the_rest_as_it_was_and_remove_takes_out_only_its_own(torch_world):
    torch_world.run(check_part)


def replicated() -> Model:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(Model(), mesh=mesh_of("4"))


def of_two_meshes() -> Model:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    other = FSDPMeshInfo(mesh_of("2x2")["shards"], shard_mesh_dim=0)
    return fully_shard(
        Model(),
        mesh=mesh_of("4"),
        shard_placement_fn=lambda parameter: ShardPlacementResult(Shard(0), other) if parameter.ndim == 1 else None,
    )


def check_two_meshes() -> None:
    model = of_two_meshes()
    with pytest.raises(UnsupportedError, match="2 parameter groups"):
        zcomm.fsdp2.compress(model, quiet=True)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12), reason="one mesh for each module before torch 2.12"
)
def test_a_module_of_two_meshes_is_refused(torch_world):
    torch_world.run(check_two_meshes)


def check_refusals() -> list[str]:
    told = []
    for call in (
        lambda: zcomm.fsdp2.compress(Model()),
        lambda: zcomm.fsdp2.compress(build(), weights="int9"),
        lambda: zcomm.fsdp2.compress(build(), gradients="int1"),
        lambda: zcomm.fsdp2.compress(build(), topology=Topology(nodes=3, ranks_per_node=2)),
        lambda: zcomm.fsdp2.compress(replicated()),
    ):
        with pytest.raises((BufferError, ValueError, UnsupportedError)) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_bad_settings_are_refused_when_set_not_in_backward(torch_world):
    told = torch_world.run(check_refusals)

    assert told.count(told[0]) == 4
    assert "fully_shard" in told[0][0]
    assert "int9" in told[0][1]
    assert "6 ranks" in told[0][3]
    assert "zcomm.ddp" in told[0][4]
