"""Which tags a communicator's messages carry: a range of its own among those that the group's transport has.

Communicators over one group must not receive each other's messages. When one is made, all ranks tell each other which
ranges are taken on them, and all choose the lowest that is free everywhere: a rank may close communicators earlier or
later than others. Those cards travel with a tag that no communicator uses.
"""

from __future__ import annotations

import threading
from functools import lru_cache

TAGS_PER_COMMUNICATOR = 1 << 24
TAG_RANGES = 512  # of a transport whose tags are its own, and have no end
_LOW_TAGS = 1 << 10  # the first of a range's tags, for the cards of those who make a communicator


def tag_of(
    tag: int,  # of the step
    nbytes: int,  # of the message
    mark: int,  # of its parcel
) -> int:
    """A message's own tag: length and mark change the low ten bits, those of the call's fingerprint.

    So a message of another length than is awaited is not taken for it: gloo would abort, Open MPI might crash.
    """
    return tag ^ change_of(nbytes, mark)


@lru_cache(maxsize=4096)
def change_of(nbytes: int, mark: int) -> int:
    """What a message's length and mark change of its step's tag."""
    return (((nbytes >> 4) + mark) * 2654435761 >> 22) & 0x3FF


class TagRanges:
    """The ranges of one group, as taken on this rank."""

    def __init__(
        self,
        count: int,  # of ranges
        first_tag: int = 0,  # of the first range
        name: str = "",  # on rank 0, of the group: another for each that this program has
    ) -> None:
        self.count = count
        self._name = name
        self._first_tag = first_tag
        self._taken = 0  # bit i: range i
        self._meetings = 0
        self.frozen = False
        self._lock = threading.RLock()  # a communicator may be collected, and give back, while this thread holds it

    def meeting(self) -> int:
        """The tag for cards of the next communicator; alike on ranks that have made as many."""
        with self._lock:
            self._meetings += 1
            return self._first_tag + self._meetings % _LOW_TAGS

    def name_of_meeting(self) -> str:
        """Of the communicator whose meeting was the last: on rank 0, another for each that this program makes."""
        return f"{self._name} {self._meetings}"

    def taken(self) -> int:
        """Bit i is set where range i is taken."""
        return self._taken

    def take(
        self,
        elsewhere: int = 0,  # ranges that are taken on other ranks, as taken() says it
    ) -> int | None:
        """First tag of the lowest range that is free everywhere; None if there is none."""
        with self._lock:
            taken = self._taken | elsewhere
            number = (~taken & (taken + 1)).bit_length() - 1  # the lowest bit that is not set
            if number >= self.count:
                return None
            self._taken |= 1 << number
            return self._first_tag + number * TAGS_PER_COMMUNICATOR

    def freeze(self) -> None:
        """Give nothing back from now on: a call has failed, and messages may still be on their way."""
        self.frozen = True

    def give_back(
        self,
        first_tag: int,  # as take() returned it
    ) -> None:
        """Let another communicator have the range: nothing carries its tags any more."""
        with self._lock:
            if not self.frozen:
                self._taken &= ~(1 << (first_tag - self._first_tag) // TAGS_PER_COMMUNICATOR)
