"""CUDA streams: on which one a communicator queues its work, and what waits for what. The host waits only in `settle`.

A communicator over GPU memory has a `Lane`, a stream of its own. A call goes through four points:

1. `follow`: the lane waits for what the caller has queued on its current stream so far;
2. `entered`: kernels and messages are queued on the lane, which is everybody's current stream meanwhile;
3. `gate`: the lane's order so far, as an event;
4. `Gate.lead`: the caller's current stream waits for it. A synchronous call does this at once, an asynchronous one when
   its Work is waited for.

The caller's stream is torch's current one for a torch tensor, cupy's for any other array. Streams and events are passed
by address, so that torch and cupy may meet. Over host memory all of this is `NO_LANE`, which does nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from zcomm.errors import EngineError, MissingExtra, PeerTimeout

DEFAULT_TIMEOUT_S = 1800.0  # as torch.distributed's
NOT_READY = 600  # cudaErrorNotReady
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 10e-6, 1e-3  # between questions whether the GPU is done


def cupy() -> Any:
    """The cupy module. Raises MissingExtra if it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise MissingExtra(
            f"CUDA memory needs cupy, which does not import ({error}); pip install 'zcomm-collectives[cuda]'"
        ) from error
    return cupy


def nccl() -> Any:
    """The module of cupy's NCCL. Raises MissingExtra if cupy or NCCL itself is not installed."""
    cupy()
    from cupy.cuda import nccl

    if not nccl.available:
        raise MissingExtra("cupy finds no libnccl.so.2; pip install nvidia-nccl-cu13 (or -cu12, as your cupy)")
    return nccl


