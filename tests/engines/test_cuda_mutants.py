"""Bugs planted in the CUDA kernels, each of which the comparisons on the CPU must find."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_checks import FEW_KERNELS, MORE_KERNELS
from cuda_on_cpu import COMPILER, build

from zcomm.engines import cuda_compile


class Mutant(NamedTuple):
    """One bug."""

    name: str
    file: str
    right: str
    wrong: str
    found_by: str = "few"  # which comparisons, of cuda_survivor.py


LOOPS, CHUNK, SOURCES, ELEMENTS = "codec_kernels.cuh", "chunk.cuh", "sources.cuh", "elements.cuh"
PLANES, ROTATION, CHANCE, RULES = "planes.cuh", "rotation.cuh", "chance.cuh", "int_block_codec.cuh"
SYNC = "__syncthreads();"
FIRST_BARRIER = "of_warp[threadIdx.x / 32] = value;\n      __syncthreads();"
SECOND_BARRIER = "larger(value, of_warp[warp]);\n      __syncthreads();"
MUTANTS = (
    Mutant("no barrier before shared memory is read", CHUNK, FIRST_BARRIER, FIRST_BARRIER.replace(SYNC, "")),
    Mutant("no barrier before it is written again", CHUNK, SECOND_BARRIER, SECOND_BARRIER.replace(SYNC, "")),
    Mutant(
        "a barrier that one warp skips",
        CHUNK,
        FIRST_BARRIER,
        FIRST_BARRIER.replace(SYNC, "if (threadIdx.x > 31) " + SYNC),
    ),
    Mutant("a shuffle loses a step", CHUNK, "distance = width / 2; distance", "distance = width / 4; distance"),
    Mutant("a shuffle names lanes of other teams", CHUNK, "return size < 32 ?", "return size < 2 ?"),
    Mutant(
        "shared memory that nobody wrote", CHUNK, "if (lane == 0) of_warp", "if (lane == 0 && threadIdx.x > 0) of_warp"
    ),
    Mutant("shared memory read past its end", CHUNK, "warp < ZC_THREADS / 32;", "warp <= ZC_THREADS / 32 + 4096;"),
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
    Mutant("chunks are added in the reverse order", SOURCES, "wire(w), tile", "wire(job.k - 1 - w), tile"),
    Mutant(
        "sums start from zero",
        SOURCES,
        "w == 0 ? term[i] : zc_add(x[i], term[i])",
        "zc_add(w == 0 ? 0 : x[i], term[i])",
    ),
    Mutant(
        "a sum is divided before it is multiplied",
        SOURCES,
        "x[i] = zc_mul(x[i], factor)",
        "x[i] = zc_mul(zc_div(x[i], divisor), zc_mul(factor, divisor))",
    ),
    Mutant(
        "offsets have 32 bits",
        CHUNK,
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
    *(
        Mutant(*bug, found_by="more")
        for bug in (
            ("a warp's rotation loses a stage", ROTATION, "(zc_u32 distance = 1;", "(zc_u32 distance = 2;"),
            ("a team's rotation loses a stage", ROTATION, "(int distance = 1;", "(int distance = 2;"),
            ("a stage pairs the wrong threads", ROTATION, "distance / T::C :", "2 * distance / T::C :"),
            ("a stage pairs the wrong blocks", ROTATION, "distance / T::BLOCK * T::BLOCK_TEAM", "1"),
            ("a stage swaps sum and difference", ROTATION, "team.rank & apart)", "!(team.rank & apart))"),
            ("a rotation names lanes of other teams", ROTATION, "team.mask(), x[i]", "0xffffffffu, x[i]"),
            ("a warp's rotation leaves the scale out", ROTATION, "BACK ? x :", "true ? x :"),
            ("a team's rotation leaves the scale out", LOOPS, "zc_mul(x[round][i], ZC_ROTATE_SCALE)", "x[round][i]"),
            ("a group is kept for the next one", ROTATION, "if (group != kept_)", "if (kept_ < 0)"),
            ("elements behind a group's end are its own", ROTATION, "skipped + count >", "skipped + count > 99 +"),
            ("a rotated sum is not rotated back", LOOPS, "rotate_lanes(source.at(e))", "source.at(e)"),
            (
                "random bits of the eight before",
                CHANCE,
                "zc_philox(number + e / 8, call",
                "zc_philox(number + e / 8 - 1, call",
            ),
            ("random bits of the same eight twice", CHANCE, "number + e / 8 + 1", "number + e / 8"),
            ("random bits of another element", CHANCE, "(skip + c) % 8)", "c % 8)"),
            ("random bits that begin elsewhere", CHANCE, "job.first % 8 +", "0 +"),
            (
                "a shift drawn for another element",
                LOOPS,
                "half_words<1>(chunk.start(b)",
                "half_words<1>(chunk.start(b) + 1",
            ),
            (
                "a bad block's magnitude counts in its region",
                "block_codec.cuh",
                "amax() < ZC_INF ? amax() : 0",
                "amax()",
            ),
            (
                "a region's scale is found by one thread",
                LOOPS,
                "codec.unit_scale(team.max(largest))",
                "codec.unit_scale(largest)",
            ),
            (
                "blocks of a thread share the first one's scale",
                LOOPS,
                "if (T::BLOCKS > 1 || round == 0)",
                "if (round == 0)",
            ),
            (
                "padding behind the regions' scales is left",
                LOOPS,
                "zero(wire, chunk.unit_scale_at(u + 1), chunk.scales_offset, team);",
                "",
            ),
            ("missing elements get codes", LOOPS, " || (C == 1 && e >= chunk.n)", ""),
            ("missing elements count in the scale", LOOPS, "if (tile.first + s * tile.stride < chunk.n) seen", "seen"),
            ("the lowest element is not looked for", "int_asym_codec.cuh", "larger(numbers[2], ~place)", "numbers[2]"),
            ("the tail is read past the end", ELEMENTS, "x[0] = e < n ?", "x[0] = e < n + 8 ?"),
            ("blocks of the last unit are missed", LOOPS, "next < chunk.n_blocks() ? next : chunk.n_blocks()", "next"),
        )
    ),
)


def survives(folder: Path, mutant: Mutant | None, found_by: str) -> bool:
    """Whether the comparisons find nothing wrong with kernels that hold this bug."""
    files = dict(cuda_compile.sources())
    if mutant is not None:
        assert mutant.right in files[mutant.file], f"{mutant.name}: no longer in {mutant.file}"
        files[mutant.file] = files[mutant.file].replace(mutant.right, mutant.wrong)
    folder.mkdir()
    library = build(folder, FEW_KERNELS if found_by == "few" else MORE_KERNELS, sources=files)
    script = str(Path(__file__).with_name("cuda_survivor.py"))
    return subprocess.run([sys.executable, script, str(library), found_by], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
def test_every_planted_bug_is_found(tmp_path: Path) -> None:
    candidates = [(None, "few"), (None, "more"), *((mutant, mutant.found_by) for mutant in MUTANTS)]
    with ThreadPoolExecutor(2) as threads:
        survived = list(threads.map(lambda i: survives(tmp_path / str(i), *candidates[i]), range(len(candidates))))

    assert survived[:2] == [True, True], "the kernels as they are do not pass"
    assert [mutant.name for mutant, lives in zip(MUTANTS, survived[2:], strict=True) if lives] == []
