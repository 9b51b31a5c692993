"""Error feedback: what a codec's rounding loses in one call is added to the next; it comes late, and is not lost.

    feedback = Feedback()                                            # the caller's own: keep it, save it, drop it
    comm.all_reduce(grad, "avg", feedback=feedback.of("head"))       # one key for each tensor, call after call

Wherever the call encodes values x, for the same elements each time:

    h = x + e;  send Q(h);  e <- beta e + (1 - beta) (h - deQ(Q(h)))

beta = 0 is the plain form: e is what the last call lost. beta = 0.8 is LoCo's moving average of it (Xie et al.,
arXiv 2407.04480, as DeepSpeed does it; reset_every=1024 there). Every hop is compensated: the first where each rank
encodes its own values, later ones where a rank encodes the sums that it forms. That costs each rank 4 bytes for each
of its elements, and 4 for each element whose sum it forms: in a flat all-reduce n (1 + 1/ranks) elements in all.

A residual e is this rank's own: save and load it on every rank. It lives where its tensor lives, in host memory or on
a GPU; what is saved is a copy in host memory, from which a run goes on in either. `raw` loses nothing and is left
alone. Where the result is not finite (a NaN, an Inf), e stays as it was. Calls that share a residual use it one after
another, in the order they were made, also where they are asynchronous or of several communicators.

[Note: arithmetic] Every sum and product is one fp32 operation: numpy's in host memory; on a GPU the engine's, of chunks
of raw, as cupy's own would flush subnormal numbers to zero. Of cupy only copies are used, and isfinite.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np

from zcomm.buffers import DType, Span
from zcomm.engines.engine import Engine, Finish
from zcomm.errors import BufferError, PlanError
from zcomm.keywords import known_keywords
from zcomm.streams import Lane, Mark, NoLane, is_torch, to_host
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.raw import Raw

_FLOAT32 = Raw()
_INPUT = "input"  # the part of a residual that belongs to the caller's own values; the others are "sum 0", "sum 1", ...


@known_keywords
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
        if not isinstance(key, str):
            raise BufferError(f"a residual's key is a string, one for each tensor, got {key!r}")
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
        """This rank's residuals, copied to host memory: {key: {"calls": int, "parts": {name: float32 numpy array}}}.

        Wait for asynchronous calls first. On a GPU the host waits until the calls made so far are done.
        """
        return {
            key: {"calls": residual.calls, "parts": residual.on_host()} for key, residual in self._residuals.items()
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any],  # of this rank; parts may be arrays or tensors, on any device
    ) -> None:
        """Continue where state_dict() was taken, to the bit, on whatever device the next calls are.

        Replaces all residuals; beta and reset_every stay.
        """
        if not isinstance(state, Mapping):
            raise BufferError(f"state is a {type(state).__name__}; expected what state_dict() gave")
        self._residuals = {key: self._loaded(key, saved) for key, saved in state.items()}

    def _loaded(self, key: str, saved: Any) -> Residual:
        residual = Residual(key, self.beta, self.reset_every)
        try:
            residual.calls = index(saved["calls"])
            residual.parts = {name: _in_host_memory(part) for name, part in saved["parts"].items()}
            if not isinstance(key, str) or isinstance(saved["calls"], bool) or residual.calls < 0:
                raise ValueError(f"calls is {saved['calls']!r}, the key a {type(key).__name__}")
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise BufferError(
                f"the saved residual {key!r} cannot be read: {type(error).__name__} {error}; expected what "
                "state_dict() gave: {'calls': int, 'parts': {name: float32 array or tensor}}"
            ) from error
        if _INPUT in residual.parts:
            residual.n_elems = residual.parts[_INPUT].size
        return residual

    def __repr__(self) -> str:
        return f"Feedback(beta={self.beta}, reset_every={self.reset_every})"


class Residual:
    """What one tensor's calls have lost on this rank so far. Calls take turns with it."""

    __slots__ = (
        "_ended",
        "_is_taken",
        "_made",
        "_next",
        "_turns",
        "_used",
        "beta",
        "calls",
        "device",
        "key",
        "n_elems",
        "parts",
        "reset_every",
    )

    def __init__(self, key: str, beta: float, reset_every: int | None) -> None:
        self.key = key
        self.beta = beta
        self.reset_every = reset_every
        self.calls = 0
        self.n_elems: int | None = None  # of its tensor; None before the first call
        self.device: str | None = None  # and its device; None also after loading
        self.parts: dict[str, Any] = {}  # float32 arrays of numpy's or, on a GPU, cupy's
        self._used: Mark | None = None  # the end of the last call on its GPU
        self._is_taken = False
        self._turns = threading.Condition()
        self._made = 0  # turns given so far
        self._next = 0  # the turn that may use the residual now
        self._ended: set[int] = set()  # turns after it that were given up

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("key", "beta", "reset_every", "calls", "n_elems")}
        return kept | {"parts": self.on_host()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["key"], state["beta"], state["reset_every"])  # type: ignore[misc]
        for name, value in state.items():
            setattr(self, name, value)

    def on_host(self) -> dict[str, np.ndarray]:
        """The parts, copied to host memory."""
        return {name: to_host(part, self._used) for name, part in self.parts.items()}

    def turn(
        self,
        source: Span,
        lane: Lane | NoLane,  # that the call is queued on
    ) -> Turn:
        """The place of a new call on source among those that use this residual.

        Raises BufferError if this is the residual of a tensor of another size, or on another device.
        """
        with self._turns:
            if self.n_elems not in (None, source.n_elems):
                raise BufferError(
                    f"the residual {self.key!r} is of {self.n_elems} elements, this call's tensor has "
                    f"{source.n_elems}; give each tensor a key of its own, or forget() this one first"
                )
            if self.device not in (None, source.device):
                raise BufferError(
                    f"the residual {self.key!r} is on {self.device}, this call's tensor on {source.device}; give each "
                    "tensor a key of its own, or bring residuals over by load_state_dict(state_dict())"
                )
            self.n_elems, self.device = source.n_elems, source.device
            self._made += 1
            return Turn(self, self._made - 1, lane)

    def is_free_for(self, number: int) -> bool:
        """Whether the calls before this turn have ended."""
        return self._next == number

    def take(self, number: int, lane: Lane | NoLane) -> None:
        """Wait for this turn, the lane for the calls before; count its call."""
        with self._turns:
            self._turns.wait_for(lambda: self._next == number)
            lane.after(self._used)
            self._is_taken = True
            if self.reset_every is not None and self.calls and self.calls % self.reset_every == 0:
                self.parts.clear()
            self.calls += 1

    def end(self, number: int, lane: Lane | NoLane) -> None:
        """Let the next turn have the residual. Its memory is kept until the lane has come so far."""
        with self._turns:
            try:
                if self._is_taken and self._next == number:
                    self._is_taken = False
                    self._used = lane.hold(tuple(self.parts.values()))
            finally:
                if not self.calls:  # ranks that disagreed: the tensor may be another when they are put right
                    self.n_elems = self.device = None
                self._ended.add(number)
                while self._next in self._ended:
                    self._ended.remove(self._next)
                    self._next += 1
                self._turns.notify_all()

    def part(
        self,
        name: str,
        n_elems: int,
        arrays: Any,  # numpy, cupy
    ) -> Any:  # float32 (n_elems,)
        """The residual's part of this name, where arrays has its memory.

        Zeros at first, and where the ranks are others than when it was saved.
        """
        part = self.parts.get(name)
        if part is None or part.size != n_elems:
            part = arrays.zeros(n_elems, np.float32)
        self.parts[name] = part = arrays.asarray(part)  # what was loaded is in host memory
        return part


