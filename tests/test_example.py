"""examples/train_gpt.py: it runs as its first lines say; its model, text and batches are what they claim."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = str(EXAMPLES / "train_gpt.py")
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(Path(__file__).parent / "tools"))

import train_gpt  # noqa: E402 - found by the path above
from cluster_runs import needs_namespaces, run_cluster  # noqa: E402


def test_the_model_has_seven_million_parameters():
    n_parameters = sum(weight.numel() for weight in train_gpt.GPT(train_gpt.Settings()).parameters())

    assert 7.2e6 < n_parameters < 7.4e6


def test_the_model_never_sees_the_byte_it_predicts():
    torch.manual_seed(0)
    model = train_gpt.GPT(train_gpt.Settings(width=48, layers=2, heads=2, context=16))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] += 1

    before, after = model(tokens), model(changed % 256)

    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9], after[0, 9])


def test_the_text_is_several_megabytes_and_its_held_out_part_is_apart():
    text = train_gpt.Text.of_standard_library()
    training, validation = (bytes(part.numpy()) for part in (text.training, text.validation))

    assert len(training) > 2e6
    assert len(validation) > 1e5
    assert validation[1000:3000] not in training


def test_ranks_take_different_rows_of_one_batch(monkeypatch):
    text = torch.arange(200, dtype=torch.uint8)
    settings = train_gpt.Settings(batch=2, context=8)
    monkeypatch.setattr(train_gpt.dist, "get_world_size", lambda: 4)

    def rows(rank, seed=3):
        monkeypatch.setattr(train_gpt.dist, "get_rank", lambda: rank)
        return train_gpt.draw_batch(text, settings, seed)

    assert rows(0).shape == (2, 9)
    assert torch.equal(rows(1), rows(1))
    assert not torch.equal(rows(0), rows(1))
    assert not torch.equal(rows(0), rows(0, seed=4))


def test_the_learning_rate_goes_up_and_then_down_to_zero():
    trainer = train_gpt.Trainer.__new__(train_gpt.Trainer)
    trainer.settings = train_gpt.Settings(steps=20, warmup_steps=4, learning_rate=1.0)

    rates = []
    for trainer.n_steps in range(21):
        rates.append(trainer.learning_rate())

    assert rates[0] == 0.25
    assert max(rates) == rates[3]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[20] == 0.0


@needs_namespaces
def test_it_runs_on_a_cluster_and_says_what_travelled():
    words = (sys.executable, SCRIPT, "--recipe", "zeropp", "--steps", "2", "--width", "96", "--layers", "2")
    ended = run_cluster("--nodes", "2", "--ranks-per-node", "2", "--quiet", "--", *words)

    assert ended.status == 0, ended.err
    assert "zeropp: validation loss" in ended.out
    assert "weight gathers: int8" in ended.out
    assert "gradient reductions: int4" in ended.out
    assert "reduce_scatter" in ended.out.splitlines()[-1]
