"""Error feedback: what a codec's rounding loses in one call is added to the next; it comes late, and is not lost.

    feedback = Feedback()                                            # the caller's own: keep it, save it, drop it
    comm.all_reduce(grad, "avg", feedback=feedback.of("head"))       # one key for each tensor, call after call

Wherever the call encodes values x, for the same elements each time:

    h = x + e;  send Q(h);  e <- beta e + (1 - beta) (h - deQ(Q(h)))

beta = 0 is the plain form: e is what the last call lost. beta = 0.8 is LoCo's moving average of it (Xie et al.,
arXiv 2407.04480, as DeepSpeed does it; reset_every=1024 there). Every hop is compensated: the first where each rank
encodes its own values, later ones where a rank encodes the sums that it forms. That costs each rank 4 bytes for each
of its elements, and 4 for each element whose sum it forms: in a flat all-reduce n (1 + 1/ranks) elements in all.

A residual e is this rank's own: save and load it on every rank. `raw` loses nothing and is left alone. Where the
result is not finite (a NaN, an Inf), e stays as it was. Calls that share a residual use it one after another, in the
order they were made, also where they are asynchronous or of several communicators.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zcomm.buffers import DType, Span
from zcomm.engines.engine import Engine, Finish
from zcomm.errors import BufferError, PlanError
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.raw import Raw

_INPUT = "input"  # the part of a residual that belongs to the caller's own values; the others are "sum 0", "sum 1", ...


class Feedback:
    """Residuals of any number of tensors, by the key that the caller gives each."""

    def __init__(
        self,
        beta: float = 0.0,  # weight of the residual so far; 0: plain, 0.8: LoCo's
        reset_every: int | None = None,  # calls of a key after which its residual begins anew; None: never
    ) -> None:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1:
            raise PlanError(f"beta must be a number from 0 (plain) to less than 1, got {beta!r}; LoCo takes 0.8")
        if reset_every is not None and (
            isinstance(reset_every, bool) or not isinstance(reset_every, int) or reset_every < 1
        ):
            raise PlanError(f"reset_every must be a whole number of at least 1 or None, got {reset_every!r}")
        self.beta = float(beta)
        self.reset_every = reset_every
        self._residuals: dict[str, Residual] = {}

    def of(self, key: str) -> Residual:
        """The residual of the tensor that key names, for `feedback=` of one call after another."""
        found = self._residuals.get(key)
        if found is None:
            found = self._residuals[key] = Residual(key, self.beta, self.reset_every)
        return found

    def keys(self) -> tuple[str, ...]:
        """The keys that have a residual."""
        return tuple(self._residuals)

    def forget(self, *keys: str) -> None:
        """Drop the residuals of these keys; of all keys if none is given."""
        for key in keys or self.keys():
            self._residuals.pop(key, None)

    @property
    def nbytes(self) -> int:
        """Memory of all residuals."""
        return sum(part.nbytes for residual in self._residuals.values() for part in residual.parts.values())

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, copied: {key: {"calls": int, "parts": {name: float32 array}}}."""
        return {
            key: {"calls": residual.calls, "parts": {name: part.copy() for name, part in residual.parts.items()}}
            for key, residual in self._residuals.items()
        }

    def load_state_dict(
        self,
        state: dict[str, Any],  # of this rank; parts may be arrays or CPU tensors
    ) -> None:
        """Continue where state_dict() was taken, to the bit. Replaces all residuals; beta and reset_every stay."""
        loaded = {}
        for key, saved in state.items():
            residual = loaded[key] = Residual(key, self.beta, self.reset_every)
            residual.calls = int(saved["calls"])
            residual.parts = {name: np.array(part, np.float32) for name, part in saved["parts"].items()}
            if _INPUT in residual.parts:
                residual.n_elems = residual.parts[_INPUT].size
        self._residuals = loaded

    def __repr__(self) -> str:
        return f"Feedback(beta={self.beta}, reset_every={self.reset_every})"


