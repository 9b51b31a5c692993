"""Bugs planted in the CUDA kernels, each of which the comparisons on the CPU must find."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_checks import FEW_KERNELS
from cuda_on_cpu import COMPILER, build

from zcomm.engines import cuda_compile


class Mutant(NamedTuple):
    """One bug."""

    name: str
    file: str
    right: str
    wrong: str


LOOPS, ELEMENTS, PLANES, RULES = "codec_kernels.cuh", "elements.cuh", "planes.cuh", "int_block_codec.cuh"
SYNC = "__syncthreads();"
FIRST_BARRIER = "of_warp[threadIdx.x / 32] = value;\n      __syncthreads();"
SECOND_BARRIER = "of_warp[warp] : value;\n      __syncthreads();"
MUTANTS = (
    Mutant("no barrier before shared memory is read", LOOPS, FIRST_BARRIER, FIRST_BARRIER.replace(SYNC, "")),
    Mutant("no barrier before it is written again", LOOPS, SECOND_BARRIER, SECOND_BARRIER.replace(SYNC, "")),
    Mutant(
        "a barrier that one warp skips",
        LOOPS,
        FIRST_BARRIER,
        FIRST_BARRIER.replace(SYNC, "if (threadIdx.x > 31) " + SYNC),
    ),
    Mutant("a shuffle loses a step", LOOPS, "distance = width / 2; distance", "distance = width / 4; distance"),
    Mutant("a shuffle names lanes of other teams", LOOPS, "mask = width == 32 ?", "mask = width > 1 ?"),
    Mutant(
        "shared memory that nobody wrote", LOOPS, "if (lane == 0) of_warp", "if (lane == 0 && threadIdx.x > 0) of_warp"
    ),
    Mutant("shared memory read past its end", LOOPS, "warp < ZC_THREADS / 32;", "warp <= ZC_THREADS / 32 + 4096;"),
    Mutant("the tail is read past the end", ELEMENTS, "x[0] = e < n ?", "x[0] = e < n + 8 ?"),
    Mutant("the tail is written past the end", ELEMENTS, "if (e < n) store_bits", "if (e <= n) store_bits"),
    Mutant("the last element is not written", ELEMENTS, "if (e < n) store_bits", "if (e + 1 < n) store_bits"),
    Mutant("padding is left as it was", LOOPS, "zero(wire, chunk.codes_end(), chunk.nbytes(), team);", ""),
    Mutant(
        "a byte behind the padding is zeroed",
        LOOPS,
        "chunk.codes_end(), chunk.nbytes(),",
        "chunk.codes_end(), chunk.nbytes() + 1,",
    ),
    Mutant("the last block is missed", LOOPS, "task < job.n_tasks;", "task + 1 < job.n_tasks;"),
    Mutant(
        "blocks are skipped where a grid loops",
        LOOPS,
        "task += gridDim.x * teams_of_cta",
        "task += gridDim.x * teams_of_cta + 1",
    ),
    Mutant(
        "the first block of a piece goes to the one before", LOOPS, "first_task <= task) ++p", "first_task < task) ++p"
    ),
    Mutant(
        "elements are divided by the scale",
        RULES,
        "zc_code(x, scale.inv)",
        "zc_round(zc_div(x, zc_from_bf16(scale.bits)))",
    ),
    Mutant("chunks are added in the reverse order", LOOPS, "wire(w), tile", "wire(job.k - 1 - w), tile"),
    Mutant(
        "sums start from zero", LOOPS, "w == 0 ? term[i] : zc_add(x[i], term[i])", "zc_add(w == 0 ? 0 : x[i], term[i])"
    ),
    Mutant(
        "a sum is divided before it is multiplied",
        LOOPS,
        "x[i] = zc_mul(x[i], factor)",
        "x[i] = zc_mul(zc_div(x[i], divisor), zc_mul(factor, divisor))",
    ),
    Mutant(
        "offsets have 32 bits",
        LOOPS,
        "return b * codec.block(); }",
        "return (zc_i32)((zc_u32)b * (zc_u32)codec.block()); }",
    ),
    Mutant("a plane begins where the one before does", PLANES, "t += runs * stride;", ""),
    Mutant(
        "codes are not cut to their field",
        PLANES,
        ">> low & ((1u << field) - 1);\n        words",
        ">> low;\n        words",
    ),
    Mutant(
        "elements of a segment come in another order",
        ELEMENTS,
        "words[i / 2] >> (16 * (i % 2))",
        "words[i / 2] >> (16 * (1 - i % 2))",
    ),
)


def survives(folder: Path, mutant: Mutant | None) -> bool:
    """Whether the comparisons find nothing wrong with kernels that hold this bug."""
    files = dict(cuda_compile.sources())
    if mutant is not None:
        assert mutant.right in files[mutant.file], f"{mutant.name}: no longer in {mutant.file}"
        files[mutant.file] = files[mutant.file].replace(mutant.right, mutant.wrong)
    folder.mkdir()
    library = build(folder, FEW_KERNELS, ["-O0"], files)
    script = str(Path(__file__).with_name("cuda_survivor.py"))
    return subprocess.run([sys.executable, script, str(library)], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
def test_every_planted_bug_is_found(tmp_path: Path) -> None:
    candidates = [None, *MUTANTS]
    with ThreadPoolExecutor(2) as threads:
        survived = list(threads.map(survives, [tmp_path / str(i) for i in range(len(candidates))], candidates))

    assert survived[0], "the kernels as they are do not pass"
    assert [mutant.name for mutant, lives in zip(MUTANTS, survived[1:], strict=True) if lives] == []
