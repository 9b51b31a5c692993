"""A Plan is a value: it compares, prints and round-trips; what makes no sense is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from zcomm.buffers import DType
from zcomm.errors import CodecError, PlanError
from zcomm.plan import Check, Plan, plan_of
from zcomm.wire.cast import Cast
from zcomm.wire.int_block import IntBlock


def test_spellings_become_codecs():
    plan = Plan(codec="int4:64", intra_codec="bf16")

    assert plan.codec == IntBlock(4, 64)
    assert plan.intra_codec == Cast(DType.BFLOAT16)
    assert plan == Plan(codec=IntBlock(4, 64), intra_codec=Cast(DType.BFLOAT16))
    assert plan_of("int4") == Plan("int4")
    assert plan_of(plan) is plan


def test_it_prints_so_that_it_can_be_read_back_and_pickled():
    plan = Plan("int4", "bf16", hierarchical=False, min_elems=7, auto=True, check="always", timeout_s=3.0)

    assert eval(repr(plan), {"Plan": Plan, "IntBlock": IntBlock, "Cast": Cast, "DType": DType}) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(replace(plan, codec="int4", check=Check.ALWAYS))


@pytest.mark.parametrize(
    ("settings", "kind", "told"),
    [
        ({"codec": "int9"}, CodecError, "int8"),
        ({"codec": None}, CodecError, "int8"),
        ({"codec": 8}, CodecError, "int8"),
        ({"intra_codec": "zip"}, CodecError, "int8"),
        ({"hierarchical": None}, PlanError, "True or False"),
        ({"hierarchical": "yes"}, PlanError, "True or False"),
        ({"check": "sometimes"}, PlanError, "first, always, never"),
        ({"check": None}, PlanError, "first, always, never"),
        ({"auto": 1}, PlanError, "True or False"),
        ({"min_elems": -1}, PlanError, "at least 0"),
        ({"min_elems": 1.5}, PlanError, "whole number"),
        ({"chunk_elems": 0}, PlanError, "at least 1"),
        ({"chunk_elems": True}, PlanError, "whole number"),
        ({"seed": -1}, PlanError, "from 0 to 2"),
        ({"seed": 2**32}, PlanError, "from 0 to 2"),
        ({"timeout_s": 0}, PlanError, "seconds"),
        ({"timeout_s": 0.0009}, PlanError, "seconds"),
        ({"timeout_s": "5"}, PlanError, "seconds"),
        ({"timeout_s": True}, PlanError, "seconds"),
        ({"timeout_s": float("inf")}, PlanError, "seconds"),
        ({"scratch_bytes": -5}, PlanError, "at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, kind, told):
    with pytest.raises(kind, match=told):
        Plan(**settings)
