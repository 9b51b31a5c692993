"""docs/wire-format.md says what the code does: its sizes, its caps and its example."""

from __future__ import annotations

import re
from pathlib import Path

import checks
import numpy as np

from zcomm.wire.int_block import IntBlock
from zcomm.wire.registry import codec

PAGE = (Path(__file__).parents[2] / "docs/wire-format.md").read_text()


def rows_under(header: str) -> list[list[str]]:
    """The cells of the table whose first line begins with header."""
    lines = PAGE[PAGE.index(header) :].splitlines()
    table = [lines[0]]
    for line in lines[1:]:
        if not line.startswith("|"):
            break
        table.append(line)
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_sizes() -> None:
    head, _, *rows = rows_under("| codec | bytes of a chunk")
    counts = [int(cell.removeprefix("n = ")) for cell in head[2:]]

    assert len(rows) == 12
    for names, _, *sizes in rows:
        for name in names.split("`, `"):
            assert [codec(name).nbytes(n) for n in counts] == [int(size) for size in sizes], name


def test_the_table_of_caps() -> None:
    (_, *widths), _, (_, *caps) = rows_under("| b | 2 | 3")

    for bits, cap in zip(map(int, widths), caps, strict=True):
        wire = checks.encoded(IntBlock(bits, 8), np.full(8, np.finfo(np.float32).max, np.float32))
        assert wire[:2].view(np.uint16)[0] == int(cap, 16), bits


def test_the_example() -> None:
    kind = codec("int4:8")
    numbers = re.search(r"ten elements\n\n +(.*)\n", PAGE)
    listing = re.search(r"```hex\n(.*?)```", PAGE, re.DOTALL)
    assert numbers is not None
    assert listing is not None
    x = np.array(numbers[1].split(), np.float32)

    wire = checks.encoded(kind, x)

    assert wire.tobytes() == bytes.fromhex(listing[1])
    assert checks.decoded(kind, wire, 10)[:8].tolist() == [1, -2, 4, 0, 7, -7, 0, 2]
