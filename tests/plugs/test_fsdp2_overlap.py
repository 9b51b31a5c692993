"""With zcomm.fsdp2, weights travel while layers run: the order of events shows it, whatever anything takes."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcomm
from zcomm.plugs import fsdp2
from zcomm.plugs.torch_work import TorchWork

WIDTHS = (8, 16, 24, 32, 40)  # of what goes into each layer, and out of the last


def events_of_a_step(prefetch: bool) -> list[str]:
    """What befalls the layers in a forward and a backward: "gather 1" begins, "wait 1" ends it, "run 1", "back 1"."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,))
    shapes = list(pairwise(WIDTHS))
    layers = [nn.Linear(n_in, n_out) for n_in, n_out in shapes]
    number_of_shard = {(n_in + 1) * n_out // 4: i for i, (n_in, n_out) in enumerate(shapes)}
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)
    zcomm.fsdp2.compress(model, "int8", "int8", prefetch=prefetch, quiet=True)
    events: list[str] = []
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: events.append(f"run {i}"))
        layer.register_full_backward_hook(lambda *_, i=i: events.append(f"back {i}"))
    gather, wait = fsdp2._CompressedAllGather.__call__, TorchWork.wait

    def gather_and_tell(self, output_tensor, input_tensor, group, async_op=False):
        number = number_of_shard[input_tensor.numel()]
        events.append(f"gather {number}")
        work = gather(self, output_tensor, input_tensor, group, async_op)
        work.number = number
        return work

    def wait_and_tell(self, timeout=None):
        events.append(f"wait {self.number}")
        return wait(self, timeout)

    with (
        mock.patch.object(fsdp2._CompressedAllGather, "__call__", gather_and_tell),
        mock.patch.object(TorchWork, "wait", wait_and_tell),
    ):
        model(torch.ones(3, WIDTHS[0], requires_grad=True)).sum().backward()
    return events


def forward_of(events: list[str]) -> list[str]:
    return events[: events.index("run 3") + 1]


def test_a_prefetched_gather_begins_before_the_layer_ahead_runs_and_is_waited_for_after_it(torch_world):
    for events in torch_world.run(events_of_a_step, True):
        at = {event: place for place, event in enumerate(forward_of(events))}
        for layer in range(3):
            assert at[f"gather {layer + 1}"] < at[f"run {layer}"] < at[f"wait {layer + 1}"] < at[f"run {layer + 1}"]


def test_without_prefetch_each_gather_stands_alone(torch_world):
    for events in torch_world.run(events_of_a_step, False):
        assert forward_of(events) == [f"{what} {layer}" for layer in range(4) for what in ("gather", "wait", "run")]


@pytest.mark.parametrize("prefetch", [False, True])
def test_in_backward_the_next_gather_begins_before_the_layer_s_gradient_is_computed(torch_world, prefetch):
    for events in torch_world.run(events_of_a_step, prefetch):
        backward = events[events.index("run 3") + 1 :]
        at = {event: place for place, event in enumerate(backward)}
        for layer in (3, 2, 1):
            assert at[f"gather {layer - 1}"] < at[f"back {layer}"] < at[f"wait {layer - 1}"]
