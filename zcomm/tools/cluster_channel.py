"""The socket between `zcomm cluster` and the supervisor inside the cluster: frames of kind, rank, length, payload.

The supervisor's end closes when it ends and the command's when it ends, so each sees the other's death, whatever caused
it, as the end of the stream.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from typing import Any, NamedTuple

_HEADER = struct.Struct("!BHI")


class Kind(enum.IntEnum):
    """What a frame says."""

    TASK = 1  # to the supervisor, JSON: what to build and run
    SIGNAL = 2  # to the supervisor, JSON number: pass this signal to the ranks
    READY = 3  # JSON: the network stands, the ranks are about to start
    REFUSED = 4  # JSON text: the network could not be built; nothing was started
    STDOUT = 5  # whole lines a rank wrote
    STDERR = 6
    NOTE = 7  # JSON text: something for the user, about the cluster itself
    RESULT = 8  # JSON: the program has ended


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    rank: int
    payload: bytes

    def json(self) -> Any:
        """The payload, read as JSON."""
        return json.loads(self.payload)


def pack(kind: Kind, payload: bytes, rank: int = 0) -> bytes:
    """A frame's bytes."""
    return _HEADER.pack(kind, rank, len(payload)) + payload


def pack_json(kind: Kind, value: Any) -> bytes:
    """A frame's bytes, with value as JSON in it."""
    return pack(kind, json.dumps(value).encode())


class Receiver:
    """Cuts the bytes of one direction into frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = bytearray()
        self.ended = False

    def receive(self) -> list[Frame]:
        """The frames one read completes; waits if the socket blocks. Sets ended at the stream's end."""
        try:
            received = self._connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            received = b""
        self.ended = not received
        self._pending += received
        frames = []
        while len(self._pending) >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._pending)
            end = _HEADER.size + length
            if len(self._pending) < end:
                break
            frames.append(Frame(Kind(kind), rank, bytes(self._pending[_HEADER.size : end])))
            del self._pending[:end]
        return frames
