"""A keyword that a call does not take is answered with those it takes, by collectives, settings and plugs."""

from __future__ import annotations

import importlib
import inspect

import numpy as np
import pytest

import zcomm
from zcomm.errors import KeywordError, ZcommError
from zcomm.keywords import known_keywords
from zcomm.transports import local


def functions_of(module: str, *names: str) -> list[object]:
    pytest.importorskip("mpi4py" if module == "zcomm.mpi" else "torch")
    return [getattr(importlib.import_module(module), name) for name in names]


def calls() -> list[object]:
    functions = [getattr(zcomm, name) for name in dir(zcomm) if inspect.isfunction(getattr(zcomm, name))]
    return [
        *(function for function in functions if function.__name__ not in ("codec", "premul_sum")),
        zcomm.Plan,
        zcomm.Topology,
        zcomm.Feedback,
        zcomm.Communicator,
        *functions_of("zcomm.plugs.ddp", "State", "compress"),
        *functions_of("zcomm.plugs.fsdp1", "State", "compress"),
        *functions_of("zcomm.plugs.fsdp2", "compress"),
    ]


def test_every_call_names_the_keywords_it_takes():
    pytest.importorskip("torch")
    assert len(calls()) > 20
    for call in calls():
        with pytest.raises(KeywordError) as caught:
            call(no_such_thing=1)
        takes = ", ".join(inspect.signature(call).parameters)
        assert str(caught.value) == f"{call.__name__}() takes no no_such_thing=; it takes {takes}"


@pytest.mark.parametrize(
    ("call", "keyword", "meant"),
    [
        ("all_reduce", "process_group", "group"),
        ("all_reduce", "reduce_op", "op"),
        ("all_reduce", "bits", 'codec="int4:64"'),
        ("all_reduce", "block_size", 'codec="int4:64"'),
        ("all_reduce", "async_", "async_op"),
        ("all_gather_single", "output", "output_tensor"),
        ("Plan", "bits", 'codec="int4:64"'),
        ("Plan", "timeout", "timeout_s"),
        ("Plan", "hierarchy", "hierarchical"),
        ("Topology", "gpus_per_node", "ranks_per_node"),
        ("Communicator", "process_group", "group"),
    ],
)
def test_another_library_s_keyword_is_answered_with_ours(call, keyword, meant):
    pytest.importorskip("torch")
    with pytest.raises(KeywordError, match=f"takes no {keyword}=, did you mean {meant};"):
        getattr(zcomm, call)(**{keyword: 1})


def test_training_s_calls_answer_with_gradients():
    (compress,) = functions_of("zcomm.plugs.fsdp2", "compress")
    for keyword, meant in (("codec", "gradients"), ("bits", 'gradients="int4:64"')):
        with pytest.raises(TypeError, match=f"takes no {keyword}=, did you mean {meant};"):
            compress(None, **{keyword: 4})


def test_methods_answer_before_a_byte_moves_and_the_next_call_works():
    def main(transport):
        comm = zcomm.Communicator(transport)
        x = np.full(300, transport.rank + 1.0, np.float32)
        with pytest.raises(KeywordError, match="did you mean op;"):
            comm.all_reduce(x, reduce_op="avg")
        comm.all_reduce(x, op="avg", codec="raw")
        return x[0]

    assert local.run(3, main) == [2.0, 2.0, 2.0]


def test_mpi_s_methods_answer():
    (comm_type,) = functions_of("zcomm.mpi", "Comm")
    with pytest.raises(KeywordError, match=r"Allreduce\(\) takes no codec=; it takes sendbuf, recvbuf, op"):
        comm_type.Allreduce(None, None, None, codec="int8")


def test_python_s_own_complaints_stay():
    @known_keywords
    def f(a, *, b=1):
        return a, b

    assert f(1, b=2) == (1, 2)
    assert f.__name__ == "f"
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        f(b=2)
    assert not isinstance(caught.value, ZcommError)
    with pytest.raises(KeywordError, match=r"f\(\) takes no c=; it takes a, b"):
        f(1, c=3)
