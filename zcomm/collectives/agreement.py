"""Ranks compare what must be equal before payloads move: at a communicator's making, and before calls that are new.

Every rank sends every other a card, JSON of a fixed size, so that ranks that disagree can still read each other. All
see the same cards, so all come to the same verdict: none goes on alone, none waits for one that has given up.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import json
import zlib
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from zcomm.collectives.request import Request
from zcomm.errors import GroupError, MismatchError
from zcomm.plan import Plan
from zcomm.topology import Topology, node_label
from zcomm.transports.transport import Parcel, Transport
from zcomm.version import __version__

CARD_BYTES = 2048  # padded with spaces
_LONGEST_VALUE = 200  # characters; longer ones are compared by their checksum

Card = dict[str, str]


class Agreement(NamedTuple):
    """What the ranks of a new communicator have settled."""

    topology: Topology
    first_tag: int  # of the communicator's range
    salt: int  # of its random bits, 0 to 2^32 - 1: communicators with equal seeds draw different ones


def agree_on_settings(
    transport: Transport,
    plan: Plan,
    topology: Topology | None,  # None: to be detected
) -> Agreement:
    """Compare version, plan and topology of all ranks; settle the topology, and which tags the communicator has.

    Raises MismatchError or, where no tags are left, GroupError, on every rank.
    """
    settings = {f"plan {field.name}": _spelled(getattr(plan, field.name)) for field in dataclasses.fields(plan)}
    own = {
        "version": __version__,
        **settings,
        "topology": str(topology.node_of_rank) if topology else "detected",
        "node": node_label(),
        "tags": hex(transport.tags.taken()),
    }
    cards = [own]
    if transport.size > 1:
        tag = transport.tags.meeting()
        own["name"] = transport.tags.name_of_meeting()
        cards = exchange(transport, own, tag, plan.timeout_s)
        compare(cards, ("version", *settings, "topology"), transport.group_name)
    first_tag = transport.tags.take(reduce(or_, (int(card["tags"], 16) for card in cards)))
    if first_tag is None:
        raise GroupError(
            f"{transport.group_name} has tags for {transport.tags.count} communicators, and all are taken: "
            "close() those that are not needed, on every rank"
        )
    salt = zlib.crc32(cards[0].get("name", "").encode())
    return Agreement(topology or Topology.of_labels([card["node"] for card in cards]), first_tag, salt)


def agree_on_call(
    transport: Transport,
    request: Request,
    number: int,  # of the call
    tag: int,
    timeout_s: float | None,
) -> None:
    """Raise MismatchError, on every rank, unless all ranks are making this same call."""
    counts = () if request.counts_differ else request.counts
    equal = len(set(counts)) == 1
    card = {
        "call number": str(number),
        "collective": request.name,
        "count": str(counts[0] if equal else counts),
        "dtype": request.source.dtype.spelling,
        "codec": str(request.codec),
        "op": str(request.operator),
        "root": str(request.root),
    }
    fields = tuple(card)
    if request.counts_differ:
        card |= {"sends": json.dumps(request.counts), "receives": json.dumps(request.counts_in)}
    cards = exchange(transport, card, tag, timeout_s)
    where = f"call {number} of {transport.group_name}"
    compare(cards, fields, where)
    if request.counts_differ:
        compare_splits(cards, where)


def _spelled(setting: object) -> str:
    return str(setting.value if isinstance(setting, enum.Enum) else setting)


def exchange(
    transport: Transport,
    own: Card,
    tag: int,
    timeout_s: float | None,
) -> list[Card]:
    """Send the own card to every rank; all cards, by rank."""
    short = {
        name: value if len(value) <= _LONGEST_VALUE else f"of checksum {zlib.crc32(value.encode()):08x}"
        for name, value in own.items()
    }
    payload = np.frombuffer(json.dumps(short).encode().ljust(CARD_BYTES), np.uint8)
    rows = swap(transport, payload, range(transport.size), tag, timeout_s)
    return [_card(row.tobytes(), rank, transport) for rank, row in enumerate(rows)]


def _card(payload: bytes, rank: int, transport: Transport) -> Card:
    try:
        return json.loads(payload)
    except ValueError as error:
        raise MismatchError(
            f"{transport.group_name}: what came from rank {rank} is no card of zcomm; run one version on all ranks "
            'over a backend that moves bytes, unlike torch\'s "fake" one'
        ) from error


def swap(
    transport: Transport,
    own: np.ndarray,  # (n,), as many elements of the same dtype on each of the ranks
    ranks: Sequence[int],  # that swap; this one among them
    tag: int,
    timeout_s: float | None,
) -> np.ndarray:  # (len(ranks), n)
    """Send a few numbers to each of the ranks; everybody's, in the order of ranks.

    Between hosts where the group has a way, else as payloads travel. The host waits either way.
    """
    way = transport.host
    memory = way.empty(own.nbytes * len(ranks))
    places = {rank: memory[at * own.nbytes : (at + 1) * own.nbytes] for at, rank in enumerate(ranks)}
    own_place = places.pop(way.rank)
    way.write(own_place, own.tobytes())
    step = way.open(
        [Parcel(peer, own_place) for peer in places], [Parcel(*each) for each in places.items()], tag, timeout_s
    )
    step.start()
    step.wait()
    step.close()
    if way is not transport:
        nbytes_sent = own.nbytes * len(places)
        transport.wire_bytes_sent += nbytes_sent  # nothing is called in between: other threads count too
    return np.frombuffer(way.read(memory, timeout_s), own.dtype).reshape(len(ranks), -1)


def compare(
    cards: list[Card],  # by rank
    fields: tuple[str, ...],  # the first that differs is reported
    where: str,  # what the error begins with
) -> None:
    """Raise MismatchError if a field is not the same on all cards, naming the odd rank: the value that fewest have."""
    for field in fields:
        counts = collections.Counter(card[field] for card in cards)
        if len(counts) == 1:
            continue
        usual = max(counts, key=lambda value: (counts[value], value == cards[0][field]))
        odd = [rank for rank, card in enumerate(cards) if card[field] != usual]
        others = next(rank for rank, card in enumerate(cards) if card[field] == usual)
        raise MismatchError(
            f"{where}: rank {odd[0]} has {field} {cards[odd[0]][field]}, rank {others} has {usual}"
            + (f" (also odd: ranks {odd[1:]})" if odd[1:] else "")
            + "; make the same call with the same settings on every rank"
        )


def compare_splits(
    cards: list[Card],  # by rank, with "sends" and "receives": JSON lists by peer
    where: str,  # what the error begins with
) -> None:
    """Raise MismatchError if a rank of an all-to-all sends another what that one does not expect."""
    if not all(card["sends"].startswith("[") and card["receives"].startswith("[") for card in cards):
        return  # too long to be sent; messages of another length than expected time out
    sends = [json.loads(card["sends"]) for card in cards]
    receives = [json.loads(card["receives"]) for card in cards]
    for source, target in itertools.product(range(len(cards)), repeat=2):
        if sends[source][target] != receives[target][source]:
            raise MismatchError(
                f"{where}: rank {source} sends {sends[source][target]} elements to rank {target}, which expects "
                f"{receives[target][source]}; give splits that match"
            )
