"""What a reduction does with the sum: SUM, AVG, PREMUL_SUM as torch.distributed means them.

All three are one fp32 sum in group-rank order and at most one operation on it (promise 5 in docs/architecture.md):
SUM nothing, AVG a division by the group's size, PREMUL_SUM a multiplication by its factor.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from zcomm.errors import ReduceOpError


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """A reduction operator: `SUM`, `AVG`, or `premul_sum(factor)`."""

    name: str
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ("SUM", "AVG", "PREMUL_SUM"):
            raise ReduceOpError(f"an operator is SUM, AVG or PREMUL_SUM, got {self.name!r}; use zcomm.AVG, say")
        if isinstance(self.factor, bool) or not isinstance(self.factor, numbers.Real):
            raise ReduceOpError(f"the factor of {self.name} must be a number, got {self.factor!r}")
        try:
            object.__setattr__(self, "factor", float(self.factor))
        except OverflowError as error:
            raise ReduceOpError(f"the factor of {self.name} must be a number that a float holds: {error}") from error
        if self.factor != 1.0 and self.name != "PREMUL_SUM":
            raise ReduceOpError(f"{self.name} has no factor, got {self.factor!r}; use zcomm.premul_sum")

    def __str__(self) -> str:
        return f"{self.name}({self.factor})" if self.name == "PREMUL_SUM" else self.name


SUM = ReduceOp("SUM")
AVG = ReduceOp("AVG")
_CODECS_BEGIN = ("bf16", "fp", "hadamard", "int", "mxfp", "nvfp", "raw")
_BY_NAME = {"SUM": SUM, "AVG": AVG}


def premul_sum(factor: float) -> ReduceOp:
    """The sum of every rank's values times factor. Raises ReduceOpError for what is no number."""
    return ReduceOp("PREMUL_SUM", factor)


def reduce_op(op: Any) -> ReduceOp:
    """Read an operator: zcomm's own, its name in any case, or torch.distributed's.

    Raises ReduceOpError for MAX, MIN, PRODUCT, bitwise operators and anything else: codes of different blocks can be
    summed after decoding, not compared.
    """
    if type(op) is ReduceOp:
        return op
    if isinstance(op, str) and op.upper() in _BY_NAME:
        return _BY_NAME[op.upper()]
    known = getattr(type(op), "RedOpType", None)  # torch's ReduceOp object, which compares only from the left
    if known is not None:
        if op == known.PREMUL_SUM:
            return premul_sum(op.__getstate__()[1])
        for name, ours in _BY_NAME.items():
            if op == getattr(known, name):
                return ours
    member = getattr(op, "name", None)  # of an enum such as torch's RedOpType
    if isinstance(member, str) and member in _BY_NAME:
        return _BY_NAME[member]
    if isinstance(op, str) and op.lower() in ("mean", "average"):
        raise ReduceOpError(f'op {op!r} is called "avg" here; zcomm computes SUM, AVG and PREMUL_SUM')
    is_codec = isinstance(op, str) and op.lower().startswith(_CODECS_BEGIN)
    raise ReduceOpError(
        f"op {op!r} is not one that zcomm computes, with any codec; expected SUM, AVG or PREMUL_SUM. "
        "Use torch.distributed or MPI for other operators" + (f"; a codec is given as codec={op!r}" if is_codec else "")
    )
