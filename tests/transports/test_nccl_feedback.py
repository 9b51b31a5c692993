"""Error feedback of tensors on a GPU: residuals live there, and are to the bit what they would be in host memory.

The GPUs are tests/fake_cuda.py: late, in any legal order; what is let go is overwritten.
"""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import oracle
import pytest
from fake_cuda import fake_gpus

import zcomm
from zcomm import Communicator, Feedback, Plan, Topology
from zcomm.engines import select
from zcomm.errors import BufferError, MismatchError

PLAN = Plan("int4", chunk_elems=4096, one_shot_bytes=0)
WORLDS = {
    "2 flat": Topology(nodes=1, ranks_per_node=2),
    "2x2": Topology(nodes=2, ranks_per_node=2),
    "2+1": Topology(node_of_rank=(0, 0, 1)),
}
TWO = WORLDS["2 flat"]
STEPS = 4


@pytest.fixture
def cuda(request, monkeypatch):
    """GPUs whose order is drawn from the parameter, or from 0."""
    with fake_gpus(monkeypatch, getattr(request, "param", 0), select.engine_named("native")) as gpus:
        yield gpus


def seeds(count: int):
    return pytest.mark.parametrize("cuda", range(count), indirect=True, ids=lambda seed: f"order {seed}")


def gradient(rank: int, step: int, dtype=np.float32, n_elems: int = 12 * 1031) -> np.ndarray:
    return oracle.values(rank + 10 * step, n_elems, np.dtype(dtype))


