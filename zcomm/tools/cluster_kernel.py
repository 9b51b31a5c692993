"""The Linux calls an emulated cluster needs and Python 3.10 lacks: namespaces, mounts, death signals.

Thin: each function is one system call, raises OSError as os does, and is safe between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_BIND = 2, 4, 4096
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def leave_namespaces(flags: int) -> None:
    """Put this process into fresh namespaces of the kinds in flags (unshare(2))."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def enter_namespace(fd: int, flag: int) -> None:
    """Put this process into the namespace fd is open on (setns(2)); flag says its kind."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flag)), "setns")


def set_host_name(name: bytes) -> None:
    """Set the host name of this process's UTS namespace."""
    _check(_libc.sethostname(name, ctypes.c_size_t(len(name))), "sethostname")


def bind_mount(source: bytes, target: bytes) -> None:
    """Let source appear at target in this process's mount namespace."""
    _check(_libc.mount(source, target, None, ctypes.c_ulong(_MS_BIND), None), "mount")


def mount_memory(target: bytes) -> None:
    """Let an empty file system in memory, open to all, appear at target in this process's mount namespace."""
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _check(_libc.mount(b"tmpfs", target, b"tmpfs", flags, b"mode=1777"), "mount")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent thread ends; call right after fork."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
