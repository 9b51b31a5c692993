"""`zcomm demo` from the outside: a short run's table, JSON, picture and bytes; bad arguments; Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import types

import pytest
from cluster_runs import HANG_S, PACKET_BYTES, ROOT, Cluster, environment, needs_namespaces

from zcomm.tools import demo, demo_plan
from zcomm.tools.cluster_counters import NodeCounters
from zcomm.tools.cost import BASELINES

for package in ("torch", "rich", "matplotlib", "pyroute2"):
    pytest.importorskip(package)
demo_rank = pytest.importorskip("zcomm.tools.demo_rank")

RECIPE_KEYS = {
    "name",
    "step_s",
    "tokens_per_s",
    "inter_node_bytes_per_step",
    "val_loss",
    "speedup_over_bf16",
    "speedup_over_bf16_two_hop",
    "speedup_possible_over_bf16_two_hop",
}


def run_demo(*words):
    command = [sys.executable, "-m", "zcomm", "demo", *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S)


class SlowRunner:
    """A recipe whose steps are longer than one warm-up needs."""

    def __init__(self, name, *_):
        self.name, self.losses = name, []

    def warm_up(self):
        self.losses.append(1.0)
        return 2 * demo_plan.SHORT_STEP_S

    def step(self):
        self.losses.append(1.0)

    def measured(self, _):
        return demo_plan.Measured(self.name, "", [1.0], self.losses, 0.0, 1)


@pytest.mark.parametrize(("validate", "wanted"), [(True, 25), (False, 24)])
def test_losses_are_of_as_many_steps_however_slow_a_recipe_is(validate, wanted, monkeypatch):
    told = []
    example = types.SimpleNamespace(Text=types.SimpleNamespace(of_standard_library=lambda: None))
    monkeypatch.setattr(demo_rank, "Runner", SlowRunner)
    monkeypatch.setattr(demo_rank, "say", lambda kind, **fields: told.append((kind, fields)))
    launch = demo_plan.Launch("x.py", 2, ("fp32", "int8"), demo_plan.Model(), 2, 23, validate=validate)

    demo_rank.run(launch, example)

    assert [len(fields["losses"]) for kind, fields in told if kind == "measured"] == [wanted] * 2
    planned = [fields["steps"] for kind, fields in told if kind == "planned"]
    assert planned[-1] == sum(kind == "step" for kind, _ in told)


def test_no_rank_sends_before_every_rank_has_read_its_node_s_counter(monkeypatch):
    """One that reads late would miss what its neighbour in the node has sent, and the bytes be too few."""
    order = []

    def read():
        order.append("read")
        return NodeCounters(0, tx_bytes=100 * order.count("read"), rx_bytes=0)

    monkeypatch.setattr(demo_rank.dist, "barrier", lambda: order.append("barrier"))
    monkeypatch.setattr(demo_rank, "node_counters", read)
    runner = object.__new__(demo_rank.Runner)
    runner.trainer = types.SimpleNamespace(step=lambda: order.append("step"))
    runner.losses, runner.step_s, runner.sent = [], [], NodeCounters(0, 0, 0)

    runner.step()

    assert order == ["barrier", "read", "barrier", "step", "barrier", "read"]
    assert runner.sent.tx_bytes == 100


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """One short demo with every recipe: what it printed, and its files."""
    folder = tmp_path_factory.mktemp("demo")
    ended = run_demo(
        "--quick", "--link", "200mbit", "--steps", "2", "--loss-steps", "2",
        "--json", str(folder / "demo.json"), "--plot", str(folder / "demo.png"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, json.loads((folder / "demo.json").read_text()), folder / "demo.png"


@needs_namespaces
def test_the_json_has_the_promised_keys(short_run):
    _, found, _ = short_run

    assert (found["link"], found["nodes"], found["ranks_per_node"]) == ("200mbit", 2, 2)
    assert found["about"]["command"].startswith("zcomm demo --quick")
    assert [recipe["name"] for recipe in found["recipes"]] == list(demo.RECIPES)
    for recipe in found["recipes"]:
        assert recipe.keys() >= RECIPE_KEYS
        assert recipe["step_s"] > 0
        assert recipe["val_loss"] > 0


@needs_namespaces
def test_bytes_at_the_interface_shrink_as_the_codecs_promise(short_run):
    sent = {recipe["name"]: recipe["inter_node_bytes_per_step"] for recipe in short_run[1]["recipes"]}
    resent = {recipe["name"]: recipe["resent_segments_per_step"] * PACKET_BYTES for recipe in short_run[1]["recipes"]}

    assert sent["zeropp"] - resent["zeropp"] <= 0.27 * sent["bf16_two_hop"]
    assert sent["zeropp"] - resent["zeropp"] <= 0.14 * sent["bf16"]
    assert sent["int8"] - resent["int8"] <= 0.53 * sent["bf16_two_hop"]
    assert sent["bf16"] == pytest.approx(sent["fp32"] / 2, abs=0.03 * sent["bf16"] + resent["bf16"] + resent["fp32"])


@needs_namespaces
def test_stats_agree_with_the_interface(short_run):
    for recipe in short_run[1]["recipes"]:
        if recipe["name"] not in ("fp32", "bf16"):
            counted, resent = recipe["inter_node_bytes_per_step"], recipe["resent_segments_per_step"] * PACKET_BYTES
            payload = 1448 / (PACKET_BYTES + 66)  # at least: of each packet, and an acknowledgement for each that comes
            of_barriers = 8192
            assert payload * (counted - of_barriers) - resent <= recipe["stats_bytes_per_step"] <= counted


@needs_namespaces
def test_stats_count_exactly_what_the_codecs_make_of_the_model(short_run):
    import zcomm

    n_block, n_rest = 12 * 192 * 192 + 2 * 192, 2 * 256 * 192 + 64 * 192 + 192  # parameters, each over 4 ranks

    def gathered(codec, passes_over_blocks):
        nbytes = zcomm.codec(codec).nbytes
        return 2 * (2 * passes_over_blocks * nbytes(n_block // 4) + nbytes(n_rest // 4))

    def reduced(codec):
        nbytes = zcomm.codec(codec).nbytes
        return 2 * (2 * nbytes(n_block // 4) + nbytes(n_rest // 4))

    counted = {recipe["name"]: recipe["stats_bytes_per_step"] for recipe in short_run[1]["recipes"]}
    assert counted["bf16_two_hop"] == gathered("bf16", 2) + reduced("bf16")
    assert counted["int8"] == gathered("int8", 2) + reduced("int8")
    assert counted["zeropp"] == gathered("int8", 1) + reduced("int4")


@needs_namespaces
def test_losses_are_the_same_in_every_run_also_of_the_benchmark(short_run, tmp_path):
    """bench/training.py runs the demo's two launches for itself, here with fewer recipes and steps."""
    first = {recipe["name"]: recipe["val_loss"] for recipe in short_run[1]["recipes"]}

    path = tmp_path / "again.json"
    words = ("--quick", "--links", "none", "--recipes", "fp32,zeropp", "--steps", "1", "--loss-steps", "2")
    command = [sys.executable, str(ROOT / "bench" / "training.py"), *words, "--json", str(path)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    again = json.loads(path.read_text())

    assert again["about"]["command"].startswith("python bench/training.py --quick")
    assert [(row["link"], row["recipe"], row["steps_counted"]) for row in again["rows"]] == [
        ("none", "fp32", 1),
        ("none", "zeropp", 1),
    ]
    assert all(row["val_loss"] == first[row["recipe"]] for row in again["rows"])
    assert first["zeropp"] == pytest.approx(first["fp32"], rel=0.01)


@needs_namespaces
def test_the_table_names_every_recipe_and_fits_a_terminal(short_run):
    out, _, _ = short_run

    table = out[out.index("FSDP2 training") :]
    for name in demo.RECIPES:
        assert f"\n{name} " in table
    assert "…" not in table
    assert "ompression" in table  # the verdict


@needs_namespaces
def test_the_picture_is_a_picture(short_run):
    assert short_run[2].read_bytes().startswith(b"\x89PNG")


def test_baselines_are_among_the_recipes():
    assert set(BASELINES) < set(demo.RECIPES)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--recipes", "fp32,zero"), "unknown 'zero'; known are fp32, bf16"),
        (("--recipes", "fp32,fp32"), "names one twice"),
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--loss-steps", "-3"), "--loss-steps must be at least 1, got -3"),
        (("--nodes", "0"), "nodes is 0"),
        (("--link", "200"), "has no unit"),
        (("--link", "0mbit"), "carries nothing"),
        (("--json", "/no/such/folder/demo.json"), "--json /no/such/folder/demo.json cannot be written"),
        (("--plot", "/no/such/folder/demo.png"), "--plot /no/such/folder/demo.png cannot be written"),
        (("--plot", "demo.txt"), "expected a name that ends in .png"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_runs(words, says):
    ended = run_demo(*words)

    assert ended.returncode == 2
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "torch"), ("rich", "tools"), ("matplotlib", "tools"), ("pyroute2", "tools")]
)
def test_a_missing_package_is_named_with_its_extra(package, extra, monkeypatch):
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    parser = demo.argparse.ArgumentParser()
    demo.add_arguments(parser)

    with pytest.raises(demo.MissingExtra, match=rf"needs {package}; .*zcomm-collectives\[{extra}\]"):
        demo.run(parser.parse_args(["--plot", "demo.png"]))


@needs_namespaces
def test_ctrl_c_ends_the_demo_and_its_cluster():
    running = Cluster("--quick", "--link", "1mbit", program="demo")
    give_up_at = time.monotonic() + HANG_S
    while not any("demo_rank" in words for words in running.processes().values()):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    running.process.send_signal(signal.SIGINT)  # ranks may still be starting Python
    ended = running.finish()

    assert ended.status == 128 + signal.SIGINT
    assert "Traceback" not in ended.out + ended.err
    assert not ended.left_behind()
