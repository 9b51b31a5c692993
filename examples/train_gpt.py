"""Train a small GPT under FSDP2 on the Python standard library's own sources. zcomm is three lines: (1), (2), (3).

    torchrun --nproc-per-node 4 examples/train_gpt.py --recipe int8
    zcomm cluster --nodes 2 --ranks-per-node 2 --link 200mbit -- python examples/train_gpt.py --recipe zeropp

Every recipe starts from the same weights and sees the same batches, so their losses can be compared step by step.
It runs on CPUs and computes in fp32; a recipe only decides what travels. `zcomm demo` runs it once per recipe.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch_wire
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import zcomm  # (1)


@dataclass(frozen=True)
class Recipe:
    """What travels: the codec of each collective, None being torch's own collectives."""

    meaning: str
    weights: str | None = None
    gradients: str | None = None
    gather_backward_in_node: bool = False  # hpZ: each node keeps a copy of the weights between forward and backward
    torch_dtype: torch.dtype | None = None  # on the wire of torch's own collectives, where it is not the parameter's


RECIPES = {
    "fp32": Recipe("plain FSDP2"),
    "bf16": Recipe("bf16 on the wire, torch's own collectives", torch_dtype=torch.bfloat16),
    "bf16_two_hop": Recipe("bf16 on the wire, zcomm's two hops", weights="bf16", gradients="bf16"),
    "int8": Recipe("int8 weights and gradients, two hops", weights="int8", gradients="int8"),
    "zeropp": Recipe(
        "ZeRO++: int8 weights gathered across nodes once, int4 gradients, two hops",
        weights="int8",
        gradients="int4",
        gather_backward_in_node=True,
    ),
}


@dataclass(frozen=True)
class Settings:
    """The model and how it is trained; all ranks use the same."""

    width: int = 384
    layers: int = 4
    heads: int = 6
    context: int = 64  # bytes of text per sequence
    batch: int = 4  # sequences per rank and step
    steps: int = 50
    warmup_steps: int = 10  # then the learning rate falls in a line to zero, so that a short run ends calmly
    learning_rate: float = 5e-4
    max_gradient_norm: float = 1.0
    validation_batches: int = 8
    seed: int = 0


# ---- the model: bytes in, bytes out ----------------------------------------------------------------------------------

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.heads = settings.width, settings.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.feed_forward_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_forward_out = nn.Linear(4 * width, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,  # float32 (batch, context, width)
    ) -> torch.Tensor:  # the same
        batch, context, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.feed_forward_out(functional.gelu(self.feed_forward_in(self.feed_forward_norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes: 7.3 million parameters by default."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, settings.width)
        self.position_embedding = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width, bias=False)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith("_out.weight")
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * settings.layers) if into_residual else 1.0))

    def forward(
        self,
        tokens: torch.Tensor,  # int64 (batch, context)
    ) -> torch.Tensor:  # float32 (batch, context, VOCABULARY)
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- the text --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Bytes to learn from, and bytes of other files to be judged by."""

    training: torch.Tensor  # uint8 (n,)
    validation: torch.Tensor  # uint8 (m,)

    @classmethod
    def of_standard_library(cls) -> Text:
        """Every top-level module of the standard library in order of name; each twentieth is held out."""
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        training = b"".join(file.read_bytes() for i, file in enumerate(files) if i % 20 != 19)
        validation = b"".join(file.read_bytes() for i, file in enumerate(files) if i % 20 == 19)
        return cls(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (training, validation)))


def draw_batch(
    text: torch.Tensor,  # uint8 (n,)
    settings: Settings,
    seed: int,  # all ranks the same: the whole batch is drawn on each, which then takes its own rows
) -> torch.Tensor:  # int64 (settings.batch, settings.context + 1)
    """This rank's rows of one batch: stretches of text from random places."""
    rows = settings.batch * dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - settings.context, (rows,), generator=generator)
    mine = starts[dist.get_rank() * settings.batch :][: settings.batch]
    return torch.stack([text[start : start + settings.context + 1] for start in mine.tolist()]).long()