class Residual:
    """What one tensor's calls have lost on this rank so far. Calls take turns with it."""

    __slots__ = ("_ended", "_made", "_next", "_turns", "beta", "calls", "key", "n_elems", "parts", "reset_every")

    def __init__(self, key: str, beta: float, reset_every: int | None) -> None:
        self.key = key
        self.beta = beta
        self.reset_every = reset_every
        self.calls = 0
        self.n_elems: int | None = None  # of its tensor; None before the first call
        self.parts: dict[str, np.ndarray] = {}
        self._turns = threading.Condition()
        self._made = 0  # turns given so far
        self._next = 0  # the turn that may use the residual now
        self._ended: set[int] = set()  # turns after it that were given up

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("key", "beta", "reset_every", "calls", "n_elems", "parts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["key"], state["beta"], state["reset_every"])  # type: ignore[misc]
        for name, value in state.items():
            setattr(self, name, value)

    def turn(self, source: Span) -> Turn:
        """The place of a new call on source among those that use this residual.

        Raises BufferError if this is the residual of a tensor of another size.
        """
        with self._turns:
            if self.n_elems not in (None, source.n_elems):
                raise BufferError(
                    f"the residual {self.key!r} is of {self.n_elems} elements, this call's tensor has "
                    f"{source.n_elems}; give each tensor a key of its own, or forget() this one first"
                )
            self.n_elems = source.n_elems
            self._made += 1
            return Turn(self, self._made - 1)

    def is_free_for(self, number: int) -> bool:
        """Whether the calls before this turn have ended."""
        return self._next == number

    def take(self, number: int) -> None:
        """Wait for this turn; count its call."""
        with self._turns:
            self._turns.wait_for(lambda: self._next == number)
            if self.reset_every is not None and self.calls and self.calls % self.reset_every == 0:
                self.parts.clear()
            self.calls += 1

    def end(self, number: int) -> None:
        """Let the next turn have the residual."""
        with self._turns:
            if not self.calls:  # ranks that disagreed: the tensor may be another when they are put right
                self.n_elems = None
            self._ended.add(number)
            while self._next in self._ended:
                self._ended.remove(self._next)
                self._next += 1
            self._turns.notify_all()

    def part(self, name: str, n_elems: int) -> np.ndarray:
        """The residual's part of this name; zeros at first, and where the ranks are others than when it was saved."""
        part = self.parts.get(name)
        if part is None or part.size != n_elems:
            part = self.parts[name] = np.zeros(n_elems, np.float32)
        return part


class Turn(NamedTuple):
    """One call's use of a residual: taken before it encodes, ended after it has, however it ends."""

    residual: Residual
    number: int

    @property
    def is_free(self) -> bool:
        """Whether take would return at once."""
        return self.residual.is_free_for(self.number)

    def take(self, engine: Engine, source: Span) -> Engine:
        """Wait for the calls before; an engine that encodes as engine does, with the residual added and updated."""
        self.residual.take(self.number)
        return _Compensating(engine, self.residual, source)

    def end(self) -> None:
        """Let the next call have the residual."""
        self.residual.end(self.number)


class _Compensating:
    """The engine of one call. The order of a schedule's sums never changes, so a sum is known by its number."""

    def __init__(self, engine: Engine, residual: Residual, source: Span) -> None:
        self.name = engine.name
        self.supports = engine.supports
        self.decode = engine.decode
        self.reduce = engine.reduce
        self._engine = engine
        self._residual = residual
        self._source = source._replace(owner=None)
        self._sums = 0

    def encode(
        self, codec: Codec, source: int, n_elems: int, dtype: DType, wire: int, draw: Draw | None = None
    ) -> None:
        """Encode elements of the caller's input, compensated."""
        if isinstance(codec, Raw):
            self._engine.encode(codec, source, n_elems, dtype, wire, draw)
            return
        start = (source - self._source.address) // dtype.itemsize
        residual = self._residual.part(_INPUT, self._source.n_elems)[start : start + n_elems]
        self._send(codec, _elements(source, n_elems, dtype), residual, wire, draw)

    def reduce_encode(
        self,
        codec: Codec,
        wires: Sequence[int],
        n_elems: int,
        finish: Finish,
        codec_out: Codec,
        wire_out: int,
        draw: Draw | None = None,
    ) -> None:
        """Add contributions and encode the sum, compensated."""
        number = self._sums
        self._sums += 1
        if isinstance(codec_out, Raw):
            self._engine.reduce_encode(codec, wires, n_elems, finish, codec_out, wire_out, draw)
            return
        total = np.empty(n_elems, np.float32)
        self._engine.reduce(codec, wires, n_elems, finish, _address(total), DType.FLOAT32)
        self._send(codec_out, total, self._residual.part(f"sum {number}", n_elems), wire_out, draw)

    def _send(
        self,
        codec: Codec,
        x: np.ndarray,  # (n,), what is to be sent
        residual: np.ndarray,  # float32 (n,), added and updated
        wire: int,  # address, written
        draw: Draw | None,
    ) -> None:
        with np.errstate(all="ignore"):  # NaN and Inf travel as they are
            h = x.astype(np.float32)
            h += residual
            self._engine.encode(codec, _address(h), h.size, DType.FLOAT32, wire, draw)
            arrived = np.empty_like(h)
            self._engine.decode(codec, wire, h.size, _address(arrived), DType.FLOAT32)
            h -= arrived
            beta = np.float32(self._residual.beta)
            if beta:
                h *= np.float32(1) - beta
                h += beta * residual
        np.copyto(residual, h, where=np.isfinite(h))


def _elements(address: int, n_elems: int, dtype: DType) -> np.ndarray:
    """Memory as an array of its elements."""
    memory = (ctypes.c_uint8 * (n_elems * dtype.itemsize)).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype.numpy)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
