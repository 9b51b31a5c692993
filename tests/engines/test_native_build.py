"""cpu/ compiles where a C++ compiler is older than the names that newer ones have for x86-64's levels and features."""

from __future__ import annotations

import re
from pathlib import Path

CPU = Path(__file__).parents[2] / "cpu"
# What __builtin_cpu_supports of g++ 8 and clang++ 7 takes, of those that an x86-64 level has (gcc's manual, "x86
# Built-in Functions"); any other name is an error there, not "no".
KNOWN_TO_OLD_COMPILERS = {
    *("cmov", "mmx", "popcnt", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "avx", "avx2", "fma", "bmi", "bmi2"),
    *("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd"),
}


def test_old_compilers_know_the_features_that_are_asked_for():
    asked = set(re.findall(r'__builtin_cpu_supports\("([^"]+)"\)', (CPU / "isa.cpp").read_text()))

    assert "avx2" in asked
    assert asked <= KNOWN_TO_OLD_COMPILERS


def test_builds_are_named_by_features_not_by_levels():
    text = (CPU / "CMakeLists.txt").read_text()

    assert "-mavx2" in text
    assert "-march=x86-64-v" not in text