def steps(comm, feedback, first: int, last: int, to=np.array, dtype=np.float32) -> list[np.ndarray]:
    """An all-reduce and a reduce-scatter each, all asynchronous; arrays of the transport's kind."""
    results, works = [], []
    for step in range(first, last):
        x, part = to(gradient(comm.rank, step, dtype)), to(np.zeros(12 * 1031 // comm.size, dtype))
        works.append(comm.all_reduce(x, "avg", async_op=True, feedback=feedback.of("x")))
        whole = to(gradient(comm.rank, step + 50, dtype))
        works.append(comm.reduce_scatter_single(part, whole, async_op=True, feedback=feedback.of("whole")))
        results += [x, part]
    for work in works:
        work.wait()
    return results


def bits(results) -> list[bytes]:
    return [(x if isinstance(x, np.ndarray) else x.get()).tobytes() for x in results]


def state_bits(feedback: Feedback) -> dict:
    state = feedback.state_dict()
    parts = [part for saved in state.values() for part in saved["parts"].values()]
    assert {type(part) for part in parts} == {np.ndarray}
    return {
        key: (saved["calls"], {name: part.tobytes() for name, part in saved["parts"].items()})
        for key, saved in state.items()
    }


def in_host_memory(world: str, plan: Plan, program) -> list:
    """What program(comm) returns, by rank, over threads."""

    def main(transport):
        with Communicator(transport, plan, WORLDS[world]) as comm:
            return program(comm)

    return zcomm.local.run(WORLDS[world].size, main)


def on_gpus(cuda, world: str, plan: Plan, program) -> list:
    """The same on a GPU each."""

    def main(nccl):
        with Communicator(nccl, plan, WORLDS[world]) as comm, cuda.module.cuda.Stream():
            return program(comm)

    return cuda.run(WORLDS[world].size, main)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("spec", "beta", "dtype"),
    [
        ("int4", 0.0, np.float32),
        ("int4:stochastic", 0.8, np.float32),
        ("hadamard:int4", 0.8, np.float16),
        ("bf16", 0.3, np.float64),
        ("mxfp4", 0.0, ml_dtypes.bfloat16),
    ],
)
def test_a_gpu_gives_what_host_memory_gives_to_the_bit(world, spec, beta, dtype, cuda):
    plan = Plan(spec, chunk_elems=4096, one_shot_bytes=0)

    def program(to):
        def of_rank(comm):
            comm._conductor.seed = comm.rank  # of random bits; else each communicator's own
            feedback = Feedback(beta, reset_every=3)
            results = steps(comm, feedback, 0, STEPS, to, dtype)
            saved = state_bits(feedback)  # the host waits for the GPU, not for the caller's stream
            return bits(results), saved, feedback.nbytes

        return of_rank

    assert on_gpus(cuda, world, plan, program(cuda.asarray)) == in_host_memory(world, plan, program(np.array))


@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
@pytest.mark.parametrize("resumed_on", ["a GPU", "the host"])
def test_a_run_goes_on_to_the_bit_on_either_device(way, resumed_on, cuda):
    saved = {}

    def begun(comm):
        feedback = Feedback(0.8)
        steps(comm, feedback, 0, 3, cuda.asarray)
        saved[comm.rank] = pickle.dumps(feedback.state_dict() if way == "state_dict" else feedback)
        if way == "deepcopy":
            saved[comm.rank] = pickle.dumps(copy.deepcopy(feedback))
        return bits(steps(comm, feedback, 3, 6, cuda.asarray)), state_bits(feedback)

    def resumed(to):
        def of_rank(comm):
            feedback = pickle.loads(saved[comm.rank])
            if way == "state_dict":
                state, feedback = feedback, Feedback(0.8)
                feedback.load_state_dict(state)
            return bits(steps(comm, feedback, 3, 6, to)), state_bits(feedback)

        return of_rank

    wanted = on_gpus(cuda, "2x2", PLAN, begun)
    if resumed_on == "a GPU":
        assert on_gpus(cuda, "2x2", PLAN, resumed(cuda.asarray)) == wanted
    else:
        assert in_host_memory("2x2", PLAN, resumed(np.array)) == wanted


def test_tensors_that_torch_load_brought_to_a_gpu_are_taken_too():
    class OnGpu:
        """A tensor of torch.load(..., map_location="cuda")."""

        data_ptr = None

        def __init__(self, array):
            self.array = array

        def detach(self):
            return self

        def cpu(self):
            return self.array

    part, feedback = gradient(0, 0), Feedback()
    feedback.load_state_dict({"x": {"calls": 3, "parts": {"input": OnGpu(part)}}})

    assert state_bits(feedback) == {"x": (3, {"input": part.tobytes()})}


@seeds(6)
def test_calls_of_two_communicators_take_turns_on_the_gpu_too(cuda):
    """Each communicator has a stream of its own; the later call waits for the earlier one's residual."""
    inputs = [[gradient(rank, step) for step in range(6)] for rank in range(2)]

    def in_turn(transports, to):
        comms = [Communicator(transport, PLAN, TWO) for transport in transports]
        feedback, xs = Feedback(reset_every=4), [to(x) for x in inputs[comms[0].rank]]
        works = [
            comms[step % 2].all_reduce(x, "avg", async_op=True, feedback=feedback.of("x")) for step, x in enumerate(xs)
        ]
        for work in works:
            work.wait()
        found = bits(xs), state_bits(feedback)
        for comm in comms:
            comm.close()
        return found

    def of_gpu(nccl):
        other = cuda.module.cuda.nccl.NcclCommunicator(2, ("other",), nccl.rank_id())
        with cuda.module.cuda.Stream():
            return in_turn((nccl, other), cuda.asarray)

    assert cuda.run(2, of_gpu) == zcomm.local.run(2, lambda transport: in_turn((transport, transport), np.array))


@seeds(6)
def test_residuals_that_are_dropped_live_until_the_gpu_is_done(cuda):
    """After forget, load_state_dict or the last reference; the machine looks for writes after memory was let go."""

    def program(nccl):
        other = cuda.module.cuda.nccl.NcclCommunicator(2, ("other",), nccl.rank_id())
        with Communicator(nccl, PLAN) as first, Communicator(other, PLAN) as second, cuda.module.cuda.Stream():
            for drop in (lambda feedback: feedback.forget("x"), lambda feedback: feedback.load_state_dict({}), id):
                feedback = Feedback()
                for comm in (first, second):  # memory of the first one's stream, last written on the second's
                    comm.all_reduce(cuda.asarray(gradient(comm.rank, 0)), async_op=True, feedback=feedback.of("x"))
                drop(feedback)
                del feedback

    cuda.run(2, program)


@seeds(3)
def test_state_dict_waits_for_the_calls_made_so_far(cuda):
    """Nobody has waited for the calls' own results, and later calls do not change what was saved."""

    def program(to):
        def of_rank(comm):
            feedback, found = Feedback(), []
            for step in range(4):
                work = comm.all_reduce(to(gradient(comm.rank, step)), async_op=True, feedback=feedback.of("x"))
                if comm._transport.device == "cpu":
                    work.wait()
                found.append(feedback.state_dict())
            return [{name: part.tobytes() for name, part in state["x"]["parts"].items()} for state in found]

        return of_rank

    assert on_gpus(cuda, "2x2", PLAN, program(cuda.asarray)) == in_host_memory("2x2", PLAN, program(np.array))


def test_what_is_not_finite_leaves_the_residual_as_it_was(cuda):
    def program(comm):
        feedback = Feedback(0.8)
        comm.all_reduce(cuda.asarray(gradient(comm.rank, 0)), feedback=feedback.of("x"))
        before = state_bits(feedback)["x"][1]
        broken = cuda.asarray(np.full(12 * 1031, np.inf, np.float32))
        comm.all_reduce(broken, feedback=feedback.of("x"))
        assert np.isnan(broken.get()).all()
        assert state_bits(feedback)["x"][1] == before

    on_gpus(cuda, "2x2", PLAN, program)


def test_a_residual_stays_on_its_device_until_it_is_saved_and_loaded(cuda):
    def program(nccl):
        feedback = Feedback()
        with Communicator(nccl, PLAN) as comm:
            x, y = cuda.asarray(gradient(comm.rank, 0)), gradient(comm.rank, 0)
            comm.all_reduce(x, feedback=feedback.of("x"))
            with Communicator(local[comm.rank], PLAN) as on_host:
                with pytest.raises(
                    BufferError, match=rf"'x' is on cuda:{comm.rank}, this call's tensor on cpu; .*load"
                ):
                    on_host.all_reduce(y, feedback=feedback.of("x"))
                feedback.load_state_dict(feedback.state_dict())
                on_host.all_reduce(y, feedback=feedback.of("x"))
            with pytest.raises(BufferError, match=rf"'x' is on cpu, this call's tensor on cuda:{comm.rank}"):
                comm.all_reduce(x, feedback=feedback.of("x"))

    local = zcomm.local.run(2, lambda transport: transport)
    cuda.run(2, program)


def test_ranks_that_disagreed_may_put_the_size_right(cuda):
    def program(comm):
        residual = Feedback().of("x")
        with pytest.raises(MismatchError):
            comm.all_reduce(cuda.asarray(gradient(0, 0, n_elems=900 + comm.rank)), feedback=residual)
        comm.all_reduce(cuda.asarray(gradient(0, 0, n_elems=800)), feedback=residual)

    on_gpus(cuda, "2 flat", PLAN, program)


def test_memory_on_the_gpu_is_what_is_said_and_does_not_grow(cuda):
    def program(comm):
        feedback, sizes = Feedback(), []
        for step in range(5):
            comm.all_reduce(cuda.asarray(gradient(comm.rank, step, n_elems=2048)), feedback=feedback.of("x"))
            sizes.append(feedback.nbytes)
        assert set(sizes) == {4 * (2048 + 1024)}  # own values, and the sums of half of them
        comm._conductor.lane.close(None)
        assert len(comm._conductor.lane._held) == 0

    on_gpus(cuda, "2 flat", PLAN, program)
