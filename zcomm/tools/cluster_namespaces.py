"""Which fresh namespaces this user may have on this machine, found out by trying util-linux's unshare."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

_TRY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Namespaces:
    """A way of calling unshare that works here."""

    flags: tuple[str, ...]
    rootless: bool
    own_pids: bool  # a PID namespace with /proc and mounts of its own

    def command(self, program: list[str]) -> list[str]:
        """The command that runs program inside, and kills it when killed."""
        return ["unshare", *self.flags, "--fork", "--kill-child", "--", *program]

    def __str__(self) -> str:
        return ("rootless" if self.rootless else "root") + ("" if self.own_pids else ", without a PID namespace")


@dataclass(frozen=True)
class Refused:
    """No way works, and why."""

    why: str


def find_namespaces() -> Namespaces | Refused:
    """The best namespaces this user may have: as root directly, else through a user namespace."""
    if sys.platform != "linux":
        return Refused(f"this is {sys.platform}; network namespaces are Linux")
    if shutil.which("unshare") is None:
        return Refused("there is no unshare; install util-linux")
    user = ("--user", "--map-root-user")
    refusals: list[str] = []
    for rootless in (False, True) if os.geteuid() == 0 else (True,):
        for own_pids in (True, False):
            flags = (*(user if rootless else ()), "--net", *(("--pid", "--mount-proc") if own_pids else ()))
            found = Namespaces(flags, rootless, own_pids)
            refusal = _refusal(found)
            if refusal is None:
                return found
            refusals.append(refusal)
    return Refused(refusals[-1])


def _refusal(namespaces: Namespaces) -> str | None:
    """Why unshare fails with these flags, or None."""
    try:
        tried = subprocess.run(
            namespaces.command(["true"]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRY_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines()
    return said[-1] if said else f"unshare ended with status {tried.returncode}"
