"""Which call an error befell: collective, number, rank, group, count, dtype, codec."""

from __future__ import annotations

from types import TracebackType

from zcomm.buffers import DType
from zcomm.errors import TransportError
from zcomm.transports.transport import Transport
from zcomm.wire.codec import Codec


class CallContext:
    """Adds to a TransportError raised inside it which call it befell."""

    __slots__ = ("_name", "_number", "_transport", "_what")

    def __init__(
        self,
        transport: Transport,
        name: str,
        number: int,
        what: tuple[int, DType, Codec] | None,  # elements, dtype and codec of a call
    ) -> None:
        self._transport = transport
        self._name = name
        self._number = number
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, TransportError):
            return
        self._transport.tags.freeze()
        where = f"on rank {self._transport.rank} of {self._transport.group_name}"
        if self._what is None:
            raise type(error)(
                f"{self._name} {where}: {error}; "
                "check that every rank is alive and makes it too, by hand or at its first call"
            ) from error.__cause__
        n_elems, dtype, codec = self._what
        raise type(error)(
            f"{self._name} number {self._number} {where}, {n_elems} {dtype.spelling} as {codec}: {error}; "
            "check that every rank is alive and made the same call"
        ) from error.__cause__
