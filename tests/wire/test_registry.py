"""Spellings of codecs."""

import pytest

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.cast import Cast
from zcomm.wire.fp8_block import Fp8Block
from zcomm.wire.hadamard import Hadamard
from zcomm.wire.int_asym import IntAsym
from zcomm.wire.int_block import IntBlock
from zcomm.wire.mx_block import MxBlock
from zcomm.wire.nvfp4 import NvFp4
from zcomm.wire.raw import Raw
from zcomm.wire.registry import NAMES, codec

KNOWN = ", ".join(NAMES)


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [
        ("raw", Raw(DType.FLOAT32)),
        ("raw:bfloat16", Raw(DType.BFLOAT16)),
        ("bf16", Cast(DType.BFLOAT16)),
        ("fp16", Cast(DType.FLOAT16)),
        ("int8", IntBlock(8, 256)),
        ("int7", IntBlock(7, 256)),
        ("int6", IntBlock(6, 256)),
        ("int5", IntBlock(5, 256)),
        ("int4", IntBlock(4, 128)),
        ("int3", IntBlock(3, 128)),
        ("int2", IntBlock(2, 128)),
        ("int8:512", IntBlock(8, 512)),
        ("int4:64", IntBlock(4, 64)),
        ("hadamard:int4:64", Hadamard(IntBlock(4, 64))),
        ("fp8_e4m3", Fp8Block("e4m3", 128)),
        ("fp8_e5m2:64", Fp8Block("e5m2", 64)),
        ("mxfp8", MxBlock("mxfp8")),
        ("nvfp4", NvFp4()),
        ("int8:stochastic", IntBlock(8, 256, "stochastic")),
        ("int8:shift", IntBlock(8, 256, "shift")),
        ("int4:asym", IntAsym(4, 128)),
        ("int4:64:asym:stochastic", IntAsym(4, 64, "stochastic")),
        ("fp8_e4m3:64:stochastic", Fp8Block("e4m3", 64, "stochastic")),
        ("mxfp4:stochastic", MxBlock("mxfp4", "stochastic")),
        ("nvfp4:stochastic", NvFp4("stochastic")),
        ("hadamard:mxfp8:stochastic", Hadamard(MxBlock("mxfp8", "stochastic"))),
        ("int4:64:stochastic", IntBlock(4, 64, "stochastic")),
    ],
)
def test_a_spelling_and_its_codec_stand_for_each_other(spelling: str, kind: object) -> None:
    assert codec(spelling) == kind
    assert str(kind) == spelling


def test_the_default_block_is_not_spelled_out() -> None:
    assert str(codec("int8:256")) == "int8"
    assert str(codec("raw:float32")) == "raw"


def test_names_are_those_of_all_codecs() -> None:
    assert {"raw", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "mxfp4", "mxfp8", "nvfp4"} < set(NAMES)
    assert {f"int{bits}" for bits in range(2, 9)} < set(NAMES)


def test_names_are_sorted_so_that_errors_and_help_read_well() -> None:
    assert list(NAMES) == sorted(NAMES)


@pytest.mark.parametrize(
    "spec", ["int1", "int9", "int", "INT8", " int8", "int8 ", "", "zstd", ":", "int08", "8", "RAW", "int8\n"]
)
def test_an_unknown_spelling_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(CodecError, match=KNOWN):
        codec(spec)


@pytest.mark.parametrize("spec", [None, True, 8, b"int8", IntBlock, ["int8"], object()])
def test_what_is_no_codec_is_refused_with_the_known_ones(spec: object) -> None:
    with pytest.raises(CodecError, match=KNOWN):
        codec(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["int8:0", "int8:-1", "int8:3", f"int8:{2**40}"])
def test_a_block_out_of_range_is_refused_with_the_range(spec: str) -> None:
    with pytest.raises(CodecError, match="multiple of 8 from 8 to 65536"):
        codec(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "int8:",
        "int8:x",
        "int8:0128",
        "int8:+8",
        "int8:8:8",
        "int8:8.0",
        "int8:٨",
        "int8:" + "9" * 5000,
        "int8:stochastic:64",
        "int8:nearest",
        "int8:stochastic:stochastic",
    ],
)
def test_a_block_that_is_no_number_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(CodecError, match="write int8:256"):
        codec(spec)


@pytest.mark.parametrize(
    "spec", ["bf16:", "fp16:2", "fp8_e4m3:x", "mxfp8:64", "nvfp4:16", "nvfp4:", "raw:bf16", "raw:", "raw:float32:x"]
)
def test_options_that_a_codec_does_not_have_are_refused(spec: str) -> None:
    with pytest.raises(CodecError):
        codec(spec)


def test_errors_are_value_errors_too() -> None:
    with pytest.raises(ValueError, match="no codec"):
        codec("int9")


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("fp32", "raw"),
        ("none", "raw"),
        ("float64", "raw"),
        ("fp8:64", "fp8_e4m3"),
        ("INT8", "int8"),
        (" int4:64 ", "int4"),
        ("int-8", "int8"),
        ("mx_fp4", "mxfp4"),
    ],
)
def test_a_name_that_others_use_is_answered_with_ours(spelling, meant):
    with pytest.raises(CodecError, match=f"did you mean {meant};"):
        codec(spelling)


@pytest.mark.parametrize("spelling", ["gzip", "", "8", "int16", "fp6", "x" * 10_000])
def test_a_name_like_none_of_ours_is_answered_with_all_of_them(spelling):
    with pytest.raises(CodecError) as caught:
        codec(spelling)
    assert "did you mean" not in str(caught.value)
    assert KNOWN in str(caught.value)
