"""Trains the shipped model: main loss plus the first MTP layer's, on one or two CPU threads.

With `--steps` the same seed gives the same weights; with `--minutes` the run ends on time whatever
else the machine does. A state is saved every few minutes and `--resume` goes on from it. At the end
the folder holds a checkpoint in the public layout. `--smoke` learns generated chat for 60 steps and
fails unless the loss has fallen below 3 nats per token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.errors import BadInput
from libs.model.training import corpus, export, recipe, streams, tokenizer_trainer
from libs.model.training.dialogues import Prose
from libs.model.training.network import Network, cross_entropy
from libs.model.training.optim import Optimizer
from libs.model.training.recipe import Budget, Recipe
from libs.model.training.script import console, run
from libs.model.training.torch_extra import torch

STATE_FILE = "training.pt"
REPORT_STEPS = 50
SAVE_SECONDS = 300.0
SMOKE_STEPS = 60
SMOKE_REPORT_STEPS = 10
SMOKE_DIALOGUES = 4_000
SMOKE_LOSS = 3.0
_AHEAD = 2  # tokens behind the window that only targets use: one for the head, one more for MTP
_SMOOTHING = 0.9  # of the reported losses, over about ten steps


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; losses are smoothed, in nats per token, `skew` is max over mean load."""

    step: int
    elapsed_s: float
    loss: float
    mtp_loss: float
    skew: float

    def line(self, tokens_per_step: int) -> str:
        """One line for people."""
        tokens = self.step * tokens_per_step
        return (
            f"{self.elapsed_s:7.0f} s  step {self.step:5d}  tokens {tokens / 1e6:6.2f} M  "
            f"loss {self.loss:.3f}  mtp {self.mtp_loss:.3f}  skew {self.skew:.2f}  "
            f"{tokens / self.elapsed_s:,.0f} tokens/s"
        )


