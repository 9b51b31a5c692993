"""zcomm plan: its bytes are those that communicators count, its times follow from them, its words from the times."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import zcomm
from zcomm.tools import cli, cost
from zcomm.tools.cost import RECIPES, Moved, Nodes, Recipe

UNITS = [10_007, 3000, 1]  # parameters; most are not shared evenly
BY_NAME = {recipe.name: recipe for recipe in RECIPES}


def counted(world: int, topology: zcomm.Topology, gathers: list[str], reductions: list[str]) -> Moved:
    """What rank 0 sends when the units are gathered and reduced so."""

    def program(transport):
        comm = zcomm.Communicator(transport, zcomm.Plan(one_shot_bytes=0), topology)
        for unit in UNITS:
            n = -(-unit // world)
            whole, shard = np.ones(n * world, np.float32), np.ones(n, np.float32)
            for codec in gathers:
                comm.all_gather_single(whole, shard, codec)
            for codec in reductions:
                comm.reduce_scatter_single(shard, whole, "avg", codec)
        found = comm.stats().values()
        return Moved(sum(s.wire_bytes_intra for s in found), sum(s.wire_bytes_inter for s in found))

    return zcomm.local.run(world, program)[0]


@pytest.mark.parametrize("name", ["bf16_two_hop", "int8", "int8_int4", "zeropp"])
@pytest.mark.parametrize("shape", [Nodes(2, 2), Nodes(3, 2), Nodes(2, 4), Nodes(2, 1), Nodes(1, 3)], ids=str)
def test_bytes_of_a_step_are_those_that_communicators_count(name, shape):
    recipe = BY_NAME[name]
    topology = zcomm.Topology(nodes=shape.nodes, ranks_per_node=shape.ranks_per_node)
    n_gathers = 1 if recipe.node_weights else 2
    wanted = counted(shape.n_ranks, topology, [recipe.weights] * n_gathers, [recipe.gradients])
    if recipe.node_weights:
        in_node = zcomm.Topology(nodes=1, ranks_per_node=shape.ranks_per_node)
        wanted += counted(shape.ranks_per_node, in_node, [recipe.node_weights], [])

    assert cost.step(UNITS, shape, recipe) == wanted


@pytest.mark.parametrize("shape", [Nodes(2, 2), Nodes(4, 8), Nodes(3, 1), Nodes(1, 4)], ids=str)
def test_flat_forms_are_a_ring_whose_shards_pass_each_link_once(shape):
    n = 1000 * shape.n_ranks
    passed = [0, 0]  # inside, between
    for owner in range(shape.n_ranks):
        for hop in range(shape.n_ranks - 1):
            here, there = ((owner + hop + i) % shape.n_ranks // shape.ranks_per_node for i in (0, 1))
            passed[here != there] += 2 * 1000  # bytes of bf16

    found = cost.gathered_or_reduced(n, shape, zcomm.codec("bf16"), two_hops=False)
    assert found.inter * shape.n_ranks == pytest.approx(passed[1], abs=shape.n_ranks)
    assert found.intra * shape.n_ranks == pytest.approx(passed[0], abs=shape.n_ranks)


def test_memory_and_times_by_hand():
    shape = Nodes(2, 4)
    plain = Recipe("plain", "bf16", "bf16", two_hops=True)
    kept = Recipe("kept", "bf16", "bf16", two_hops=True, node_weights="bf16")

    assert cost.memory_bytes([8000, 16000], shape, plain) == 16 * 3000 + 2 * 2 * 16000
    assert cost.memory_bytes([8000, 16000], shape, kept) == 16 * 3000 + 2 * 2 * 16000 + 2 * 6000
    assert cost.wire_s(Moved(100, 50), shape, link_bytes_s=100, node_link_bytes_s=math.inf) == 2.0
    assert cost.wire_s(Moved(100, 50), shape, link_bytes_s=100, node_link_bytes_s=10) == 10.0
    assert cost.coded_bytes([800], shape, plain) == 0
    # 8 ranks, shards of 100: two gathers of 1 + 8, a reduction of 8 + 2 x 4 + 2 + 2
    assert cost.coded_bytes([800], shape, BY_NAME["int8"]) == 4 * 100 * (2 * 9 + 20)


def plan(*words: str) -> list[str]:
    return ["plan", "--params", "7e9", "--nodes", "4", "--gpus-per-node", "8", *words]


def test_the_plan_of_seven_billion_parameters(tmp_path, capsys):
    status = cli.main(plan("--link", "100gbit", "--compute", "1.5", "--json", str(tmp_path / "plan.json")))

    rows = {row["recipe"]: row for row in json.loads((tmp_path / "plan.json").read_text())["rows"]}
    out = capsys.readouterr().out
    assert status == 0
    assert list(rows) == list(BY_NAME)
    assert rows["bf16_two_hop"]["inter_node_bytes"] == pytest.approx(3 * 14e9 * 3 / 4, rel=1e-3)
    assert rows["bf16_two_hop"]["wire_s"] == pytest.approx(3 * 14e9 * 3 / 4 * 8 / 100e9, rel=1e-3)
    assert rows["int8"]["inter_node_bytes"] == pytest.approx(3 * 7e9 * (1 + 2 / 256) * 3 / 4, rel=1e-3)
    assert rows["zeropp"]["slowest_step_s"] == pytest.approx(1.5 + rows["zeropp"]["wire_s"])
    assert rows["zeropp"]["fastest_step_s"] == 1.5
    assert all(f"\n{name} " in out for name in rows)
    assert "Use zeropp" in out


def test_where_coding_never_pays_the_json_has_no_infinity(tmp_path, capsys):
    assert cli.main(plan("--link", "none", "--json", str(tmp_path / "plan.json"))) == 0

    rows = json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)["rows"]
    never = {row["recipe"] for row in rows if row["coding_never_pays"]}
    assert never == {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("never")}
    assert never == {"int8", "int8_int4", "zeropp"}
    assert all(row["coding_gb_s"] is None for row in rows)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("path", "why"), [("/dev/full", "No space left on device"), ("/proc/plan.json", "No such file or directory")]
)
def test_a_file_that_cannot_be_written_after_all_is_named(path, why, capsys):
    assert cli.main(plan("--link", "1gbit", "--json", path)) == 2

    out, err = capsys.readouterr()
    assert out.startswith("recipe")
    assert re.fullmatch(rf"zcomm: --json {path} cannot be written: ({why}|permission denied)\n", err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--link", "none"), "Nothing is limited here: compression cannot pay."),
        (("--link", "100gbit", "--compute", "500"), "compression hardly matters; use bf16_two_hop."),
        (("--link", "100gbit"), "give --compute"),
        (("--link", "none", "--node-link", "50gbit"), "int8_int4 needs the links"),  # zeropp's backward stays in nodes
    ],
)
def test_the_words_follow_the_numbers(words, said, capsys):
    assert cli.main(plan(*words)) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (plan("--link", "100"), "needs a unit"),
        (plan("--link", "fast"), "not a number with a unit"),
        (plan("--link", "0gbit"), "carries nothing"),
        (plan("--link", "1gbit", "--nodes", "0"), "--nodes '0' is not a whole number of at least 1"),
        (plan("--link", "1gbit", "--gpus-per-node", "two"), "--gpus-per-node 'two' is not a whole number"),
        (plan("--link", "1gbit", "--layers", "1.5"), "--layers '1.5'"),
        (plan("--link", "1gbit", "--params", "7b"), "--params '7b' is not a number; write it like 7e9"),
        (plan("--link", "1gbit", "--params", "nan"), "--params is nan; expected a positive number"),
        (plan("--link", "1gbit", "--params", "5"), "--layers 32 are more than --params 5"),
        (plan("--link", "1gbit", "--json", "/no/such/x.json"), "written: the folder /no/such does not exist"),
        (plan("--link", "1gbit", "--json", "/"), "--json / is a folder"),
        (plan("--link", "1gbit", "--json", "x" * 300), "x cannot be written: File name too long"),
        (plan("--link", "1gbit", "--layers", "3000000"), "--layers is 3000000; expected 100,000 at most"),
        (plan("--link", "1gbit", "--nodes", "9" * 5000), "expected 1,000,000 at most"),
        (plan("--link", "1gbit", "--compute", "-1"), "--compute is -1; expected a positive number"),
    ],
    ids=lambda value: " ".join(value[7:]) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_one_line_and_status_2(words, said, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (out, err.count("\n")) == ("", 1)
