"""What every rank of the demo runs: the example's trainers, one per recipe, taking their steps in turn.

    main() with a Launch as JSON in argv[1], under `zcomm cluster` (zcomm/tools/demo.py starts it)

Recipes alternate step by step, so that a machine that slows down slows all of them alike. Each counted step starts
at a barrier and is as long as on the slowest rank; the interface's counter is read between two barriers at both ends,
so that no rank reads it late, when another has begun to send.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from zcomm.collectives.stats import total
from zcomm.tools.cluster_counters import NodeCounters, node_counters
from zcomm.tools.demo_plan import NO_NETWORK, SHORT_STEP_S, Event, Launch, Measured
from zcomm.tools.demo_stand_ins import LocalAllGather, LocalReduceScatter, Paced
from zcomm.transports.pace import Pacer

LONGEST_COLLECTIVE = timedelta(minutes=10)  # on a very slow link


class Runner:
    """One recipe's trainer, and what its steps took."""

    def __init__(self, name: str, launch: Launch, example: ModuleType, text: Any) -> None:
        self.name = name
        self.recipe = example.RECIPES["fp32" if name == NO_NETWORK else name]
        self.settings = example.Settings(**asdict(launch.model), steps=launch.warmup_steps + launch.steps)
        self.trainer = example.Trainer(self.settings, self.recipe, text, quiet=True)
        self.replace_collectives(example.torch_wire)
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.sent = NodeCounters(node_counters().node, 0, 0)  # by this node, in counted steps

    def replace_collectives(self, torch_wire: ModuleType) -> None:
        """Where the recipe is no network at all, or the network is paced in user space and torch sends."""
        model, pacer = self.trainer.model, Pacer.from_environment()
        if self.name == NO_NETWORK:
            torch_wire.install(model, LocalAllGather(), LocalReduceScatter())
        elif pacer is not None and self.trainer.compressed is None:
            dtype = self.recipe.torch_dtype or torch.float32
            gather, scatter = torch_wire.AllGather(dtype), torch_wire.ReduceScatter(dtype)
            torch_wire.install(model, Paced(gather, 1, dtype.itemsize, pacer), Paced(scatter, 2, dtype.itemsize, pacer))

    def warm_up(self) -> float:
        """One step that is not counted; returns its seconds on the slowest rank."""
        dist.barrier()
        started = time.perf_counter()
        self.losses.append(self.trainer.step())
        took_s = time.perf_counter() - started
        if self.trainer.compressed is not None:
            self.trainer.compressed.reset_stats()
        return slowest([took_s])[0]

    def step(self) -> None:
        """One counted step."""
        dist.barrier()
        before = node_counters()
        dist.barrier()
        started = time.perf_counter()
        self.losses.append(self.trainer.step())
        self.step_s.append(time.perf_counter() - started)
        dist.barrier()  # what this node still passes on belongs to the step
        self.sent = self.sent.plus(node_counters().since(before))

    def measured(self, launch: Launch) -> Measured:
        """What all ranks found, after the last step."""
        n_steps, world = len(self.step_s), dist.get_world_size()
        found = Measured(
            name=self.name,
            meaning=self.recipe.meaning,
            step_s=slowest(self.step_s),
            losses=mean(self.losses),
            inter_node_bytes_per_step=slowest([self.sent.tx_bytes])[0] / n_steps,
            resent_segments_per_step=slowest([self.sent.resent_segments])[0] / n_steps,
            tokens_per_step=self.settings.batch * self.settings.context * world,
        )
        if self.trainer.compressed is not None:
            stats = total(self.trainer.compressed.stats())
            wire_bytes, codec_s, wait_s = mean([stats.wire_bytes_inter, stats.codec_s, stats.wait_s])
            found.stats_bytes_per_step = wire_bytes * launch.ranks_per_node / n_steps
            found.codec_s_per_step = codec_s / n_steps
            found.wait_s_per_step = wait_s / n_steps
        if launch.validate and self.name != NO_NETWORK:
            found.val_loss = self.trainer.validation_loss()
        return found


def slowest(values: list[float]) -> list[float]:
    """The largest over ranks, value by value."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def mean(values: list[float]) -> list[float]:
    """The mean over ranks, value by value."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def say(kind: str, **fields: Any) -> None:
    """Tell the parent; rank 0 only does."""
    if dist.get_rank() == 0:
        print(Event(kind, fields).line(), flush=True)


def run(launch: Launch, example: ModuleType) -> None:
    """Warm up every recipe, then let them step in turn until each has its steps, then report."""
    text = example.Text.of_standard_library()
    runners = [Runner(name, launch, example, text) for name in launch.recipes]
    say("planned", steps=len(runners) * (launch.warmup_steps + launch.steps))

    n_steps = {}
    for runner in runners:
        took_s = 0.0
        while len(runner.losses) < launch.warmup_steps and (launch.validate or took_s < SHORT_STEP_S):
            took_s = runner.warm_up()
            say("step", recipe=runner.name)
        n_steps[runner.name] = launch.steps_of(took_s)
    say("planned", steps=sum(len(runner.losses) + n_steps[runner.name] for runner in runners))

    for n in range(launch.steps):
        for runner in runners:
            if n < n_steps[runner.name]:
                runner.step()
                say("step", recipe=runner.name)

    for runner in runners:
        say("measured", **asdict(runner.measured(launch)))


def load_example(path: Path) -> ModuleType:
    """Import the example, and what lies beside it, as the script it is would."""
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def main() -> None:
    """Join the group, run the launch, leave."""
    launch = Launch.from_json(sys.argv[1])
    torch.set_num_threads(1)  # several ranks share this machine's cores
    dist.init_process_group("gloo", timeout=LONGEST_COLLECTIVE)
    run(launch, load_example(Path(launch.example)))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still hold tensors, and Python ending under them aborts (seen with torch 2.13)
