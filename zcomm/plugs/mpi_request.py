"""A zcomm Work as mpi4py's programs know it: a request with Wait, Test and their forms for several."""

# ruff: noqa: N802 - methods have mpi4py's names

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from zcomm.errors import MissingExtra
from zcomm.work import Work

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(f"mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'") from error

PAUSE_S = 200e-6  # between two questions whether any of several is complete


class Request:
    """A call under way, with the methods of an MPI request. Buffers are kept until it is complete, also if dropped.

    Those of several, `Waitall` and the like, take zcomm's and MPI's requests together.
    """

    def __init__(
        self,
        work: Work,
        deliver: Callable[[], None] | None = None,  # what is left to do when work is complete
    ) -> None:
        self._work = work
        self._deliver = deliver
        self._lock = threading.Lock()
        self._is_null = False  # waited for, as MPI's requests are null from then on
        if deliver is not None:
            work.add_done_callback(lambda work: None if work.exception() else self._finish())

    def Wait(self, status: Any = None) -> bool:
        """Return when the result is there; raise what the call raised. status is left as it is."""
        self._is_null = True
        self._work.wait()
        self._finish()
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
        """Wait for all."""
        for request in requests:
            request.Wait()
        return True

    @staticmethod
    def Testall(requests: Sequence[Any], statuses: Any = None) -> bool:
        """Whether all results are there."""
        return all(request.Test() for request in requests)

    @staticmethod
    def Waitany(requests: Sequence[Any], status: Any = None) -> int:
        """Wait for one that nobody waited for yet; its place in the list. MPI.UNDEFINED where there is none."""
        waiting = [at for at, request in enumerate(requests) if not _is_null(request)]
        while waiting:
            for at in waiting:
                if requests[at].Test():
                    return at
            time.sleep(PAUSE_S)
        return int(MPI.UNDEFINED)

    def _finish(self) -> None:
        """Do what is left, once."""
        with self._lock:
            deliver, self._deliver = self._deliver, None
            if deliver is not None:
                deliver()


def _is_null(request: Any) -> bool:
    return request._is_null if isinstance(request, Request) else bool(request == MPI.REQUEST_NULL)
