"""A zcomm Work as torch knows it: a `dist.Work`, with wait, is_completed and get_future."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zcomm.graphs import outside_graphs
from zcomm.work import Work


@outside_graphs
class TorchWork(dist.Work):
    """A collective under way, for torch.

    It must be a subclass: FSDP2 waits only for what isinstance calls a dist.Work, and ignores anything else.
    """

    def __init__(
        self,
        work: Work,
        result: Any,  # what the future holds when complete
    ) -> None:
        super().__init__()
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta | float | None = None) -> bool:  # a number means seconds
        """Block until the result is there; raise what the call raised."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        return self._work.wait(seconds or None)  # torch passes zero for no timeout

    def synchronize(self) -> None:
        """wait() by another name: torch's own, of a work that torch does not know, would return at once."""
        self.wait()

    def block_current_stream(self) -> None:
        """wait() too: on a GPU the current stream waits, on a CPU the host."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether wait would return or raise at once."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the call is complete and raised nothing."""
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """What the call raised, once it is complete."""
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result; on a GPU whoever waits for it lets the current stream wait, as torch's own do."""
        devices = sorted({tensor.device for tensor in self.result() if tensor.is_cuda}, key=str)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

        def settle(work: Work) -> None:
            error = work.exception()
            if error is not None:
                future.set_exception(error)
                return
            work.wait()  # done already; on a GPU the current stream, which the future looks at, waits
            future.set_result(self._result)

        self._work.add_done_callback(settle)
        return future

    def result(self) -> list[Any]:
        """The output tensors."""
        return self._result if isinstance(self._result, list) else [self._result]
