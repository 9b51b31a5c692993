"""Every collective in one shape, so that a claim about all of them is one loop: values in, arrays made, result out.

A form takes a communicator and this rank's values, `size * n` of them, and gives a Case: the call, the arrays that it
reads and those that it writes. What `raw` must bring, in float64, is `exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcomm import Communicator, Plan, Topology, local

PLACEMENTS = {
    "1": Topology(nodes=1, ranks_per_node=1),
    "2": Topology(nodes=1, ranks_per_node=2),
    "3": Topology(nodes=1, ranks_per_node=3),
    "4": Topology(nodes=1, ranks_per_node=4),
    "8": Topology(nodes=1, ranks_per_node=8),
    "2+1": Topology(node_of_rank=(0, 0, 1)),
    "2x2": Topology(nodes=2, ranks_per_node=2),
    "2x2 round robin": Topology(node_of_rank=(0, 1, 0, 1)),
    "1+3": Topology(node_of_rank=(0, 1, 1, 1)),
    "2x4": Topology(nodes=2, ranks_per_node=4),
    "3+1+2+2 mixed": Topology(node_of_rank=(0, 1, 0, 2, 0, 3, 2, 3)),
}
CODECS = (
    *("raw", "bf16", "fp16", "int2", "int3:40", "int4", "int5", "int6:24", "int7", "int8", "int8:512"),
    *("fp8_e4m3", "fp8_e5m2:64", "mxfp8", "mxfp4", "nvfp4", "hadamard:int4", "hadamard:int8"),
    *("int8:stochastic", "int4:64:stochastic", "hadamard:int4:128:stochastic"),
)
Make = Callable[[np.ndarray], Any]  # the caller's array with these values: strided, a tensor, ...


class Case(NamedTuple):
    """One call, ready to be made."""

    call: Callable[..., Any]  # takes async_op=
    written: Sequence[Any]
    read: Sequence[Any] = ()


def _all_reduce(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    y = make(x)
    return Case(lambda **how: comm.all_reduce(y, op, **how), [y])


def _coalesced(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    parts = [make(part) for part in np.split(x, [x.size // 3, x.size // 3])]  # one of them is empty
    return Case(lambda **how: comm.all_reduce_coalesced(parts, op, **how), parts)


def _all_gather(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    source, out = make(x[: x.size // comm.size]), make(np.full_like(x, np.nan))
    return Case(lambda **how: comm.all_gather_single(out, source, **how), [out], [source])


def _all_gather_list(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    source = make(x[: x.size // comm.size])
    outs = [make(np.full_like(part, np.nan)) for part in np.split(x, comm.size)]
    return Case(lambda **how: comm.all_gather(outs, source, **how), outs, [source])


def _all_gather_uneven(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    counts = uneven(x.size, comm.size)
    source, out = make(x[: counts[comm.rank]]), make(np.full_like(x, np.nan))
    return Case(lambda **how: comm.all_gather_single(out, source, counts=counts, **how), [out], [source])


def _reduce_scatter(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    source, out = make(x), make(np.full_like(x[: x.size // comm.size], np.nan))
    return Case(lambda **how: comm.reduce_scatter_single(out, source, op, **how), [out], [source])


def _reduce_scatter_list(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    sources = [make(part) for part in np.split(x, comm.size)]
    out = make(np.full_like(x[: x.size // comm.size], np.nan))
    return Case(lambda **how: comm.reduce_scatter(out, sources, op, **how), [out], sources)


def _reduce_scatter_uneven(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    counts = uneven(x.size, comm.size)
    source, out = make(x), make(np.full_like(x[: counts[comm.rank]], np.nan))
    return Case(lambda **how: comm.reduce_scatter_single(out, source, op, counts=counts, **how), [out], [source])


def _all_to_all(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    source, out = make(x), make(np.full_like(x, np.nan))
    return Case(lambda **how: comm.all_to_all_single(out, source, **how), [out], [source])


def _all_to_all_list(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    sources = [make(part) for part in np.split(x, comm.size)]
    outs = [make(np.full_like(part, np.nan)) for part in np.split(x, comm.size)]
    return Case(lambda **how: comm.all_to_all(outs, sources, **how), outs, sources)


def _broadcast(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    y = make(x)
    return Case(lambda **how: comm.broadcast(y, comm.size - 1, **how), [y])


def _reduce(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    y, here = make(x), comm.rank == comm.size // 2
    return Case(lambda **how: comm.reduce(y, comm.size // 2, op, **how), [y] if here else [], [] if here else [y])


def _all_reduce_aside(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    source, out = make(x), make(np.full_like(x, np.nan))
    return Case(lambda **how: comm.all_reduce(source, op, output=out, **how), [out], [source])


def _gather(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    source, root = make(x[: x.size // comm.size]), comm.size // 2
    out = make(np.full_like(x, np.nan)) if comm.rank == root else None
    call = lambda **how: comm.gather_single(out, source, root, **how)
    return Case(call, [] if out is None else [out], [source])


def _gather_list_uneven(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    counts, root = uneven(x.size, comm.size), comm.size // 2
    source = make(x[: counts[comm.rank]])
    outs = [make(np.full_like(x[:count], np.nan)) for count in counts] if comm.rank == root else None
    return Case(lambda **how: comm.gather(source, outs, root, **how), outs or [], [source])


def _scatter(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    root = comm.size - 1
    source, out = make(x) if comm.rank == root else None, make(np.full_like(x[: x.size // comm.size], np.nan))
    call = lambda **how: comm.scatter_single(out, source, root, **how)
    return Case(call, [out], [] if source is None else [source])


def _scatter_list_uneven(comm: Communicator, x: np.ndarray, op: Any, make: Make) -> Case:
    counts, root = uneven(x.size, comm.size), comm.size - 1
    sources = [make(part) for part in np.split(x, np.cumsum(counts)[:-1])] if comm.rank == root else None
    out = make(np.full_like(x[: counts[comm.rank]], np.nan))
    return Case(lambda **how: comm.scatter(out, sources, root, **how), [out], sources or [])


FORMS: dict[str, Callable[[Communicator, np.ndarray, Any, Make], Case]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _coalesced,
    "all_gather_single": _all_gather,
    "all_gather": _all_gather_list,
    "all_gather_single uneven": _all_gather_uneven,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter": _reduce_scatter_list,
    "reduce_scatter_single uneven": _reduce_scatter_uneven,
    "all_to_all_single": _all_to_all,
    "all_to_all": _all_to_all_list,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce aside": _all_reduce_aside,
    "gather_single": _gather,
    "gather uneven": _gather_list_uneven,
    "scatter_single": _scatter,
    "scatter uneven": _scatter_list_uneven,
}
REDUCING = tuple(name for name in FORMS if "reduce" in name)
REPLICATED = ("broadcast", *(name for name in FORMS if name.startswith("all_") and "to_all" not in name))


def uneven(n_elems: int, size: int) -> list[int]:
    """Elements of each rank's shard: none on the second rank, the more the higher the rank."""
    weights = [0 if rank == 1 else rank + 1 for rank in range(size)]
    counts = [n_elems * weight // sum(weights) for weight in weights]
    counts[-1 if size != 2 else 0] += n_elems - sum(counts)
    return counts


def exact(name: str, inputs: Sequence[np.ndarray], rank: int, factor: float = 1.0) -> np.ndarray:
    """What the form must bring on a rank, in float64, one array after another; `factor` times the sum."""
    size, everyone = len(inputs), [x.astype(np.float64) for x in inputs]
    n = everyone[0].size // size
    total = factor * np.sum(everyone, axis=0)
    counts = uneven(everyone[0].size, size)
    own = slice(rank * n, (rank + 1) * n)
    part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    gathered = np.concatenate([x[:n] for x in everyone])
    gathered_uneven = np.concatenate([x[:c] for x, c in zip(everyone, counts, strict=True)])
    results: dict[str, Callable[[], np.ndarray]] = {
        "all_reduce": lambda: total,
        "all_reduce_coalesced": lambda: total,
        "all_reduce aside": lambda: total,
        "all_gather_single": lambda: gathered,
        "all_gather_single uneven": lambda: gathered_uneven,
        "gather_single": lambda: gathered if rank == size // 2 else total[:0],
        "gather uneven": lambda: gathered_uneven if rank == size // 2 else total[:0],
        "scatter_single": lambda: everyone[-1][own],
        "scatter uneven": lambda: everyone[-1][part],
        "reduce_scatter_single": lambda: total[own],
        "reduce_scatter_single uneven": lambda: total[part],
        "all_to_all_single": lambda: np.concatenate([x[own] for x in everyone]),
        "broadcast": lambda: everyone[-1],
        "reduce": lambda: total if rank == size // 2 else total[:0],
    }
    same_as = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    return results[same_as.get(name, "all_to_all_single" if name == "all_to_all" else name)]()


def as_array(array: Any) -> np.ndarray:
    """A copy of a caller's array, flat, as numpy: torch's bfloat16 through float32."""
    if hasattr(array, "detach"):
        array = array.detach().float().numpy() if "bfloat16" in str(array.dtype) else array.detach().numpy()
    return np.array(array).reshape(-1)


def carry_out(case: Case, async_op: bool = False, **how: Any) -> np.ndarray:
    """Make the call; its result, flat. What it only reads must stay as it was."""
    before = [as_array(array).tobytes() for array in case.read]
    work = case.call(async_op=async_op, **how)
    if async_op:
        work.wait()
    assert [as_array(array).tobytes() for array in case.read] == before, "an input was changed"
    return np.concatenate([as_array(array) for array in case.written]) if case.written else np.empty(0)


def run(placement: str, program: Callable[[Communicator], Any], **settings: Any) -> list[Any]:
    """program(communicator) on every rank of a placement; its results by rank."""
    topology = PLACEMENTS[placement]

    def main(transport: Any) -> Any:
        with Communicator(transport, Plan(**settings), topology) as comm:
            return program(comm)

    return local.run(topology.size, main)
