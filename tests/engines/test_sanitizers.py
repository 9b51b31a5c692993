"""The loops of cpu/ under the address and undefined-behaviour sanitizers, between pages that fault."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from zcomm.engines import native

ROOT = Path(__file__).parents[2]
MARCH = {"portable": [], "v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"]}
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on PATH")
@pytest.mark.parametrize("build", ["portable", "v3", "v4"])
def test_no_byte_outside_the_buffers_is_touched(build: str, tmp_path: Path) -> None:
    if native.why_missing() or build not in native.builds():
        pytest.skip(f"this machine does not run build {build}")
    program = tmp_path / "guard_pages"
    flags = ["-std=c++17", "-O0", "-g", "-ffp-contract=off"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    defines = [f"-DZC_BUILD={build}", *(["-DZC_X86"] if build != "portable" else [])]
    sources = [str(ROOT / "cpu/loops.cpp"), str(ROOT / "tests/engines/guard_pages.cpp")]
    compiled = subprocess.run(
        [str(COMPILER), *flags, *MARCH[build], *defines, *sources, "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if "cannot find -lasan" in compiled.stderr or "libclang_rt" in compiled.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert compiled.returncode == 0, compiled.stderr

    # A preloaded library would come before the sanitizer's.
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    ran = subprocess.run([str(program)], capture_output=True, text=True, env=environment)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{14 * 2 * (7 * 7 + 25) * 4 * 6} runs\n"  # counts, ends, codecs, dtypes, verbs
