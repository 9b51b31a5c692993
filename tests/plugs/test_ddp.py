"""zcomm.ddp: plain DDP's mean within the codec's bound, on all ranks the same bits, in every way people use DDP."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from ddp_models import SMALL_BUCKETS, Model, Vector, assert_same_bits_on_all_ranks, build, gradients, loss_of, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_cases import TWO_BY_TWO, group_of

import zcomm
from zcomm.topology import Topology

# -- gradients --------------------------------------------------------------------------------------------------------

USES = {
    "one bucket": {},
    "small buckets": SMALL_BUCKETS,
    "bucket views": SMALL_BUCKETS | {"gradient_as_bucket_view": True},
    "static graph": SMALL_BUCKETS | {"static_graph": True},
    "unused parameters": SMALL_BUCKETS | {"find_unused_parameters": True},
    "bf16": SMALL_BUCKETS | {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
}


def check_gradients(use: str, codec: str) -> None:
    """Five backwards, the second and third without synchronising, so that their gradients add up in the fourth."""
    plain, compressed = build(**USES[use]), build(**USES[use])
    state = zcomm.ddp.State(codec)
    compressed.register_comm_hook(state, zcomm.ddp.hook)
    # First hop: 4 contributions, each off by half a step of at most largest/127. Second: 2 node sums of at most twice
    # that. Third: their mean. Together (4 + 2 x 2) / 4 + 1 half steps, for a contribution of this use's dtype.
    half_step = 1 / 127 / 2 * (1 + 1 / 128) if codec == "int8" else 0.0
    rounding = {"bf16": 3e-2, "fp16": 4e-3}.get(use, 1e-5)
    for step, synchronised in enumerate((True, False, False, True, True)):
        largest = torch.zeros(())
        for model in (plain, compressed):
            with contextlib.nullcontext() if synchronised else model.no_sync():
                loss_of(model, step).backward()
            if not synchronised:
                largest = gradients(model).abs().max()
        if not synchronised:
            continue
        wanted, got = gradients(plain), gradients(compressed)
        assert_same_bits_on_all_ranks([parameter.grad for parameter in compressed.parameters()])
        if step == 0:  # later ones are of the sums of several micro-batches
            largest = local_largest(step, USES[use].get("dtype", torch.float32))
            bound = 3 * half_step * largest
            assert ((got - wanted).abs() <= bound + rounding * wanted.abs().max()).all()
        error = (got - wanted).norm() / wanted.norm()
        assert error <= rounding + (0.02 if codec == "int8" else 0)
        assert codec == "raw" or error > 0
        for model in (plain, compressed):
            model.zero_grad()
    stats = state.stats()["all_reduce"]
    assert stats.calls >= 3
    assert codec == "raw" or stats.compression_ratio > (1.9 if "16" in use else 3.8)


def local_largest(step: int, dtype: torch.dtype) -> float:
    """The largest gradient before any reduction, over all ranks."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    loss_of(model, step).backward()
    largest = gradients(model).abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_gradients_are_those_of_plain_ddp_within_the_bound(torch_world, use, codec):
    torch_world.run(check_gradients, use, codec)


def check_to_the_bit(size: int, codec: str, hierarchical: bool) -> None:
    group, rank = group_of(size), dist.get_rank()
    if rank >= size:
        return
    n_elems = 10_001
    wholes = [oracle.values(each, n_elems, np.dtype(np.float32)) for each in range(size)]
    model = DistributedDataParallel(Vector(n_elems), process_group=group)
    plan = zcomm.Plan(hierarchical=hierarchical, one_shot_bytes=0)
    model.register_comm_hook(zcomm.ddp.State(codec, group, plan), zcomm.ddp.hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.from_numpy(wholes[rank])).backward()
        chosen = zcomm.codec(codec)
        topology = {3: Topology(node_of_rank=(0, 0, 1)), 4: TWO_BY_TWO}.get(size) if hierarchical else None
        wanted = oracle.all_reduce(chosen, chosen, wholes, topology, "AVG") if size > 1 else wholes[0]
        assert model.module.vector.grad.numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("hierarchical", [True, False], ids=["two hops", "flat"])
def test_the_mean_is_the_definition_to_the_bit_in_any_world(torch_world, size, hierarchical):
    torch_world.run(check_to_the_bit, size, "int4", hierarchical)


