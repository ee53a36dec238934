"""Trains a second MTP layer for a finished checkpoint, leaving every other weight as it is.

Reusing the first MTP layer for a second draft token works, but it then reads its own output, which
it never saw in training. A second layer, begun as a copy of the first and taught on the first one's
output, guesses better. It is written as `mtp2.safetensors` beside the main file.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from libs.errors import BadInput
from libs.model.training import export, streams
from libs.model.training.network import Network, cross_entropy
from libs.model.training.recipe import Budget
from libs.model.training.script import console, run
from libs.model.training.torch_extra import F, torch
from libs.model.training.train import set_up_torch

SEQUENCES = 10
WINDOW = 256
LEARNING_RATE = 1.5e-3
WEIGHT_DECAY = 0.01
WARM_UP_STEPS = 20
REPORT_STEPS = 50
_AHEAD = 3  # the second draft of the last row is the token three behind it
_DEPTH = 1
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Report:
    """One step of the second layer: its loss in nats per token."""

    step: int
    elapsed_s: float
    loss: float


def with_second_layer(network: Network) -> Network:
    """The same model with a fresh second MTP layer, a copy of its first; nothing else can learn."""
    args = replace(network.args, num_nextn_predict_layers=_DEPTH + 1)
    grown = Network(args)
    first, second = (f"model.layers.{args.num_hidden_layers + depth}." for depth in (0, _DEPTH))
    weights = network.state_dict()
    copied = {
        second + name.removeprefix(first): value.clone()
        for name, value in weights.items()
        if name.startswith(first)
    }
    grown.load_state_dict(weights | copied, strict=True)
    grown.requires_grad_(False)
    grown.mtp_layer(_DEPTH).requires_grad_(True)
    return grown


def learn(network: Network, batches: streams.Batches, budget: Budget) -> Iterator[Report]:
    """Trains the second MTP layer until the budget is spent, yielding after every step."""
    second = network.mtp_layer(_DEPTH)
    optimizer = torch.optim.AdamW(
        second.parameters(), lr=LEARNING_RATE, betas=_BETAS, weight_decay=WEIGHT_DECAY
    )
    network.train()
    begin, step = time.perf_counter(), 0
    while (share := budget.progress(step, time.perf_counter() - begin)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - share)
        loss = _loss(network, torch.from_numpy(batches.draw(SEQUENCES)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        yield Report(step, time.perf_counter() - begin, loss.item())


def _loss(network: Network, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of the second draft over `tokens [rows, WINDOW + 3]`."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            hidden = network.hidden(tokens[:, :-3])
            first = network.mtp_hidden(0, hidden, tokens[:, 1:-2])
        second = network.mtp_hidden(_DEPTH, first, tokens[:, 2:-1])
        logits = F.linear(second, network.lm_head.weight)
    return cross_entropy(logits, tokens[:, 3:])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_mtp2", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder made by `train`")
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by `corpus`")
    parser.add_argument("--out", type=Path, help="folder to write; default: into --checkpoint")
    parser.add_argument("--minutes", type=float, default=0.0, help="wall budget")
    parser.add_argument("--steps", type=int, default=0, help="fixed length, reproducible by seed")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Command line: see `--help`."""
    options = _parse(argv)
    set_up_torch(options.threads)
    budget = Budget(options.steps, options.minutes * 60)
    out = options.out or options.checkpoint
    torch.manual_seed(options.seed)
    network = with_second_layer(export.load_network(options.checkpoint))
    tokenizer = streams.load_tokenizer(options.checkpoint)
    data = streams.load_streams(options.corpus, tokenizer)
    batches = streams.Batches(data, WINDOW + _AHEAD, options.seed)
    for report in learn(network, batches, budget):
        if report.step % REPORT_STEPS == 0:
            rate = report.step * SEQUENCES * WINDOW / report.elapsed_s
            console.print(
                f"{report.elapsed_s:7.0f} s  step {report.step:5d}  loss {report.loss:.3f}  "
                f"{rate:,.0f} tokens/s"
            )
    _write(network, options.checkpoint, out)
    return 0


def _write(network: Network, checkpoint: Path, out: Path) -> None:
    """Adds the second layer's file; the main file is copied byte for byte, not written anew."""
    if out.resolve() != checkpoint.resolve():
        out.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", export.MAIN_FILE):
            if not (checkpoint / name).is_file():
                raise BadInput(f"no {name} in {checkpoint}", field="checkpoint")
            shutil.copyfile(checkpoint / name, out / name)
        export.copy_tokenizer(checkpoint, out)
    path = export.save_second_mtp(network, out)
    console.print(f"second MTP layer -> {path}")


if __name__ == "__main__":
    run(main)
