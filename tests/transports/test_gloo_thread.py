"""gloo's own threads wait for their turn once a communicator is there; no others do, nor against the user's will."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from zcomm.transports import gloo_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has SCHED_BATCH")


def policies() -> dict[str, set[int]]:
    """The scheduling policies of this process's threads, by the threads' name."""
    found: dict[str, set[int]] = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as comm:  # it may just have ended
            name, policy = comm.read().strip(), os.sched_getscheduler(int(thread))
            found.setdefault(name, set()).add(policy)
    return found


def a_new_group() -> None:
    import torch
    import torch.distributed as dist

    import zcomm

    def found_after(setting: str | None) -> dict[str, set[int]]:
        group = dist.new_group()
        if setting is not None:
            os.environ[gloo_thread.VARIABLE] = setting
        with zcomm.Communicator(group, "raw") as comm:
            comm.all_reduce(x := torch.ones(5000), "avg")
        assert torch.equal(x, torch.ones(5000))
        os.environ.pop(gloo_thread.VARIABLE, None)
        return policies()

    dist.new_group()  # of which no communicator is made: its thread is gloo's too
    for setting in ("0", "Off"):
        assert os.SCHED_OTHER in found_after(setting)[gloo_thread.THREAD_NAME]
    found = found_after(None)
    assert found.pop(gloo_thread.THREAD_NAME) == {os.SCHED_BATCH}
    assert found
    assert set().union(*found.values()) == {os.SCHED_OTHER}


def test_gloo_s_threads_and_no_others_are_batch_threads(torch_world):
    torch_world.run(a_new_group)


def a_forbidding_system() -> None:
    import torch.distributed as dist

    import zcomm

    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    group, allowed = dist.new_group(), os.sched_setscheduler
    os.sched_setscheduler = forbidden
    try:
        zcomm.Communicator(group).close()
    finally:
        os.sched_setscheduler = allowed
    assert os.SCHED_OTHER in policies()[gloo_thread.THREAD_NAME]


def test_a_system_that_forbids_it_is_left_as_it_is(torch_world):
    torch_world.run(a_forbidding_system)


@pytest.mark.parametrize("tasks", ["nowhere", "."])
def test_without_proc_nothing_happens(tasks, tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()  # a thread that has ended: no name any more
    monkeypatch.setattr(gloo_thread, "_TASKS", str(tmp_path / tasks))

    gloo_thread.make_batch()
    monkeypatch.delattr(os, "SCHED_BATCH")
    gloo_thread.make_batch()


def test_whoever_set_a_policy_keeps_it(monkeypatch):
    asked = []
    monkeypatch.setattr(gloo_thread, "THREAD_NAME", next(iter(policies())))
    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_IDLE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *call: asked.append(call))
    gloo_thread.make_batch()
    assert asked == []

    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_OTHER)
    gloo_thread.make_batch()
    assert asked
    assert all(policy == os.SCHED_BATCH for _, policy, _ in asked)