def check_unused_outputs() -> tuple[list[str], list[str]]:
    """static_graph, and a loss that leaves some of the model out: whatever plain DDP does, it does with the hook."""

    def outcomes(compressed: bool) -> list[str]:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)}), static_graph=True
        )
        model.module.forward = lambda x: (model.module["used"](x), model.module["unused"](x))
        if compressed:
            model.register_comm_hook(zcomm.ddp.State("raw"), zcomm.ddp.hook)
        seen = []
        for _ in range(4):
            try:
                model(torch.ones(2, 8))[0].sum().backward()
                seen.append("good")
            except RuntimeError as error:
                seen.append(str(error).splitlines()[0][:60])
        return seen

    return outcomes(False), outcomes(True)


def test_a_static_graph_with_unused_outputs_behaves_as_without_the_hook(torch_world):
    for plain, compressed in torch_world.run(check_unused_outputs):
        assert compressed == plain


def check_join() -> None:
    """Rank r has r + 2 batches: those who are done join with zeros, and the mean is over all ranks."""
    models = {"plain": build(**SMALL_BUCKETS), "raw": build(**SMALL_BUCKETS), "int8": build(**SMALL_BUCKETS)}
    for name, model in models.items():
        if name != "plain":
            zcomm.ddp.compress(model, name, feedback=name == "int8")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.join():
            for step in range(dist.get_rank() + 2):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_bits_on_all_ranks(model.parameters())
    for name, tolerance in (("raw", 1e-6), ("int8", 2e-3)):
        for wanted, got in zip(models["plain"].parameters(), models[name].parameters(), strict=True):
            assert torch.allclose(wanted, got, rtol=0, atol=tolerance)


def test_uneven_inputs_join(torch_world):
    torch_world.run(check_join)


def check_two_models_in_one_backward() -> None:
    """Their hooks interleave; each has its own state, and so its own messages."""
    plain, compressed = ([build(**SMALL_BUCKETS) for _ in range(2)] for _ in range(2))
    for model in compressed:
        zcomm.ddp.compress(model, "raw", feedback=True)
    for step in range(3):
        for pair in (plain, compressed):
            sum(loss_of(model, step) * (1 + number) for number, model in enumerate(pair)).backward()
    for wanted, got in zip(plain, compressed, strict=True):
        assert torch.allclose(gradients(wanted), gradients(got), rtol=1e-4, atol=1e-6)


def test_two_models_in_one_backward(torch_world):
    torch_world.run(check_two_models_in_one_backward)


# -- training ---------------------------------------------------------------------------------------------------------


def check_training() -> dict[str, list[float]]:
    losses = {"plain": train(build(**SMALL_BUCKETS), 6)}
    for codec in ("raw", "int8", "int4"):
        for feedback in (False, True):
            model = build(**SMALL_BUCKETS)
            model.register_comm_hook(zcomm.ddp.State(codec, feedback=feedback), zcomm.ddp.hook)
            losses[f"{codec} {feedback}"] = train(model, 6)
    return losses


def test_six_steps_follow_the_uncompressed_run(torch_world):
    for losses in torch_world.run(check_training):
        plain = losses.pop("plain")
        for name, found in losses.items():
            codec, feedback = name.split()
            assert np.allclose(found, plain, rtol={"raw": 1e-5, "int8": 0.005, "int4": 0.05}[codec]), name
            assert codec == "raw" or found != plain
            assert codec == "raw" or feedback == "False" or found != losses[f"{codec} False"]
        assert losses["raw True"] == losses["raw False"]


def check_compiled(backend: str) -> None:
    eager, compiled = build(), build()
    for model in (eager, compiled):
        model.state = zcomm.ddp.compress(model, "int8")
    assert np.allclose(train(torch.compile(compiled, backend=backend), 3), train(eager, 3), rtol=0.01)
    assert compiled.state.stats()["all_reduce"].raw_bytes == eager.state.stats()["all_reduce"].raw_bytes > 0


def test_a_compiled_model_is_not_bypassed(torch_world):
    torch_world.run(check_compiled, "aot_eager")


def check_late_starts() -> None:
    """Ranks reach their backwards at different times; nothing deadlocks and nothing is mixed up."""
    model = build(**SMALL_BUCKETS)
    zcomm.ddp.compress(model, "int8", feedback=True)
    generator = np.random.default_rng(dist.get_rank())
    for step in range(8):
        time.sleep(generator.uniform(0, 0.03))
        loss_of(model, step).backward()
        assert_same_bits_on_all_ranks([parameter.grad for parameter in model.parameters()])
        model.zero_grad()


def test_ranks_out_of_step_stay_in_order(torch_world):
    torch_world.run(check_late_starts)
