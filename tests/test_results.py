"""Tables of measured numbers in the docs say what the files in bench/results say; a failure prints what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "none": "not limited"}
MEBI = 1 << 20


def result(name: str) -> dict[str, Any]:
    """A file of bench/results."""
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / name).read_text())
    return found


def assert_page_has(page: str, lines: list[str]) -> None:
    """All lines stand in a page, one below the other."""
    table = "\n".join(lines)
    if table not in (ROOT / page).read_text():
        pytest.fail(f"{page} should have:\n{table}", pytrace=False)


def loss(recipe: dict[str, Any]) -> str:
    change = recipe["val_loss_over_fp32_pct"]
    return f"{recipe['val_loss']:.3f}" + ("" if recipe["name"] == "fp32" else f" ({change:+.2f} %)")


def test_the_readme_s_table_is_the_demo_s():
    demo = result("demo.json")
    assert demo["link"] == "200mbit"
    lines = [
        f"| `{recipe['name']}` | {1e3 * recipe['step_s']:.0f} ms | {recipe['inter_node_bytes_per_step'] / 1e6:.1f} "
        f"| {loss(recipe)} | {recipe['speedup_over_bf16']:.2f} | {recipe['speedup_over_bf16_two_hop']:.2f} "
        f"| {recipe['speedup_possible_over_bf16_two_hop']:.2f} |"
        for recipe in demo["recipes"]
    ]
    assert len(lines) == 5
    assert_page_has("README.md", lines)


def test_the_mpi_page_s_table_is_of_mpi_json():
    rows = {(row["link"], row["form"]): row for row in result("mpi.json")["rows"] if row["nbytes"] == 16 * MEBI}
    lines = []
    for link, name in LINKS.items():
        cells = [f"{rows[link, 'MPI fp32']['time_ms']:.0f} ms"]
        for codec in ("raw", "bf16", "int8", "int4"):
            row = rows[link, codec]
            cells.append(f"{row['time_ms']:.0f} ms, {row['speedup_over_mpi']:.1f} x")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    assert_page_has("docs/mpi.md", lines)


def test_the_table_of_collectives_is_of_collectives_json():
    found = result("collectives.json")["rows"]
    rows = {(row["collective"], row["size_bytes_total"], row["link"], row["form"]): row for row in found}
    lines = []
    for collective, codecs in (
        ("all_reduce", ("int8", "int4")),
        ("all_gather", ("int8",)),
        ("reduce_scatter", ("int4",)),
    ):
        for codec in codecs:
            for size, name in ((1 << 16, "64 KiB"), (MEBI, "1 MiB"), (16 * MEBI, "16 MiB"), (64 * MEBI, "64 MiB")):
                cells = []
                for link in LINKS:
                    row = rows[collective, size, link, f"two hops {codec}"]
                    cells.append(f"{row['time_ms']:.1f} ms, {row['speedup_over_best_uncompressed']:.2f}")
                lines.append(f"| `{collective}` `{codec}` | {name} | " + " | ".join(cells) + " |")
    assert_page_has("docs/numbers.md", lines)


def test_the_source_distribution_has_the_results():
    left_out = (ROOT / "pyproject.toml").read_text().partition("sdist.exclude")[2].partition("\n")[0]

    assert ".ci" in left_out
    assert "bench" not in left_out  # README, docs and these tests read them
