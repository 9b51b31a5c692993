"""zcomm.fsdp1 with error feedback: what rounding loses comes back, unit by unit; runs resume to the bit."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from fsdp1_models import Vector, build, gradients, train, wrapped
from language_model import loss_of
from saved_states import load_distributed, save_distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import zcomm
from zcomm.errors import BufferError, UnsupportedError

N_ELEMS, STEPS = 10_001, 8


class Pair(nn.Module):
    """Two units of one size whose gradients are what the model is called with."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.first, self.second = wrapped(Vector(N_ELEMS), **options), wrapped(Vector(N_ELEMS), **options)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.first(first) + self.second(second)


def check_units(strategy: ShardingStrategy, feedback: bool) -> list[float]:
    """The largest error of each unit's gradient, averaged over steps, as a part of the bound of one step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [
        [oracle.values(each + 10 * unit, N_ELEMS, np.dtype(np.float32)) for unit in (0, 1)] for each in range(size)
    ]
    model = wrapped(Pair(sharding_strategy=strategy), sharding_strategy=strategy)
    plan = zcomm.Plan("int4", hierarchical=False, one_shot_bytes=0)
    state = zcomm.fsdp1.compress(model, plan, feedback=feedback)
    sums = [0.0, 0.0]
    for step in range(STEPS):
        model.zero_grad()
        if step == 3:
            with model.no_sync():
                model(*[torch.zeros(N_ELEMS)] * 2).backward()
        model(*map(torch.from_numpy, inputs[rank])).backward()
        sums = [
            total + parameter.grad.flatten().double().numpy()
            for total, parameter in zip(sums, model.parameters(), strict=True)
        ]
    names = {key.rpartition(": ")[0] for key in (state.feedback.keys() if feedback else ())}
    assert names == ({"first", "second"} if feedback else set())
    shard = -(-N_ELEMS // size)
    mine = slice(0, None) if strategy is ShardingStrategy.NO_SHARD else slice(rank * shard, (rank + 1) * shard)
    worst = []
    for unit, total in enumerate(sums):
        parts = [each[unit][mine] for each in inputs]
        mean = sum(part.astype(np.float64) for part in parts) / size
        bound = sum(zcomm.codec("int4").error_bound(part).max() for part in parts) / size
        worst.append(float(np.abs(total[: mean.size] / STEPS - mean).max() / bound))
    return worst


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name)
def test_what_a_step_loses_comes_back_and_units_of_one_size_are_kept_apart(torch_world, strategy):
    for without, with_feedback in zip(
        torch_world.run(check_units, strategy, False), torch_world.run(check_units, strategy, True), strict=True
    ):
        for lost, kept in zip(without, with_feedback, strict=True):
            assert (
                kept < 3 / STEPS
            )  # what is left of all steps is the last residuals: one for each of two roundings at most
            assert kept < lost / 2


def check_resume(strategy: ShardingStrategy, through: str) -> None:
    def start():
        model = build(sharding_strategy=strategy)
        return model, zcomm.fsdp1.compress(model, "int4", feedback=zcomm.Feedback(beta=0.5))

    model, state = start()
    train(model, 3)
    file = io.BytesIO()
    saved = {"model": copy.deepcopy(model.state_dict()), "zcomm": state.state_dict()}
    torch.save(saved, file)
    saved_by_torch = save_distributed(state)
    wanted = train(model, 3)

    resumed, new_state = start()
    file.seek(0)
    loaded = torch.load(file)  # tensors, numbers and strings only
    resumed.load_state_dict(loaded["model"])
    if through == "torch.save":
        new_state.load_state_dict(loaded["zcomm"])
    else:
        load_distributed(saved_by_torch, new_state)
    assert train(resumed, 3) == wanted
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    known = new_state.feedback.keys()
    assert {key.rpartition(": ")[0] for key in known} == {"root", "blocks.0", "blocks.1", "blocks.2"}

    forgetful, third = start()  # without the residuals the run is another
    forgetful.load_state_dict(loaded["model"])
    third.load_state_dict({})
    assert train(forgetful, 3) != wanted


@pytest.mark.parametrize("through", ["torch.save", "torch.distributed.checkpoint"])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(torch_world, strategy, through):
    torch_world.run(check_resume, strategy, through)


def check_stale_and_refused() -> None:
    model = build()
    state = zcomm.fsdp1.compress(model, "int4", feedback=True)
    loss_of(model, 0).backward()
    (saved,) = state.state_dict()["residuals"]
    (key,) = (key for key in saved if key.startswith("blocks.1: "))
    saved["blocks.1: 12 elements"] = saved.pop(key)  # of a model that was another then
    state.load_state_dict({"residuals": (saved,)})
    model.zero_grad()
    loss_of(model, 1).backward()
    assert sorted(state.feedback.keys()) == sorted([key, *(each for each in saved if not each.startswith("blocks.1"))])
    assert state.feedback.of(key).calls == 1
    assert gradients(model).isfinite().all()

    by_hand = build()
    by_hand.register_comm_hook(zcomm.fsdp1.State("int4", feedback=True), zcomm.fsdp1.hook)
    with pytest.raises(UnsupportedError, match=r"zcomm\.fsdp1\.compress\(model, \.\.\., feedback="):
        loss_of(by_hand, 0).backward()
    with pytest.raises(BufferError, match="feedback is off"):
        zcomm.fsdp1.State("int4").load_state_dict(saved)
    with pytest.raises(BufferError, match=r"True, False or a zcomm\.Feedback"):
        zcomm.fsdp1.State("int4", feedback="yes")
    assert zcomm.fsdp1.State("int4").state_dict() == {}
    unit = next(m for m in FullyShardedDataParallel.fsdp_modules(model))._comm_hook_state
    again = pickle.loads(pickle.dumps(unit))
    assert again.name == unit.name
    assert again.state.feedback.keys() == state.feedback.keys()


def test_residuals_of_another_size_are_dropped_and_what_cannot_work_is_refused(torch_world):
    torch_world.run(check_stale_and_refused)


def check_names() -> None:
    inner = (
        wrapped(nn.Linear(3, 3)),
        torch.compile(wrapped(nn.Linear(3, 3))),
        checkpoint_wrapper(wrapped(nn.Linear(3, 3))),
    )
    model = wrapped(nn.Sequential(*inner, nn.Linear(3, 3)))
    zcomm.fsdp1.compress(model, "int4", feedback=True)
    names = [unit._comm_hook_state.name for unit in FullyShardedDataParallel.fsdp_modules(model)]
    assert names == ["root", "0", "1", "2"]


def test_a_unit_is_named_as_in_the_model_whatever_wraps_it(torch_world):
    torch_world.run(check_names)
