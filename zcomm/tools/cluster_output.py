"""What ranks write, on its way out of the cluster: cut into whole lines, kept until the command has taken it."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
from dataclasses import dataclass, field
from typing import IO

from zcomm.tools.cluster_channel import Kind, pack

_LONGEST_LINE = 1 << 20  # bytes kept waiting for a newline
_MOST_UNSENT = 1 << 22  # bytes; above this the ranks' pipes are left full until the command has caught up


class Outbox:
    """Bytes for the command, sent as fast as it takes them; the socket does not block."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent = bytearray()

    @property
    def empty(self) -> bool:
        """Whether the command has taken all."""
        return not self._unsent

    @property
    def clogged(self) -> bool:
        """Whether the command is behind, and more should wait."""
        return len(self._unsent) > _MOST_UNSENT

    def send(self, frame: bytes) -> None:
        """Send when there is room."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send what there is room for now."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:  # the command is gone; the end of its stream tells the supervisor
            self._unsent.clear()

    def finish(self) -> None:
        """Wait until all is sent."""
        self._connection.setblocking(True)
        self.flush()


@dataclass(eq=False)
class Stream:
    """One pipe that a rank, or its children, write to."""

    rank: int
    kind: Kind  # STDOUT or STDERR
    pipe: IO[bytes]
    unfinished: bytearray = field(default_factory=bytearray)  # a line without its end

    def __post_init__(self) -> None:
        os.set_blocking(self.pipe.fileno(), False)

    def pass_on(self, outbox: Outbox) -> bool:
        """Send the whole lines that one read gives; returns whether the pipe goes on."""
        try:
            read = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        self.unfinished += read
        whole = not read or len(self.unfinished) >= _LONGEST_LINE
        end = len(self.unfinished) if whole else self.unfinished.rfind(b"\n") + 1
        if end:
            outbox.send(pack(self.kind, bytes(self.unfinished[:end]), self.rank))
            del self.unfinished[:end]
        return bool(read)

    def drain(self, outbox: Outbox) -> None:
        """Send on what is in the pipe by now, however far behind the command is."""
        left = array.array("i", [0])
        fcntl.ioctl(self.pipe, termios.FIONREAD, left)
        for _ in range(-(-left[0] // (1 << 16))):
            self.pass_on(outbox)

    def finish(self, outbox: Outbox) -> None:
        """Send on the line that nobody ended."""
        if self.unfinished:
            outbox.send(pack(self.kind, bytes(self.unfinished), self.rank))
            self.unfinished.clear()
