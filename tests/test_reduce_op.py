"""Reading an operator: what is known, and what the messages for the rest say."""

import pytest

from zcomm.errors import ReduceOpError
from zcomm.reduce_op import AVG, SUM, ReduceOp, premul_sum, reduce_op
from zcomm.wire.registry import NAMES


@pytest.mark.parametrize(("op", "expected"), [("sum", SUM), ("Sum", SUM), ("AVG", AVG), (AVG, AVG)])
def test_names_in_any_case_and_operators_themselves(op, expected):
    assert reduce_op(op) is expected


@pytest.mark.parametrize("op", ["mean", "Average"])
def test_the_mean_is_called_avg(op):
    with pytest.raises(ReduceOpError, match=f'{op}.*called "avg" here'):
        reduce_op(op)


@pytest.mark.parametrize("op", ["max", "int8", "premul_sum", None, 3, sum])
def test_another_operator_is_refused_with_those_there_are(op):
    with pytest.raises(ReduceOpError, match="expected SUM, AVG or PREMUL_SUM"):
        reduce_op(op)


def test_a_codec_in_an_operator_s_place_is_told_where_it_goes():
    with pytest.raises(ReduceOpError, match="given as codec='int4:64'"):
        reduce_op("int4:64")
    for name in NAMES:
        with pytest.raises(ReduceOpError, match=f"given as codec='{name.upper()}'"):
            reduce_op(name.upper())


@pytest.mark.parametrize("factor", ["2", None, True, 10**400])
def test_a_factor_is_a_number(factor):
    with pytest.raises(ReduceOpError, match="factor of PREMUL_SUM must be a number"):
        premul_sum(factor)


def test_only_premul_sum_has_a_factor():
    with pytest.raises(ReduceOpError, match="SUM has no factor"):
        ReduceOp("SUM", 2.0)
