"""zcomm.ddp: errors come out of backward as they are; a model and its state can be dropped, and a state pickled."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref

import pytest
import torch
from ddp_models import SMALL_BUCKETS, build, loss_of, train
from impatience import AMPLE_S
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch_cases import group_of

import zcomm
from zcomm.collectives.feedback import Turn
from zcomm.errors import BufferError, CodecError, GroupError, PlanError, TopologyError, UnsupportedError
from zcomm.topology import Topology


class BreakingTurn(Turn):
    def take(self, engine, source):
        compensating = super().take(engine, source)
        compensating.decode = compensating.decode_pieces = compensating.reduce = self.fail
        return compensating

    @staticmethod
    def fail(*_):
        raise ArithmeticError("broken on purpose")


class Breaking(zcomm.Feedback):
    """Makes the end of every call fail, whether it decodes or sums, in the communicator's thread."""

    def of(self, key):
        residual = super().of(key)

        class Broken:
            def turn(self, source, lane):
                return BreakingTurn(*residual.turn(source, lane))

        return Broken()


def check_errors() -> None:
    model = build(**SMALL_BUCKETS)
    zcomm.ddp.compress(model, "int8", feedback=Breaking())
    with pytest.raises(Exception, match="broken on purpose") as caught:
        loss_of(model, 0).backward()
    assert caught.type is ArithmeticError, caught.type

    model = build()
    state = zcomm.ddp.compress(model, "int8")
    state.communicator.close()
    with pytest.raises(GroupError, match="closed"):
        loss_of(model, 0).backward()

    model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    zcomm.ddp.compress(model, "int8")
    with pytest.raises(BufferError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()

    model = build()
    model.register_comm_hook("int8", zcomm.ddp.hook)
    with pytest.raises(BufferError, match=r"zcomm\.ddp\.State"):
        loss_of(model, 0).backward()

    shared = zcomm.ddp.State("int8", feedback=True)
    for _ in range(2):
        model = build()
        model.register_comm_hook(shared, zcomm.ddp.hook)
        loss_of(model, 0).backward()
    third = build()
    third.register_comm_hook(shared, zcomm.ddp.hook)
    with pytest.raises(UnsupportedError, match="a State for each model"):
        loss_of(third, 0).backward()

    with pytest.raises(BufferError, match="DistributedDataParallel"):
        zcomm.ddp.compress(nn.Linear(2, 2))
    mixed = build(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    for has_a_hook in (model, mixed):
        with pytest.raises(UnsupportedError, match=r"already.*new DistributedDataParallel"):
            zcomm.ddp.compress(has_a_hook)
    with pytest.raises(TopologyError):
        zcomm.ddp.State("int8", topology=Topology(nodes=3, ranks_per_node=2))
    with pytest.raises(TopologyError, match="'2x2'"):
        zcomm.ddp.State("int8", topology="2x2")
    for nothing in ("", 0, False, []):
        with pytest.raises(CodecError):
            zcomm.ddp.State(nothing)
    with pytest.raises(PlanError, match=r"State\('int4'\)"):
        zcomm.ddp.State(plan="int4")
    with pytest.raises(BufferError, match="feedback"):
        zcomm.ddp.State("int8", feedback="yes")
    with pytest.raises(BufferError, match="what state_dict"):
        zcomm.ddp.State("int8", feedback=True).load_state_dict({"layout 0": 1})
    with pytest.raises(UnsupportedError, match="ddp_optimizer"):
        zcomm.ddp.hook(shared, (torch.zeros(1), torch.zeros(1)))


def test_errors_come_out_of_backward_as_they_are(torch_world):
    torch_world.run(check_errors)


def check_collected() -> None:
    before = set(threading.enumerate())
    model = build(**SMALL_BUCKETS)
    state = zcomm.ddp.compress(model, "int8", feedback=True)
    train(model, 2)
    (worker,) = set(threading.enumerate()) - before
    assert worker.name.startswith("zcomm worker")
    gone = [weakref.ref(each) for each in (model, model.module, state, state.communicator)]
    del model, state
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    worker.join(AMPLE_S)
    assert not worker.is_alive()


def test_a_model_and_its_state_can_be_collected_and_leave_no_thread(torch_world):
    torch_world.run(check_collected)


def check_pickle() -> None:
    group = group_of(4)
    model = build(process_group=group)
    state = zcomm.ddp.compress(model, "int4:64", feedback=True)
    loss_of(model, 0).backward()
    copy = pickle.loads(pickle.dumps(state))
    assert copy.plan == state.plan
    assert copy.feedback.keys() == state.feedback.keys()
    with pytest.raises(GroupError, match=r"set state\.group"):
        copy.communicator  # noqa: B018
    copy.group = group
    assert copy.communicator.size == 4
    with pytest.raises(GroupError, match="new state"):
        copy.group = None
    default = pickle.loads(pickle.dumps(zcomm.ddp.State("int8")))
    assert default.communicator.size == 4


def test_a_state_is_pickled_without_its_group(torch_world):
    torch_world.run(check_pickle)
