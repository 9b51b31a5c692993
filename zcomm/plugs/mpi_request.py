"""A zcomm Work as mpi4py's programs know it: a request with Wait, Test, wait and test."""

# ruff: noqa: N802 - methods have mpi4py's names

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from zcomm.work import Work


class Request:
    """A call under way, with the methods of an MPI request. Buffers are kept until it is complete."""

    def __init__(
        self,
        work: Work,
        deliver: Callable[[], None] | None = None,  # what is left to do when work is complete
    ) -> None:
        self._work = work
        self._deliver = deliver
        self._lock = threading.Lock()

    def Wait(self, status: Any = None) -> bool:
        """Return when the result is there; raise what the call raised. status is left as it is."""
        self._work.wait()
        with self._lock:
            deliver, self._deliver = self._deliver, None
            if deliver is not None:
                deliver()
        return True

    def Test(self, status: Any = None) -> bool:
        """Whether the result is there."""
        return self._work.is_completed() and self.Wait()

    def wait(self, status: Any = None) -> None:
        """As Wait; there is no message to return."""
        self.Wait()

    def test(self, status: Any = None) -> tuple[bool, None]:
        """As Test; there is no message to return."""
        return self.Test(), None

    @staticmethod
    def Waitall(requests: Sequence[Any], statuses: Any = None) -> bool:
        """Wait for zcomm's and MPI's requests together."""
        for request in requests:
            request.Wait()
        return True
