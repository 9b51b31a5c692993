"""zcomm.ddp with error feedback: it converges further, follows rebuilt buckets, and resumes to the bit."""

from __future__ import annotations

import io

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from ddp_models import SMALL_BUCKETS, Vector, build, loss_of, train
from saved_states import load_distributed, save_distributed
from torch.nn.parallel import DistributedDataParallel

import zcomm


def check_convergence() -> dict[str, float]:
    """Least squares whose columns differ a hundredfold, so that coarse blocks lose the small ones' gradients."""
    rank, n = dist.get_rank(), 512
    scale = torch.logspace(0, -2, 8).repeat(n // 8)
    target = torch.from_numpy(oracle.values(7, n, np.dtype(np.float32)))
    own = torch.from_numpy(oracle.values(rank, n, np.dtype(np.float32)))
    everyones = torch.stack([torch.from_numpy(oracle.values(each, n, np.dtype(np.float32))) for each in range(4)])
    distances = {}
    for name, feedback in {
        "without": False,
        "plain": True,
        "LoCo": zcomm.Feedback(beta=0.8, reset_every=1024),
    }.items():
        model = DistributedDataParallel(Vector(n))
        model.register_comm_hook(zcomm.ddp.State("int4", feedback=feedback), zcomm.ddp.hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(120):
            with torch.no_grad():
                gradient = scale * (model.module.vector - target + own - everyones.mean(0))
            model(gradient).backward()
            optimizer.step()
            optimizer.zero_grad()
        distances[name] = ((model.module.vector.detach() - target) * scale.sqrt()).norm().item()
    return distances


def test_int4_with_feedback_converges_further_than_without(torch_world):
    by_rank = torch_world.run(check_convergence)

    assert by_rank.count(by_rank[0]) == 4
    distances = by_rank[0]
    assert distances["plain"] < distances["without"] / 3
    assert distances["LoCo"] < distances["without"]


def check_memory_and_rebuilding() -> None:
    model = build(**SMALL_BUCKETS)
    state = zcomm.ddp.compress(model, "int4", feedback=True)
    sizes, layouts = [], []
    for step in range(12):
        loss_of(model, step).backward()
        sizes.append(state.feedback.nbytes)
        layouts.append(state.feedback.keys())
    assert layouts[0] != layouts[1]  # DDP has rebuilt its buckets
    assert layouts[1:] == layouts[1:2] * 11
    assert sizes[1:] == sizes[1:2] * 11
    n_elems = sum(parameter.numel() for parameter in model.parameters())
    assert 4 * n_elems <= sizes[-1] <= 4 * n_elems * 2  # own values; sums of half of them, then of a quarter
    assert len(state._under_way) == 0


def test_residuals_follow_the_rebuilt_buckets_and_stay_as_large(torch_world):
    torch_world.run(check_memory_and_rebuilding)


def check_resume(rebuilding: bool, through: str) -> None:
    """Five steps, saved; new objects, one backward if DDP rebuilds its buckets, loaded; five more."""

    def start():
        model = build(**SMALL_BUCKETS, find_unused_parameters=not rebuilding)
        state = zcomm.ddp.compress(model, "int4", feedback=zcomm.Feedback(0.8, reset_every=7))
        return model, state, torch.optim.AdamW(model.parameters(), 3e-3)

    model, state, optimizer = start()
    train(model, 5, 0, optimizer)
    file = io.BytesIO()
    saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "zcomm": state.state_dict()}
    torch.save(saved, file)
    saved_by_torch = save_distributed(state)
    wanted = train(model, 5, 5, optimizer)
    resumed, new_state, new_optimizer = start()
    if rebuilding:
        loss_of(resumed, 0).backward()
        resumed.zero_grad()
    file.seek(0)
    loaded = torch.load(file)  # tensors, numbers and strings only
    resumed.module.load_state_dict(loaded["model"])
    new_optimizer.load_state_dict(loaded["optimizer"])
    if through == "torch.save":
        new_state.load_state_dict(loaded["zcomm"])
    else:
        load_distributed(saved_by_torch, new_state)
    assert train(resumed, 5, 5, new_optimizer) == wanted
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("through", ["torch.save", "torch.distributed.checkpoint"])
@pytest.mark.parametrize("rebuilding", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(torch_world, rebuilding, through):
    torch_world.run(check_resume, rebuilding, through)


def check_loaded_before_the_first_backward() -> None:
    model = build(**SMALL_BUCKETS)
    state = zcomm.ddp.compress(model, "int4", feedback=True)
    train(model, 3)
    (saved,) = state.state_dict()["residuals"]
    resumed = build(**SMALL_BUCKETS)
    new_state = zcomm.ddp.compress(resumed, "int4", feedback=True)
    new_state.load_state_dict({"residuals": (saved,)})
    train(resumed, 1)
    for key, residual in saved.items():  # the first layout's buckets are others
        waiting = new_state.feedback.of(key).parts
        assert all(np.array_equal(waiting[name], part) for name, part in residual["parts"].items())
    train(resumed, 1)
    assert sorted(new_state.feedback.keys()) == sorted(saved)
    assert all(new_state.feedback.of(key).calls == residual["calls"] + 1 for key, residual in saved.items())


def test_residuals_loaded_early_wait_for_their_buckets(torch_world):
    torch_world.run(check_loaded_before_the_first_backward)


def check_overflowing_step() -> None:
    """A loss scaler's overflow: all ranks see it, and the residuals survive it."""
    model = DistributedDataParallel(Vector(1000))
    state = zcomm.ddp.compress(model, "int4", feedback=True)
    gradient = torch.from_numpy(oracle.values(dist.get_rank(), 1000, np.dtype(np.float32)))
    broken = gradient.clone()
    if dist.get_rank() == 1:
        broken[300] = float("inf")
    for values, finite in ((gradient, True), (broken, False), (gradient, True), (gradient, True)):
        model.zero_grad()
        model(values).backward()
        assert model.module.vector.grad.isfinite().all() == finite
    saved = state.state_dict()
    assert all(part.isfinite().all() for each in saved["residuals"][0].values() for part in each["parts"].values())


def test_an_overflow_does_not_stay_in_the_residual(torch_world):
    torch_world.run(check_overflowing_step)
