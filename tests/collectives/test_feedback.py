"""Error feedback: the residual is what was lost at every hop, it comes back in the next call, and it can be saved."""

from __future__ import annotations

import io
import math
import pickle

import numpy as np
import oracle
import pytest

import zcomm
from zcomm.errors import BufferError, PlanError
from zcomm.topology import Topology

TWO_BY_TWO = Topology(nodes=2, ranks_per_node=2)
TWO_AND_ONE = Topology(node_of_rank=(0, 0, 1))
ONE_NODE = Topology(nodes=1, ranks_per_node=4)
ONE_SHOT_BYTES = 1000  # the larger arrays go through every hop


def gradient(rank: int, step: int, n_elems: int) -> np.ndarray:
    return oracle.values(rank + 10 * step, n_elems, np.dtype(np.float32))


def run(topology: Topology, program):
    """What program(communicator) returns, by rank."""

    def of_rank(transport):
        with zcomm.Communicator(
            transport, zcomm.Plan("int4", chunk_elems=2048, one_shot_bytes=ONE_SHOT_BYTES), topology
        ) as comm:
            return program(comm)

    return zcomm.local.run(topology.size, of_rank)


# -- the rule ---------------------------------------------------------------------------------------------------------


class Defined:
    """The rule for one tensor on one rank and hop, in numpy."""

    def __init__(self, codec, beta: float = 0.0) -> None:
        self.codec, self.beta, self.residual = codec, np.float32(beta), None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x as it arrives."""
        before = np.zeros_like(x) if self.residual is None else self.residual
        h = x + before
        arrived = oracle.through(self.codec, h)
        lost = h - arrived
        self.residual = self.beta * before + (1 - self.beta) * lost if self.beta else lost
        return arrived


@pytest.mark.parametrize("codec", ["int4", "int8:512", "int2:96", "bf16"])
@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize("n_elems", [10, 5000, 20_003])
def test_a_flat_all_reduce_is_the_rule_at_both_hops(codec, beta, n_elems):
    """Each rank's contribution to each shard, then each owner's mean, go through the rule of their own."""
    size, steps, chosen = 4, 4, zcomm.codec(codec)

    def program(comm):
        feedback = zcomm.Feedback(beta)
        results = []
        for step in range(steps):
            x = gradient(comm.rank, step, n_elems)
            comm.all_reduce(x, "avg", codec, feedback=feedback.of("x"))
            results.append(x)
        return results

    one_shot = chosen.nbytes(n_elems) * (size - 1) <= ONE_SHOT_BYTES
    shard = math.ceil(n_elems / size / oracle.SHARD_ALIGNMENT) * oracle.SHARD_ALIGNMENT
    starts = [0] if one_shot else range(0, n_elems, shard)
    first = [[Defined(chosen, beta) for _ in starts] for _ in range(size)]
    second = [Defined(chosen, beta) for _ in starts]
    wanted = []
    for step in range(steps):
        out = np.empty(n_elems, np.float32)
        for number, start in enumerate(starts):
            cut = slice(start, None if one_shot else start + shard)
            arrived = [first[rank][number](gradient(rank, step, n_elems)[cut]) for rank in range(size)]
            mean = oracle.finished(oracle.added(arrived), "AVG", size, 1.0)
            out[cut] = mean if one_shot else second[number](mean)
        wanted.append(out)

    for results in run(ONE_NODE, program):
        for step in range(steps):
            assert results[step].tobytes() == wanted[step].tobytes(), step


@pytest.mark.parametrize("topology", [ONE_NODE, TWO_BY_TWO, TWO_AND_ONE], ids=["flat", "2x2", "2+1"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_mean_over_many_calls_tends_to_the_true_mean(topology, collective, dtype):
    """What arrives in T calls is what was sent, but for the residuals that are left: the error falls as 1/T."""
    n_elems, steps = 3 * 4 * 2048, 40

    def program(comm):
        errors = {}
        whole = [gradient(rank, 0, n_elems).astype(dtype) for rank in range(comm.size)]
        part = slice(0, n_elems)
        if collective == "reduce_scatter":
            part = slice(comm.rank * (n_elems // comm.size), (comm.rank + 1) * (n_elems // comm.size))
        true = np.mean([x[part].astype(np.float64) for x in whole], axis=0)
        for name, feedback in (("with", zcomm.Feedback()), ("without", None)):
            total = np.zeros(true.size)
            for _ in range(steps):
                x = whole[comm.rank].copy()
                residual = feedback and feedback.of("x")
                if collective == "all_reduce":
                    comm.all_reduce(x, "avg", "int3", feedback=residual)
                else:
                    out = np.empty(true.size, dtype)
                    comm.reduce_scatter_single(out, x, "avg", "int3", feedback=residual)
                    x = out
                total += x.astype(np.float64)
            errors[name] = np.linalg.norm(total / steps - true) / np.linalg.norm(true)
        return errors

    for errors in run(topology, program):
        assert errors["with"] < errors["without"] / 8
        assert errors["with"] < 0.05


def test_the_input_of_a_reduction_stays_as_it_is():
    def program(comm):
        x = gradient(comm.rank, 0, 4096)
        before, feedback, out = x.copy(), zcomm.Feedback(), np.empty(1024, np.float32)
        for _ in range(3):
            comm.reduce_scatter_single(out, x, "sum", feedback=feedback.of("x"))
            assert np.array_equal(x, before)

    run(ONE_NODE, program)


def test_the_first_call_and_raw_are_as_without_feedback():
    def program(comm):
        for codec, calls in (("int4", 1), ("raw", 3)):
            feedback = zcomm.Feedback()
            for step in range(calls):
                x, y = gradient(comm.rank, step, 10_000), gradient(comm.rank, step, 10_000)
                comm.all_reduce(x, "avg", codec)
                comm.all_reduce(y, "avg", codec, feedback=feedback.of("y"))
                assert x.tobytes() == y.tobytes()
            assert (feedback.nbytes == 0) == (codec == "raw")

    run(TWO_BY_TWO, program)


def test_a_world_of_one_keeps_no_residual():
    feedback = zcomm.Feedback()
    x = np.ones(10, np.float32)

    zcomm.local.run(1, lambda t: zcomm.Communicator(t, "int4").all_reduce(x, feedback=feedback.of("x")))

    assert feedback.nbytes == 0


def test_reset_every_begins_anew():
    def program(comm):
        feedback, results = zcomm.Feedback(reset_every=3), []
        for _ in range(7):
            x = gradient(comm.rank, 0, 5000)
            comm.all_reduce(x, "avg", feedback=feedback.of("x"))
            results.append(x.tobytes())
        return results

    for results in run(TWO_BY_TWO, program):
        assert results[0] == results[3] == results[6]
        assert results[1] == results[4]
        assert len(set(results)) == 3


def test_several_keys_in_flight_at_once():
    def program(comm):
        together, apart = zcomm.Feedback(), zcomm.Feedback()
        for step in range(3):
            xs = [gradient(comm.rank, step, n) for n in (300, 9000, 30_000)]
            ys = [x.copy() for x in xs]
            works = [
                comm.all_reduce(x, "avg", async_op=True, feedback=together.of(str(number)))
                for number, x in enumerate(xs)
            ]
            for work in reversed(works):
                work.wait()
            for number, y in enumerate(ys):
                comm.all_reduce(y, "avg", feedback=apart.of(str(number)))
            for x, y in zip(xs, ys, strict=True):
                assert x.tobytes() == y.tobytes()

    run(TWO_BY_TWO, program)


def test_a_value_that_is_not_finite_leaves_the_residual_as_it_was():
    def program(comm):
        feedback, x = zcomm.Feedback(), gradient(comm.rank, 0, 5000)
        comm.all_reduce(x, "avg", feedback=feedback.of("x"))
        before = feedback.state_dict()["x"]["parts"]
        broken = np.full(5000, np.nan, np.float32)
        comm.all_reduce(broken, "avg", feedback=feedback.of("x"))
        after = feedback.state_dict()["x"]["parts"]
        assert np.isnan(broken).all()
        for name in before:
            assert before[name].tobytes() == after[name].tobytes()

    run(TWO_BY_TWO, program)


# -- keeping it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["state_dict", "a file", "pickle"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(through):
    def program(comm):
        def steps(feedback, first, last):
            results = []
            for step in range(first, last):
                x = gradient(comm.rank, step, 20_000)
                comm.all_reduce(x, "avg", feedback=feedback.of("x"))
                results.append(x.tobytes())
            return results

        feedback = zcomm.Feedback(0.8, reset_every=4)
        steps(feedback, 0, 5)
        if through == "pickle":
            resumed = pickle.loads(pickle.dumps(feedback))
        else:
            state = feedback.state_dict()
            if through == "a file":
                np.savez(file := io.BytesIO(), **state["x"]["parts"])
                file.seek(0)
                state = {"x": {"calls": state["x"]["calls"], "parts": dict(np.load(file))}}
            resumed = zcomm.Feedback(0.8, reset_every=4)
            resumed.load_state_dict(state)
        assert steps(resumed, 5, 10) == steps(feedback, 5, 10)

    run(TWO_BY_TWO, program)


def test_a_saved_state_does_not_change_with_later_calls():
    def program(comm):
        feedback, x = zcomm.Feedback(), gradient(comm.rank, 0, 5000)
        comm.all_reduce(x, "avg", feedback=feedback.of("x"))
        saved = feedback.state_dict()["x"]["parts"]
        before = {name: part.tobytes() for name, part in saved.items()}
        comm.all_reduce(x, "avg", feedback=feedback.of("x"))
        assert {name: part.tobytes() for name, part in saved.items()} == before
        assert feedback.state_dict()["x"]["parts"]["input"].tobytes() != before["input"]

    run(TWO_BY_TWO, program)


def test_memory_does_not_grow_and_is_what_is_said():
    def program(comm):
        feedback, sizes = zcomm.Feedback(), []
        for step in range(5):
            x = gradient(comm.rank, step, 16 * 1024)
            comm.all_reduce(x, "avg", feedback=feedback.of("x"))
            sizes.append(feedback.nbytes)
        assert set(sizes) == {4 * 16 * 1024 * 5 // 4}  # own values, and a quarter's sums
        feedback.forget("x")
        assert feedback.keys() == ()
        assert feedback.nbytes == 0

    run(ONE_NODE, program)


def test_a_key_belongs_to_one_size():
    def program(comm):
        feedback = zcomm.Feedback()
        for n_elems in (100, 100, 101):
            x = gradient(comm.rank, 0, n_elems)
            if n_elems == 101:
                with pytest.raises(BufferError, match=r"'x' is of 100 elements, this call's tensor has 101"):
                    comm.all_reduce(x, feedback=feedback.of("x"))
                feedback.forget("x")
            comm.all_reduce(x, feedback=feedback.of("x"))

    run(TWO_BY_TWO, program)


def test_settings_are_checked():
    for beta in (1, 1.0, -0.1, float("nan"), "0.8", True):
        with pytest.raises(PlanError, match="beta"):
            zcomm.Feedback(beta)
    for reset_every in (0, -1, 2.0, True):
        with pytest.raises(PlanError, match="reset_every"):
            zcomm.Feedback(reset_every=reset_every)
    assert repr(zcomm.Feedback(0.8, 1024)) == "Feedback(beta=0.8, reset_every=1024)"
    for key in (None, 5, ["x"], {}):
        with pytest.raises(BufferError, match="a string"):
            zcomm.Feedback().of(key)


def test_what_is_no_residual_is_refused_before_a_byte_moves():
    def program(comm):
        told = []
        for feedback in (zcomm.Feedback(), True, "x", 0):
            for call in (comm.all_reduce, lambda x, **more: comm.reduce_scatter_single(np.empty(4, f), x, **more)):
                with pytest.raises(BufferError, match=r"Feedback\(\)\.of\(key\), got") as caught:
                    call(np.ones(4 * comm.size, f), feedback=feedback)
                told.append(str(caught.value))
        assert not comm.stats()
        return told

    f = np.float32
    run(Topology(nodes=1, ranks_per_node=1), program)
    told = run(Topology(nodes=1, ranks_per_node=2), program)
    assert told[0] == told[1]


def test_what_no_state_dict_gave_is_refused_and_changes_nothing():
    feedback = zcomm.Feedback()
    feedback.of("kept")
    for state in (
        None,
        [],
        {"a": 1},
        {"a": {"parts": {}}},
        {"a": {"calls": "1", "parts": {}}},
        {"a": {"calls": 1, "parts": [1]}},
        {"a": {"calls": 1, "parts": {"input": [[1.0], [1.0, 2.0]]}}},
        {"a": {"calls": 1, "parts": {"input": "x"}}},
        {"a": {"calls": -1, "parts": {}}},
        {"a": {"calls": True, "parts": {}}},
        {7: {"calls": 1, "parts": {}}},
        *({"a": {"calls": 1, "parts": {"input": np.ones(9, dtype)}}} for dtype in ("f2", "f8", "i4", "c8")),
        {"a": {"calls": 1, "parts": {"input": np.array([0.5, np.nan, 1.0], np.float32)}}},
        {"a": {"calls": 1, "parts": {"input": np.ones(3, np.float32), "sum 0": np.array([np.inf], np.float32)}}},
    ):
        with pytest.raises(BufferError, match="what state_dict"):
            feedback.load_state_dict(state)
        assert feedback.keys() == ("kept",)


# -- turns ------------------------------------------------------------------------------------------------------------


def several_calls(comm, feedback, asynchronous: bool) -> list[np.ndarray]:
    """Five calls with one key, of many chunks each."""
    xs = [gradient(comm.rank, step, 50_003) for step in range(5)]
    works = [comm.all_reduce(x, "avg", feedback=feedback.of("x"), async_op=asynchronous) for x in xs]
    if asynchronous:
        for work in reversed(works):
            work.wait()
    return xs


def test_calls_in_flight_with_one_residual_use_it_one_after_another():
    def program(comm):
        in_turn = several_calls(comm, zcomm.Feedback(), asynchronous=False)
        in_flight = several_calls(comm, zcomm.Feedback(), asynchronous=True)
        return in_turn, in_flight

    for in_turn, in_flight in run(TWO_BY_TWO, program):
        assert [x.tobytes() for x in in_flight] == [x.tobytes() for x in in_turn]


def test_calls_of_two_communicators_with_one_residual_take_turns():
    def of_rank(transport):
        comms = [zcomm.Communicator(transport, zcomm.Plan("int4", chunk_elems=2048), TWO_BY_TWO) for _ in range(2)]
        results = []
        for asynchronous in (False, True):
            residual = zcomm.Feedback().of("x")
            xs = [gradient(transport.rank, step, 50_003) for step in range(6)]
            works = [
                comms[step % 2].all_reduce(x, "avg", feedback=residual, async_op=asynchronous)
                for step, x in enumerate(xs)
            ]
            if asynchronous:
                for work in works:
                    work.wait()
            results.append([x.tobytes() for x in xs])
        for comm in comms:
            comm.close()
        assert results[0] == results[1]

    zcomm.local.run(4, of_rank)


def test_ranks_that_disagreed_may_put_the_size_right():
    def program(comm):
        residual = zcomm.Feedback().of("x")
        wrong = np.ones(10_000 if comm.rank == 1 else 9_000, np.float32)
        for asynchronous in (False, True):
            with pytest.raises(zcomm.errors.MismatchError):
                work = comm.all_reduce(wrong.copy(), feedback=residual, async_op=asynchronous)
                work.wait()
        comm.all_reduce(np.ones(9_000, np.float32), feedback=residual)

    run(ONE_NODE, program)
