"""gloo's own thread, made to wait for its turn: where it takes a core from a thread that sends, both lose a tick.

gloo reads its sockets in a thread of its own, which asks them again, and again, while a connection is locked by another
thread that sends there. Sending wakes the receiver's thread. If more threads want to run than there are cores, that one
takes the sender's core before the lock is released, and the sender's own gloo thread spins on another until the
scheduler's tick gives the sender its core back, 4 ms at 250 Hz.

As a SCHED_BATCH thread it has the same share of the cores and gets an idle one as soon; it only does not push others
off a busy one. No privilege is needed. It serves torch's own collectives as much as zcomm's.
"""

from __future__ import annotations

import os

VARIABLE = "ZCOMM_GLOO_BATCH"  # one of _NO leaves gloo's threads as they are
_NO = ("0", "no", "off", "false")
THREAD_NAME = "gloo_tcp_loop"  # as torch names them; older ones have no name and stay as they are
_TASKS = "/proc/self/task"


def make_batch() -> None:
    """Let this process's gloo threads wait for their turn. Without a way to do so, or against ZCOMM_GLOO_BATCH=0,
    nothing changes."""
    if os.environ.get(VARIABLE, "").lower() in _NO or not hasattr(os, "SCHED_BATCH"):
        return
    try:
        threads = [int(thread) for thread in os.listdir(_TASKS)]
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"{_TASKS}/{thread}/comm") as comm:
                is_gloo = comm.read().strip() == THREAD_NAME
            if is_gloo and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # it has just ended, or a sandbox forbids it
            continue