# ---- the training ----------------------------------------------------------------------------------------------------


def shard(model: GPT, recipe: Recipe, quiet: bool) -> zcomm.fsdp2.Compressed | None:
    """Put the model under FSDP2, one group per block and one for the rest, and let the recipe decide what travels."""
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_two_levels = 1 < ranks_per_node < dist.get_world_size()
    reshard: bool | int = ranks_per_node if recipe.gather_backward_in_node and has_two_levels else True
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=False)  # small, and the first that backward needs

    if recipe.weights or recipe.gradients:
        return zcomm.fsdp2.compress(  # (2)
            model, weights=recipe.weights, gradients=recipe.gradients, prefetch=True, quiet=quiet
        )
    if recipe.torch_dtype:
        torch_wire.use(model, recipe.torch_dtype)
    return None


class Trainer:
    """One model in training under one recipe; every rank makes one, in the same order."""

    def __init__(self, settings: Settings, recipe: Recipe, text: Text, quiet: bool = False) -> None:
        self.settings, self.text, self.n_steps = settings, text, 0
        torch.manual_seed(settings.seed)
        self.model = GPT(settings)
        self.compressed = shard(self.model, recipe, quiet)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self) -> float:
        """One batch forward, backward, and the update; returns this rank's loss."""
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        tokens = draw_batch(self.text.training, self.settings, seed=self.settings.seed + 1 + self.n_steps)
        loss = self.loss(tokens)
        loss.backward()
        self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n_steps += 1
        return loss.item()

    def learning_rate(self) -> float:
        """Of this step: a line up, a line down."""
        warmth = min(1.0, (self.n_steps + 1) / self.settings.warmup_steps)
        return self.settings.learning_rate * warmth * max(0.0, 1 - self.n_steps / self.settings.steps)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each next byte, in nats, the mean over this rank's rows."""
        return functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def clip_gradients(self) -> None:
        """Scale the gradients so that their norm over all ranks is at most max_gradient_norm."""
        shards = [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(shards)).square().sum()
        dist.all_reduce(squares)
        factor = self.settings.max_gradient_norm / (squares.sqrt() + 1e-6)
        torch._foreach_mul_(shards, factor.clamp(max=1.0))

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over held-out batches and all ranks, by torch's own all-reduce: the same on every rank."""
        seeds = range(10**6, 10**6 + self.settings.validation_batches)
        losses = [self.loss(draw_batch(self.text.validation, self.settings, seed)) for seed in seeds]
        total = torch.stack(losses).double().sum()
        dist.all_reduce(total)
        return total.item() / (len(losses) * dist.get_world_size())


def main() -> None:
    """Train by one recipe and print losses, step times and what travelled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default="zeropp", help="what travels (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--batch", type=int, default=Settings.batch, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=Settings.layers)
    parser.add_argument("--width", type=int, default=Settings.width)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    args = parser.parse_args()
    settings = Settings(args.width, args.layers, batch=args.batch, steps=args.steps, seed=args.seed)

    torch.set_num_threads(1)  # several ranks share this machine's cores
    dist.init_process_group("gloo")
    trainer = Trainer(settings, RECIPES[args.recipe], Text.of_standard_library())
    for n in range(1, settings.steps + 1):
        started = time.perf_counter()
        loss = trainer.step()
        if dist.get_rank() == 0 and (n % 10 == 0 or n == settings.steps):
            print(f"step {n}: loss {loss:.4f} on rank 0, {1e3 * (time.perf_counter() - started):.0f} ms")
    validation_loss = trainer.validation_loss()
    if dist.get_rank() == 0:
        print(f"{args.recipe}: validation loss {validation_loss:.4f}")
        if trainer.compressed:
            print(trainer.compressed.stats())  # (3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still hold tensors, and Python ending under them aborts (seen with torch 2.13)