def index_of(
    device: str,  # "cuda:0"
) -> int:
    """The number of a CUDA device. Raises EngineError for any other device."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise EngineError(f"got device {device!r}; expected 'cpu', or 'cuda:0' and so on")
    return int(index)


def is_torch(array: Any) -> bool:
    """Whether an array is a torch tensor, whose caller's stream is torch's current one."""
    return hasattr(array, "data_ptr")


def current_stream(device: int, of_torch: bool) -> int:
    """Address of torch's, or else cupy's, current stream."""
    if of_torch:
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    return int(cupy().cuda.get_current_stream(device).ptr)


def copy_on_device(
    source: int,  # address
    target: int,  # address
    nbytes: int,
    device: str,
    of_torch: bool,  # whose current stream it is queued on
) -> None:
    """Queue a copy within one GPU."""
    module, index = cupy(), index_of(device)
    with module.cuda.Device(index):
        module.cuda.runtime.memcpyAsync(target, source, nbytes, DEVICE_TO_DEVICE, current_stream(index, of_torch))


def to_host(
    array: Any,  # numpy's or cupy's
    after: Mark | None,  # where a GPU has last written it
) -> np.ndarray:
    """A copy in host memory. The host waits until the GPU is done with the array."""
    if after is not None:
        after.settle(None, "the GPU was not done with an array that is copied to the host")
    return array.copy() if isinstance(array, np.ndarray) else cupy().asnumpy(array)


class Mark:
    """What a stream had queued at one moment."""

    __slots__ = ("_device", "_event", "_runtime")

    def __init__(
        self,
        device: int,
        stream: int,  # address
    ) -> None:
        module = cupy()
        self._runtime = module.cuda.runtime
        self._device = device
        with module.cuda.Device(device):
            self._event = module.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(self._event.ptr, stream)

    def precede(
        self,
        stream: int,  # address
    ) -> None:
        """Let everything queued on stream from now on wait for this."""
        with cupy().cuda.Device(self._device):  # whose default stream has address 0
            self._runtime.streamWaitEvent(stream, self._event.ptr)

    def passed(self) -> bool:
        """Whether the GPU has done it all. Raises EngineError if something that was queued failed."""
        status = int(self._runtime.eventQuery(self._event.ptr))
        if status not in (0, NOT_READY):
            raise EngineError(f"the GPU failed: {self._runtime.CUDARuntimeError(status)}")
        return status == 0

    def settle(
        self,
        timeout_s: float | None,  # None: as long as it takes
        complaint: str,  # what did not happen
        check: Callable[[], None] = lambda: None,  # asked now and then; raises if it never will
    ) -> None:
        """Let the host wait for it. Raises PeerTimeout if timeout_s passes first."""
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = SHORTEST_PAUSE_S
        while not self.passed():
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise PeerTimeout(f"{complaint} within {timeout_s} s")
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Gate(NamedTuple):
    """The end of a call on its lane, and whose current streams wait for it."""

    mark: Mark
    device: int
    for_torch: bool
    for_cupy: bool

    def lead(self) -> None:
        """Let what the caller queues from now on wait for the call."""
        for of_torch, wanted in ((True, self.for_torch), (False, self.for_cupy)):
            if wanted:
                self.mark.precede(current_stream(self.device, of_torch))

    def passed(self) -> bool:
        """Whether the GPU is done with the call."""
        return self.mark.passed()

    def settle(self, timeout_s: float | None) -> None:
        """Let the host wait for the call. Raises PeerTimeout if timeout_s passes first."""
        self.mark.settle(timeout_s, "the GPU was not done with the collective")


class Lane:
    """The stream of one communicator on one GPU. Safe to use from several threads."""

    def __init__(
        self,
        device: str,  # "cuda:0"
    ) -> None:
        module = cupy()
        self.arrays = module  # whose arrays are in this memory; they have numpy's names
        self.device = index_of(device)
        with module.cuda.Device(self.device):
            self.stream = module.cuda.Stream(non_blocking=True)
        self._held: deque[tuple[Mark, Any]] = deque()  # arrays in use, until the GPU is done
        self._lock = threading.Lock()

    def follow(self, *arrays: Any) -> None:
        """Let what is queued on the lane from now on wait for what the arrays' callers have queued so far."""
        for of_torch in set(map(is_torch, arrays)):
            Mark(self.device, current_stream(self.device, of_torch)).precede(self.stream.ptr)
        with self._lock:
            while self._held and self._held[0][0].passed():
                self._held.popleft()

    def after(self, mark: Mark | None) -> None:
        """Let what is queued on the lane from now on wait for what another had queued."""
        if mark is not None:
            mark.precede(self.stream.ptr)

    def hold(self, what: Any) -> Mark:
        """All that is queued on the lane so far; until the GPU is done with it, what it uses is kept."""
        mark = Mark(self.device, self.stream.ptr)
        self._hold(mark, what)
        return mark

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this thread's current stream is the lane, for cupy and, where it has used CUDA, for torch."""
        torch = sys.modules.get("torch")
        with ExitStack() as stack:
            stack.enter_context(cupy().cuda.Device(self.device))
            stack.enter_context(self.stream)
            if torch is not None and torch.cuda.is_initialized():
                stack.enter_context(torch.cuda.stream(self._of_torch(torch)))
            yield

    def gate(
        self,
        *arrays: Any,  # of a call
        behind: Any = None,  # what else it uses
    ) -> Gate:
        """All that is queued on the lane so far. The call's memory is kept until the GPU is done."""
        mark = Mark(self.device, self.stream.ptr)
        for array in arrays:
            if is_torch(array):
                array.record_stream(self._of_torch(sys.modules["torch"]))  # torch keeps the memory, not the tensor
            else:
                self._hold(mark, array)
        if behind is not None:
            self._hold(mark, behind)
        kinds = set(map(is_torch, arrays))
        return Gate(mark, self.device, True in kinds, False in kinds)

    def close(
        self,
        timeout_s: float | None,  # None: DEFAULT_TIMEOUT_S
    ) -> None:
        """Let the host wait until the lane is empty. Raises PeerTimeout if timeout_s passes first."""
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        Mark(self.device, self.stream.ptr).settle(timeout_s, "the GPU was not done with what the communicator queued")
        with self._lock:
            self._held.clear()

    def _hold(self, mark: Mark, what: Any) -> None:
        with self._lock:
            self._held.append((mark, what))

    def _of_torch(self, torch: Any) -> Any:
        return torch.cuda.ExternalStream(self.stream.ptr, device=self.device)


class NoLane:
    """Over host memory nothing is queued: what is called is done."""

    arrays: Any = np
    _entered = nullcontext()

    def follow(self, *arrays: Any) -> None:
        """Nothing to wait for."""

    def after(self, mark: Mark | None) -> None:
        """Nothing to wait for."""

    def hold(self, what: Any) -> None:
        """Nothing is under way."""

    def entered(self) -> AbstractContextManager[None]:
        """Nothing changes inside."""
        return self._entered

    def gate(self, *arrays: Any, behind: Any = None) -> None:
        """Nothing is under way."""

    def close(self, timeout_s: float | None) -> None:
        """Nothing to wait for."""


NO_LANE = NoLane()


def lane_for(
    device: str,  # "cpu", "cuda:0"
) -> Lane | NoLane:
    """A communicator's lane on the device its bytes live on."""
    return NO_LANE if device == "cpu" else Lane(device)
