"""On which device a torch group moves bytes: its backends decide, then the tensor, then what was asked for."""

from __future__ import annotations

import types

import pytest

from zcomm.errors import BufferError

torch = pytest.importorskip("torch")
torch_dist = pytest.importorskip("zcomm.transports.torch_dist")

GLOO, NCCL, BOTH = {"cpu": "gloo", "cuda": "gloo"}, {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def group_of(backends: dict[str, str]):
    def backend(device):
        if device.type not in backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return types.SimpleNamespace(name=lambda: backends[device.type])

    return types.SimpleNamespace(_get_backend=backend, group_name="7")


@pytest.mark.parametrize(
    ("backends", "tensor", "with_gpu", "without_gpu"),
    [
        (GLOO, None, "cpu", "cpu"),
        (GLOO, CPU, "cpu", "cpu"),
        (GLOO, GPU, "cpu", "cpu"),  # refused by the call itself, which names both devices
        (NCCL, None, "cuda:2", "cpu"),
        (NCCL, CPU, "cuda:2", "cpu"),
        (NCCL, GPU, "cuda:3", "cuda:3"),
        (BOTH, None, "cuda:2", "cpu"),
        (BOTH, CPU, "cpu", "cpu"),
        (BOTH, GPU, "cuda:3", "cuda:3"),
    ],
)
def test_the_device_follows_backends_and_tensor(backends, tensor, with_gpu, without_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for available, expected in ((True, with_gpu), (False, without_gpu)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        assert torch_dist.device_in(group_of(backends), tensor) == expected


def test_a_device_that_the_group_cannot_serve_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)

    assert torch_dist._device_of(group_of(BOTH), "cuda") == torch.device("cuda", 2)
    assert torch_dist._device_of(group_of(BOTH), "cpu") == CPU
    for backends, device in ((GLOO, "cuda:0"), (BOTH, "meta")):
        with pytest.raises(BufferError, match=f"group '7' moves no bytes on {device}: .*cpu:gloo,cuda:nccl"):
            torch_dist._device_of(group_of(backends), device)


def over_gloo() -> None:
    import torch.distributed as dist

    import zcomm
    from zcomm.plugs.torch_calls import communicator

    assert communicator() is communicator(like=torch.ones(3)) is communicator(like=[torch.ones(3)])
    assert communicator()._transport.device == "cpu"
    with pytest.raises(BufferError, match="moves no bytes on cuda:0"):
        zcomm.Communicator(dist.new_group(), device="cuda:0")
    assert zcomm.Communicator(dist.new_group(), device="cpu").size == 4


def test_gloo_s_communicator_is_one_for_all_tensors(torch_world):
    torch_world.run(over_gloo)
