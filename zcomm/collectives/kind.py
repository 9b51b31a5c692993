"""What calls that are alike have in common, worked out at the first of them: a fingerprint, a schedule, an engine."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import Any, NamedTuple

from zcomm.collectives.request import Request
from zcomm.collectives.settle import Rows, Settled, Settler
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.reduce_op import ReduceOp

_KEPT_KINDS = 512


class Kind(NamedTuple):
    """All calls of one collective on as many elements of one dtype, in one codec, by one operator."""

    fingerprint: int  # goes into tags: ranks that call differently never receive each other's bytes, they time out
    finish: Finish
    tellers: tuple[int, ...]  # ranks that swap their counts before each call can be settled; mostly none
    settled: Settled | None  # None where there are tellers


class Kinds:
    """The kinds of calls that one communicator has met."""

    def __init__(self, settler: Settler, size: int) -> None:
        self._settler = settler
        self._size = size
        self._kept: OrderedDict[tuple[Any, ...], Kind] = OrderedDict()

    def of(self, request: Request) -> Kind:
        """The kind of a call."""
        key = (
            request.name,
            request.counts,
            request.counts_in,
            request.source.dtype,
            request.codec,
            request.intra_codec,
            request.operator,
            request.root,
        )
        kind = self._kept.get(key)
        if kind is None:
            tellers = self._settler.ranks_that_tell(request)
            kind = self._kept[key] = Kind(
                fingerprint_of(request),
                finish_of(request.operator, self._size),
                tellers,
                None if tellers else self._settler.settle(request, {}),
            )
            if len(self._kept) > _KEPT_KINDS:
                self._kept.popitem(last=False)
        return kind

    def settle(
        self,
        request: Request,  # of a kind with tellers
        rows: Rows,  # what each of these sends
    ) -> Settled:
        """How a call is done that its kind alone does not settle."""
        return self._settler.settle(request, rows)

    def clear(self) -> None:
        """Forget all kinds and schedules."""
        self._kept.clear()
        self._settler.clear()


def fingerprint_of(request: Request) -> int:
    """What is equal on ranks that make the same call, and hardly ever on ranks that do not."""
    same = (request.name, request.shared, request.source.dtype, request.codec, request.operator)
    return zlib.crc32(repr(same).encode())


def finish_of(
    operator: ReduceOp | None,
    size: int,  # ranks whose values are summed
) -> Finish:
    """What an operator does with the sum."""
    if operator is None or operator.name == "SUM":
        return NO_FINISH
    if operator.name == "AVG":
        return Finish(divisor=float(size))
    return Finish(factor=operator.factor)
