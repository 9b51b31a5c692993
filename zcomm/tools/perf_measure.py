"""Every form of a collective at one size, timed in turns, counted and checked.

1. Warm up: each form makes calls that are not counted; the last tells how many it may make in its budget.
2. Forms take turns call by call, so that a machine that slows down slows all alike. A call is timed from a barrier
   until it returns, on every rank; its time is that of the slowest.
3. After its last call a form's result is checked, element by element and by a hash over ranks.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from zcomm.collectives.communicator import Communicator
from zcomm.collectives.stats import CollectiveStats
from zcomm.plan import Plan
from zcomm.tools.cluster_counters import node_counters
from zcomm.tools.perf_options import FEWEST_CALLS, Options
from zcomm.tools.perf_row import UNCOMPRESSED, Counted, Form, Measured
from zcomm.tools.perf_truth import Check, Truth, compare, values
from zcomm.tools.perf_world import World
from zcomm.topology import Topology
from zcomm.wire.registry import codec as parse_codec

WARM_UP_CALLS = 2
LONG_CALL_S = 1.0  # one of these is warm-up enough
_OWN = {"float32": "fp32", "bfloat16": "bf16"}  # how a library's forms are called, and the dtype they carry


@dataclass(frozen=True)
class _Heard:
    """What one rank tells the others of one form."""

    times_s: list[float]
    node_tx_bytes: list[int]
    check: Check
    digest: str
    wire_bytes_intra: int
    wire_bytes_inter: int
    raw_bytes: int
    codec_s: float


@dataclass
class _Entrant:
    """One form, its calls so far."""

    form: Form
    dtype: str  # of its arrays
    times_s: list[float] = field(default_factory=list)
    node_tx_bytes: list[int] = field(default_factory=list)
    codec_s: list[float] = field(default_factory=list)
    stats: CollectiveStats = field(default_factory=CollectiveStats)  # of one call
    calls: int = 0  # to be counted
    heard: list[_Heard] = field(default_factory=list)  # of every rank


class Bench:
    """The communicators of one run: one for each number of hops."""

    def __init__(self, world: World, options: Options, on_cluster: bool) -> None:
        self._world = world
        self._options = options
        self._on_cluster = on_cluster
        self._communicators = {hops: Communicator(world.group, Plan(hierarchical=hops == 2)) for hops in (1, 2)}
        self.topology: Topology = self._communicators[1].topology
        self.forms = forms_of(world, options, self.topology)

    def measure(self, collective: str, size_bytes: int) -> list[Measured]:
        """All forms at one size, which is rounded down to what ranks can share equally; alike on all ranks."""
        n_elems = max(1, size_bytes // 4 // self._world.size) * self._world.size
        contest = _Contest(self._world, collective, n_elems, self._communicators, self.topology, self._on_cluster)
        entrants = [_Entrant(form, dtype) for form, dtype in self.forms.items()]
        for entrant in entrants:
            took_s = 0.0
            while len(entrant.times_s) < WARM_UP_CALLS and took_s < LONG_CALL_S:
                took_s = max(self._world.gather(contest.call(entrant)))
            affordable = max(FEWEST_CALLS, int(self._options.budget_s / took_s))
            entrant.calls = min(self._options.calls, affordable)
            entrant.times_s.clear()
            entrant.node_tx_bytes.clear()
            entrant.codec_s.clear()
        for number in range(max(entrant.calls for entrant in entrants)):
            for entrant in entrants:
                if number < entrant.calls:
                    contest.call(entrant)
                if number == entrant.calls - 1:
                    contest.check(entrant)
        return [self._summary(collective, n_elems, entrant) for entrant in entrants]

    def close(self) -> None:
        """Free the communicators."""
        for communicator in self._communicators.values():
            communicator.close()

    def _summary(self, collective: str, n_elems: int, entrant: _Entrant) -> Measured:
        heard, topology = entrant.heard, self.topology
        checks = [one.check for one in heard]
        counted = None
        if entrant.form.by == "zcomm":
            if topology.nodes > 1:
                links = [sum(heard[rank].wire_bytes_inter for rank in ranks) for ranks in topology.ranks_of_node]
            else:
                links = [one.wire_bytes_intra for one in heard]
            busiest = max(heard, key=lambda one: (one.wire_bytes_inter, one.wire_bytes_intra))
            counted = Counted(
                busiest.wire_bytes_intra,
                busiest.wire_bytes_inter,
                busiest.raw_bytes,
                max(links),
                max(one.codec_s for one in heard) if self._options.device == "cpu" else None,
            )
        return Measured(
            collective,
            entrant.form,
            self._world.size,
            4 * n_elems,
            tuple(max(times) for times in zip(*(one.times_s for one in heard), strict=True)),
            Check(
                sum(check.wrong_elems for check in checks),
                max(check.max_error for check in checks),
                max(check.error_over_bound for check in checks),
            ),
            None if collective == "reduce_scatter" else len({one.digest for one in heard}) == 1,
            counted,
            max(statistics.median(one.node_tx_bytes) for one in heard) if self._on_cluster else None,
        )


class _Contest:
    """One collective at one size: the arrays that forms share, and how each is called on them."""

    def __init__(
        self,
        world: World,
        collective: str,
        n_elems: int,  # of the whole tensor
        communicators: Mapping[int, Communicator],  # by hops
        topology: Topology,
        on_cluster: bool,
    ) -> None:
        self._world = world
        self._collective = collective
        self._communicators = communicators
        self._on_cluster = on_cluster
        self._truth = Truth(collective, n_elems, world.rank, topology)
        shard = n_elems // world.size
        self._input = values(world.rank, 0, shard if collective == "all_gather" else n_elems)
        self._n_out = shard if collective == "reduce_scatter" else n_elems
        self._arrays: dict[str, tuple[Any, Any]] = {}  # by dtype: input and output

    def call(self, entrant: _Entrant) -> float:
        """One call, from a barrier until it returns; its seconds on this rank."""
        source, target = self._arrays_of(entrant.dtype)
        target[...] = source if self._collective == "all_reduce" else float("nan")
        world, form = self._world, entrant.form
        communicator = None if form.hops is None else self._communicators[form.hops]
        if communicator is not None:
            communicator.reset_stats()
        world.barrier()
        sent = node_counters().tx_bytes if self._on_cluster else 0
        world.barrier()
        started = perf_counter()
        if communicator is None:
            world.own(self._collective, target, source)
        elif self._collective == "all_reduce":
            communicator.all_reduce(target, "sum", form.codec)
        elif self._collective == "all_gather":
            communicator.all_gather_single(target, source, form.codec)
        else:
            communicator.reduce_scatter_single(target, source, "sum", form.codec)
        world.synchronize()
        took_s = perf_counter() - started
        entrant.times_s.append(took_s)
        if self._on_cluster:
            world.barrier()  # what this node still passes on belongs to the call
            entrant.node_tx_bytes.append(node_counters().tx_bytes - sent)
        if communicator is not None:
            entrant.stats = communicator.stats()[self._collective]
            entrant.codec_s.append(entrant.stats.codec_s)
        return took_s

    def check(self, entrant: _Entrant) -> None:
        """Compare the result of the form's last call, which nobody has overwritten yet, and tell all ranks."""
        result = self._world.numpy(self._arrays_of(entrant.dtype)[1]).reshape(-1)
        form = entrant.form
        if form.hops is None:
            expected = self._truth.of_library(entrant.dtype)
        else:
            expected = self._truth.of_codec(parse_codec(form.codec), form.hops)
        stats = entrant.stats
        entrant.heard = self._world.gather(
            _Heard(
                entrant.times_s,
                entrant.node_tx_bytes,
                compare(result[self._truth.part], expected),
                hashlib.blake2b(result.tobytes()).hexdigest(),
                stats.wire_bytes_intra,
                stats.wire_bytes_inter,
                stats.raw_bytes,
                statistics.median(entrant.codec_s) if entrant.codec_s else 0.0,
            )
        )

    def _arrays_of(self, dtype: str) -> tuple[Any, Any]:
        if dtype not in self._arrays:
            empty = np.zeros(self._n_out, np.float32)
            self._arrays[dtype] = self._world.array(self._input, dtype), self._world.array(empty, dtype)
        return self._arrays[dtype]


def forms_of(world: World, options: Options, topology: Topology) -> dict[Form, str]:
    """Every form to measure, with the dtype of its arrays: all uncompressed ones, then the codecs asked for."""
    forms = {Form(world.library, _OWN[dtype]): dtype for dtype in world.own_dtypes}
    possible = (1, 2) if topology.has_two_levels else (1,)
    wanted: Sequence[tuple[str, int]] = [(codec, hops) for codec in UNCOMPRESSED for hops in possible]
    wanted = [*wanted, *((codec, hops) for codec in options.codecs for hops in options.hops if hops in possible)]
    return forms | {Form("zcomm", codec, hops): "float32" for codec, hops in wanted}
