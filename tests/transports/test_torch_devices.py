"""On which device a torch group moves bytes: its backends decide, then the tensor, then what was asked for."""

from __future__ import annotations

import types

import pytest

from zcomm.errors import BufferError

torch = pytest.importorskip("torch")
torch_dist = pytest.importorskip("zcomm.transports.torch_dist")

GLOO, NCCL, BOTH = {"cpu": "gloo", "cuda": "gloo"}, {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


class Group:
    """A process group with these backends."""

    group_name = "7"

    def __init__(self, backends: dict[str, str]) -> None:
        self.backends = backends

    def _get_backend(self, device):
        if device.type not in self.backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return types.SimpleNamespace(name=lambda: self.backends[device.type])


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
        assert torch_dist.device_in(Group(backends), tensor) == expected


def test_a_device_that_the_group_cannot_serve_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)

    assert torch_dist._device_of(Group(BOTH), "cuda") == torch.device("cuda", 2)
    assert torch_dist._device_of(Group(BOTH), "cpu") == CPU
    for backends, device in ((GLOO, "cuda:0"), (BOTH, "meta")):
        with pytest.raises(BufferError, match=f"group '7' moves no bytes on {device}: .*cpu:gloo,cuda:nccl"):
            torch_dist._device_of(Group(backends), device)


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


class Vector(torch.nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = torch.nn.Parameter(torch.zeros(1001))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.vector * gradient).sum()


def plugs_over_both() -> None:
    """CPU models on a group whose own device is a GPU, as "cpu:gloo,cuda:nccl" is where there are GPUs."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    import zcomm

    rank, size = dist.get_rank(), dist.get_world_size()
    mean = sum(torch.arange(1001.0) * (each + 1) for each in range(size)) / size
    mesh = init_device_mesh("cpu", (size,))
    ddp = DistributedDataParallel(Vector())
    fsdp1 = FullyShardedDataParallel(Vector(), device_id=torch.device("cpu"))
    fsdp2 = fully_shard(Vector(), mesh=mesh)
    handles = [
        (ddp, zcomm.ddp.compress(ddp, "int8", feedback=True)),
        (fsdp1, zcomm.fsdp1.compress(fsdp1, "int8", feedback=True)),
        (fsdp2, zcomm.fsdp2.compress(fsdp2, "raw", "int8", quiet=True)),
    ]
    plain, plain_backends = torch_dist.torch, torch_dist._backend_name
    torch_dist._backend_name = lambda group, kind: BOTH[kind]
    torch_dist.torch = types.SimpleNamespace(
        **vars(torch) | {"cuda": types.SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)}
    )
    try:
        group = dist.distributed_c10d._get_default_group()
        assert torch_dist.device_in(group, None) == "cuda:0"
        for model, handle in handles:
            for step in range(4):
                model.zero_grad()
                model(torch.arange(1001.0) * (rank + 1)).backward()
                gradient = next(model.parameters()).grad
                gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                first = 0 if model is ddp else rank * -(-1001 // size)
                expected = mean[first : first + gradient.numel()]
                assert (gradient[: expected.numel()] - expected).abs().max() <= 0.02 * mean.max(), step
            (reduced,) = (found for name, found in handle.stats().items() if name != "all_gather")
            assert reduced.calls == 4
        assert {comm._transport.device for comm in handles[2][1]._reduce.communicators.values()} == {"cpu"}
    finally:
        torch_dist.torch, torch_dist._backend_name = plain, plain_backends


def test_a_cpu_model_s_plugs_use_the_cpu_of_a_group_of_both(torch_world):
    torch_world.run(plugs_over_both)


def test_a_gpu_model_s_plugs_use_its_gpu(monkeypatch):
    from zcomm.plugs import fsdp2, hook_state

    made = []
    group, on_gpu, on_cpu = Group(BOTH), types.SimpleNamespace(device=GPU), types.SimpleNamespace(device=CPU)
    for plug in (hook_state, fsdp2):
        monkeypatch.setattr(plug, "Communicator", lambda *args: made.append(args[3]) or made[-1])
    monkeypatch.setattr(hook_state, "process_group", lambda group: group)

    assert hook_state.HookState("int4", group=group).communicator_for(on_gpu) == "cuda:3"
    state = hook_state.HookState("int4", group=group)
    assert state.communicator_for(on_cpu) == state.communicator_for(on_cpu) == state.communicator == "cpu"
    by_group = fsdp2._by_group("int4", None)
    assert [by_group.over(group, tensor) for tensor in (on_gpu, on_cpu, on_gpu)] == ["cuda:3", "cpu", "cuda:3"]
    assert made == ["cuda:3", "cpu", "cuda:3", "cpu"]