class Turn(NamedTuple):
    """One call's use of a residual: taken before it encodes, ended after it has, however it ends."""

    residual: Residual
    number: int
    lane: Lane | NoLane

    @property
    def is_free(self) -> bool:
        """Whether take would return at once."""
        return self.residual.is_free_for(self.number)

    def take(self, engine: Engine, source: Span) -> Engine:
        """Wait for the calls before; an engine that encodes as engine does, with the residual added and updated."""
        self.residual.take(self.number, self.lane)
        return _Compensating(engine, self.residual, source, self.lane.arrays)

    def end(self) -> None:
        """Let the next call have the residual."""
        self.residual.end(self.number, self.lane)


class _Compensating:
    """The engine of one call. The order of a schedule's sums never changes, so a sum is known by its number."""

    def __init__(
        self,
        engine: Engine,
        residual: Residual,
        source: Span,
        arrays: Any,  # numpy, or on a GPU cupy, which queues on the current stream as the engine does
    ) -> None:
        self.name = engine.name
        self.supports = engine.supports
        self.decode = engine.decode
        self.reduce = engine.reduce
        if hasattr(engine, "decode_pieces"):
            self.decode_pieces = engine.decode_pieces
        self._engine = engine
        self._residual = residual
        self._source = source._replace(owner=None)
        self._arrays = arrays
        self._sums = 0

    def encode(
        self, codec: Codec, source: int, n_elems: int, dtype: DType, wire: int, draw: Draw | None = None
    ) -> None:
        """Encode elements of the caller's input, compensated."""
        if isinstance(codec, Raw):
            self._engine.encode(codec, source, n_elems, dtype, wire, draw)
            return
        start = (source - self._source.address) // dtype.itemsize
        residual = self._residual.part(_INPUT, self._source.n_elems, self._arrays)[start : start + n_elems]
        self._send(codec, self._widened(source, n_elems, dtype), residual, wire, draw)

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
        total = self._empty(n_elems)
        self._engine.reduce(codec, wires, n_elems, finish, _address(total), DType.FLOAT32)
        residual = self._residual.part(f"sum {number}", n_elems, self._arrays)
        self._send(codec_out, total, residual, wire_out, draw)

    def _send(
        self,
        codec: Codec,
        x: Any,  # float32 (n,), what is to be sent
        residual: Any,  # float32 (n,), added and updated
        wire: int,  # address, written
        draw: Draw | None,
    ) -> None:
        """See [Note: arithmetic]."""
        n_elems, beta = residual.size, np.float32(self._residual.beta)
        is_only_added = self._arrays is np and not beta
        before = residual if is_only_added else self._widened(_address(residual), n_elems, DType.FLOAT32)
        h = self._sum(x, before)
        self._engine.encode(codec, _address(h), n_elems, DType.FLOAT32, wire, draw)
        arrived = self._empty(n_elems)
        self._engine.decode(codec, wire, n_elems, _address(arrived), DType.FLOAT32)
        lost = self._sum(h, self._sum(arrived, times=-1.0))
        if beta:
            lost = self._sum(self._sum(lost, times=float(np.float32(1) - beta)), self._sum(before, times=float(beta)))
        self._arrays.copyto(residual, lost, where=self._arrays.isfinite(lost))

    def _widened(self, address: int, n_elems: int, dtype: DType) -> Any:  # float32 (n_elems,)
        """A copy of these elements."""
        copy = self._empty(n_elems)
        self._engine.encode(_FLOAT32, address, n_elems, dtype, _address(copy))
        return copy

    def _sum(
        self,
        *terms: Any,  # float32 (n,), from _empty; two, or one and a factor; the first is ours to overwrite
        times: float = 1.0,
    ) -> Any:  # float32 (n,)
        """The terms' sum, or one term times a factor; each operation rounded by itself. See [Note: arithmetic]."""
        x = terms[0]
        if self._arrays is np:
            with np.errstate(all="ignore"):  # NaN and Inf travel as they are
                return np.add(x, terms[1], out=x) if len(terms) > 1 else np.multiply(x, np.float32(times), out=x)
        total = self._empty(x.size)
        addresses = [_address(term) for term in terms]
        self._engine.reduce(_FLOAT32, addresses, total.size, Finish(times), _address(total), DType.FLOAT32)
        return total

    def _empty(self, n_elems: int) -> Any:  # float32 (n_elems,)
        """Memory with the padding behind it that a chunk of raw has."""
        return self._arrays.empty(_FLOAT32.nbytes(n_elems) // DType.FLOAT32.itemsize, np.float32)[:n_elems]


def _in_host_memory(part: Any) -> np.ndarray:
    """A copy of a saved part, from where the next call takes it to where its tensor is.

    Raises ValueError for another dtype, which has lost bits, and for a NaN or Inf, which no later call gets rid of.
    """
    copy = np.array(part.detach().cpu() if is_torch(part) else part).reshape(-1)
    if copy.dtype != np.float32:
        raise ValueError(f"a part is {copy.dtype}")
    if not np.isfinite(copy).all():
        raise ValueError("a part has elements that are not finite")
    return copy


def _address(array: Any) -> int:
    """Where an array of numpy's or cupy's starts."""
    return int(array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr)