class Trainer:
    """Owns a network, its optimiser and its data; one `step` at a time."""

    def __init__(self, data: streams.Streams, recipe_: Recipe) -> None:
        torch.manual_seed(recipe_.seed)
        self.recipe = recipe_
        self.network = Network(recipe.MODEL_ARGS)
        self.optimizer = Optimizer(self.network, recipe_)
        self.batches = streams.Batches(data, recipe_.window + _AHEAD, recipe_.seed)
        self.step_count = 0
        self._loss: float | None = None
        self._mtp_loss: float | None = None

    def step(self, progress: float) -> tuple[float, float]:
        """Learns one batch; returns its main and MTP loss in nats per token."""
        tokens = torch.from_numpy(self.batches.draw(self.recipe.sequences))
        window, network = self.recipe.window, self.network
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = network.hidden(tokens[:, :window])
            logits = network.lm_head(hidden)
            mtp_hidden = network.mtp_hidden(0, hidden, tokens[:, 1 : window + 1])
            mtp_logits = network.lm_head(mtp_hidden)
        loss = cross_entropy(logits, tokens[:, 1 : window + 1])
        mtp_loss = cross_entropy(mtp_logits, tokens[:, 2:])
        (loss + self.recipe.mtp_weight * mtp_loss).backward()
        self.optimizer.step(progress, self.step_count)
        self.step_count += 1
        losses = loss.item(), mtp_loss.item()
        self._loss = _smoothed(self._loss, losses[0])
        self._mtp_loss = _smoothed(self._mtp_loss, losses[1])
        return losses

    def progress(self, elapsed_s: float) -> Progress:
        """Where the run stands."""
        assert self._loss is not None, "no step yet"
        assert self._mtp_loss is not None, "no step yet"
        loads = torch.stack([moe.load for moe in self.network.moes().values()]).float()
        skew = (loads.max(dim=1).values / loads.mean(dim=1)).mean().item()
        return Progress(self.step_count, elapsed_s, self._loss, self._mtp_loss, skew)

    def state(self, elapsed_s: float) -> dict[str, Any]:
        """Everything that `restore` needs to go on as if nothing had happened."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state(),
            "batches": self.batches.state(),
            "step": self.step_count,
            "losses": (self._loss, self._mtp_loss),
            "elapsed_s": elapsed_s,
        }

    def restore(self, state: dict[str, Any]) -> float:
        """Takes up a saved run; returns the seconds that it had lasted."""
        self.network.load_state_dict(state["network"])
        self.optimizer.restore(state["optimizer"])
        self.batches.restore(state["batches"])
        self.step_count = state["step"]
        self._loss, self._mtp_loss = state["losses"]
        return float(state["elapsed_s"])


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else _SMOOTHING * old + (1 - _SMOOTHING) * new


def learn(trainer: Trainer, budget: Budget, elapsed_s: float = 0.0) -> Iterator[Progress]:
    """Steps until the budget is spent, yielding after every step; `elapsed_s` is already spent."""
    begin = time.perf_counter() - elapsed_s
    while True:
        elapsed_s = time.perf_counter() - begin
        share = budget.progress(trainer.step_count, elapsed_s)
        if share >= 1:
            return
        trainer.step(share)
        yield trainer.progress(time.perf_counter() - begin)


def set_up_torch(threads: int) -> None:
    """Fixes the threads and refuses operations whose result depends on timing."""
    if threads < 1:
        raise BadInput("--threads must be at least 1", field="threads")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


def smoke_streams(seed: int) -> streams.Streams:
    """Generated chat alone, under a vocabulary learnt from it: needs no corpus and no network."""
    text = corpus.chat_text(SMOKE_DIALOGUES, seed, Prose())
    tokenizer = tokenizer_trainer.train_tokenizer(tokenizer_trainer.learnt_lines({"chat": text}))
    return streams.encode_corpus({"chat": text}, tokenizer)


def train(trainer: Trainer, budget: Budget, out: Path, elapsed_s: float = 0.0) -> None:
    """A full run with progress lines, saving its state into `out` every few minutes."""
    last_save, report = elapsed_s, None
    for report in learn(trainer, budget, elapsed_s):
        if report.step % REPORT_STEPS == 0:
            console.print(report.line(trainer.recipe.tokens_per_step))
        if report.elapsed_s - last_save >= SAVE_SECONDS:
            save_state(trainer, out, report.elapsed_s)
            last_save = report.elapsed_s
    if report is not None:
        save_state(trainer, out, report.elapsed_s)


def save_state(trainer: Trainer, out: Path, elapsed_s: float) -> None:
    """Replaces the saved state in one move, so that an interrupted save leaves the old one."""
    partial = out / f"{STATE_FILE}.part"
    torch.save(trainer.state(elapsed_s), partial)
    partial.replace(out / STATE_FILE)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train", description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, help="folder made by `corpus`")
    parser.add_argument("--tokenizer", type=Path, help="folder made by `tokenizer_trainer`")
    parser.add_argument("--out", type=Path, help="folder for the state and the checkpoint")
    parser.add_argument("--minutes", type=float, default=0.0, help="wall budget")
    parser.add_argument("--steps", type=int, default=0, help="fixed length, reproducible by seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more pay only on an idle machine")
    parser.add_argument("--resume", action="store_true", help=f"go on from {STATE_FILE} in --out")
    parser.add_argument(
        "--smoke", action="store_true", help="60 steps on generated chat, then stop"
    )
    options = parser.parse_args(argv)
    if not options.smoke:
        for name in ("corpus", "tokenizer", "out"):
            if getattr(options, name) is None:
                raise BadInput(f"--{name} is needed (or --smoke)", field=name)
    return options


def _smoke_main(seed: int) -> int:
    tokens = Recipe().tokens_per_step
    trainer = Trainer(smoke_streams(seed), Recipe(seed=seed))
    report = None
    for report in learn(trainer, Budget(steps=SMOKE_STEPS)):
        if report.step % SMOKE_REPORT_STEPS == 0:
            console.print(report.line(tokens))
    assert report is not None
    learnt = report.loss < SMOKE_LOSS
    console.print(f"loss is {'below' if learnt else 'NOT below'} {SMOKE_LOSS}")
    return 0 if learnt else 1


def main(argv: Sequence[str]) -> int:
    """Command line: see `--help`."""
    options = _parse(argv)
    set_up_torch(options.threads)
    if options.smoke:
        return _smoke_main(options.seed)
    budget = Budget(options.steps, options.minutes * 60)
    options.out.mkdir(parents=True, exist_ok=True)
    export.copy_tokenizer(options.tokenizer, options.out)
    tokenizer = streams.load_tokenizer(options.tokenizer)
    trainer = Trainer(streams.load_streams(options.corpus, tokenizer), Recipe(seed=options.seed))
    elapsed_s = _resume(trainer, options.out) if options.resume else 0.0
    train(trainer, budget, options.out, elapsed_s)
    export.save_checkpoint(trainer.network, options.out, recipe.MODEL_CONFIG)
    console.print(f"{trainer.step_count} steps -> {options.out}")
    return 0


def _resume(trainer: Trainer, out: Path) -> float:
    path = out / STATE_FILE
    if not path.is_file():
        raise BadInput(f"nothing to resume: no {STATE_FILE} in {out}", field="resume")
    return trainer.restore(torch.load(path, weights_only=True))


if __name__ == "__main__":
    run(main)
