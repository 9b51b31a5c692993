"""Nothing at all, and more than 32 bits count: empty in is empty out; offsets and sizes are worked out in 64 bits."""

from __future__ import annotations

from itertools import pairwise

import forms
import ml_dtypes
import numpy as np
import pytest
import torch

import zcomm
from zcomm.collectives import flat, hierarchical
from zcomm.collectives.schedule import Job
from zcomm.collectives.shards import balanced_shards, chunks, shards_of
from zcomm.errors import CodecError, PlanError
from zcomm.wire.fp8_block import Fp8Block
from zcomm.wire.int_block import IntBlock

DTYPES = (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)


@pytest.mark.parametrize("placement", ["1", "2", "3", "2+1", "2x2", "8"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_empty_in_is_empty_out_in_every_form(placement, asynchronous):
    def program(comm):
        before = comm._transport.wire_bytes_sent
        for name in forms.FORMS:
            if "to_all" in name and comm.topology.has_two_levels:
                continue  # the counts themselves are swapped inside a node
            for codec in ("raw", "int8", "int4:64:stochastic", "mxfp4"):
                for dtype in DTYPES:
                    case = forms.FORMS[name](comm, np.empty(0, dtype), "avg", np.copy)
                    got = forms.carry_out(case, asynchronous, codec=codec)
                    assert got.size == 0
        assert comm._transport.wire_bytes_sent == before

    forms.run(placement, program, check="never")


def test_empty_shapes_and_empty_tensors_among_others():
    def program(comm):
        for shape in ((0,), (1, 0, 2), (0, 3)):
            for x in (np.empty(shape, np.float32), torch.empty(shape), torch.empty(shape).transpose(0, -1)):
                comm.all_reduce(x, "avg")
                assert tuple(x.shape) in (shape, shape[::-1])
        mixed = [np.empty((0, 4), np.float32), np.full((2, 3), comm.rank + 1.0, np.float32), np.empty(0, np.float32)]
        comm.all_reduce_coalesced(mixed, "sum", "raw")
        assert (mixed[1] == 6).all()
        outs = [torch.full((rank,), torch.nan) for rank in range(comm.size)]
        comm.all_gather(outs, torch.full((comm.rank,), comm.rank + 1.0), "raw")
        assert all((out == rank + 1).all() for rank, out in enumerate(outs))

    forms.run("3", program)


@pytest.mark.parametrize("n_elems", [2**31 - 1, 2**31, 2**31 + 1, 2**32, 3 * 2**33 + 17])
@pytest.mark.parametrize("placement", ["4", "2x2", "2+1"])
@pytest.mark.parametrize("codec", ["int8", "int4", "raw"])
def test_offsets_past_32_bits_tile_the_array_and_the_scratch(n_elems, placement, codec):
    """No memory of that size is needed: a schedule holds offsets only. They must neither overlap nor leave gaps."""
    topology = forms.PLACEMENTS[placement]
    chosen = zcomm.codec(codec).for_dtype(zcomm.buffers.DType.FLOAT32)
    build = hierarchical if topology.has_two_levels else flat
    shards = balanced_shards(n_elems, topology.size)
    cuts = chunks(shards, n_elems // 20, [getattr(chosen, "block", 1)])
    for rank in range(topology.size):
        taken = build.all_reduce(Job(rank, topology, shards, cuts, chosen, chosen, 4))

        pieces = sorted((piece.start, piece.n_elems) for chunk in taken.chunks for piece in chunk.shards)
        assert sum(n for _, n in pieces) == n_elems
        end = 0
        for start, n in pieces:
            assert start == end or n == 0
            end = max(end, start + n)
        assert end == n_elems
        incoming = [message for route in taken.routes for message in route.incoming]
        places = sorted((message.offset, message.nbytes) for message in incoming)
        assert all(one + nbytes <= other for (one, nbytes), (other, _) in pairwise(places))
        assert places[-1][0] + places[-1][1] <= taken.scratch_bytes
        assert taken.wire_bytes_intra + taken.wire_bytes_inter >= chosen.nbytes(n_elems) // topology.size


def test_displacements_past_32_bits_are_whole_numbers_of_any_size():
    counts = [3, 2**31 + 5, 0, 2**32 + 1]

    assert [extent.start for extent in shards_of(counts)] == [0, 3, 2**31 + 8, 2**31 + 8]
    for codec in map(zcomm.codec, ("int8", "int4", "int3:40", "mxfp4", "nvfp4", "bf16", "fp8_e4m3")):
        per_block = codec.nbytes(2**20) / 2**20
        assert abs(codec.nbytes(2**32 + 1) / (2**32 + 1) - per_block) < 1e-3


@pytest.mark.parametrize("block", [0, -1, 1, 3, 7, 2**31, 2**32, 2**64, 2.5, True, None, "128", float("nan")])
def test_absurd_blocks_are_refused_where_they_are_made(block):
    for make in (lambda: IntBlock(8, block), lambda: IntBlock(4, block), lambda: Fp8Block("e4m3", block)):
        with pytest.raises(CodecError, match="block"):
            make()
    if block != "128":
        with pytest.raises(CodecError):
            zcomm.codec(f"int8:{block}")


@pytest.mark.parametrize("bits", [0, 1, 9, 64, -8, 8.0, None, "8", True])
def test_absurd_widths_are_refused_where_they_are_made(bits):
    with pytest.raises(CodecError, match="bits"):
        IntBlock(bits, 256)


@pytest.mark.parametrize(
    "setting",
    [
        *({"chunk_elems": value} for value in (0, -1, 1.5, True, None, "1")),
        *({"scratch_bytes": value} for value in (-1, 1.5, None)),
        *({"one_shot_bytes": value} for value in (-1, 0.5, None)),
        *({"seed": value} for value in (-1, 2**32, 1.0, None)),
        *({"timeout_s": value} for value in (0, -1, float("nan"), float("inf"), "1", True)),
        {"check": "sometimes"},
        {"hierarchical": 1},
        {"codec": "int9"},
        {"intra_codec": 8},
    ],
    ids=str,
)
def test_absurd_settings_are_refused_where_they_are_made(setting):
    with pytest.raises((PlanError, CodecError)):
        zcomm.Plan(**setting)
