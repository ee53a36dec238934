"""Judges a checkpoint: held-out loss, right answers, skew of the experts, MTP acceptance.

Runs the torch network in float32, on the shipped checkpoint unless told otherwise. Prints tables
for people and, with `--json`, writes the same figures for machines.
"""

# torch is an optional extra; a type checker that does not find it takes it for Any.
# mypy: allow-untyped-decorators

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from libs.errors import BadInput
from libs.model.training import acceptance, export, streams, tasks
from libs.model.training.acceptance import Acceptance
from libs.model.training.network import Network, cross_entropy
from libs.model.training.script import console, run
from libs.model.training.torch_extra import torch
from libs.model.training.train import set_up_torch
from libs.model.weights import SHIPPED

WINDOW = 256
_AHEAD = 2
# Chat questions for judging are drawn from a stream of their own.
QUESTION_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class DomainLoss:
    """Nats per held-out token of the main head and of the first MTP layer."""

    loss: float
    mtp_loss: float


@dataclass(frozen=True, slots=True)
class Skew:
    """Load of one MoE layer on one kind of traffic, over its mean: hottest and coldest expert."""

    hottest: float
    coldest: float


@torch.no_grad()
def domain_loss(network: Network, stream: streams.TokenArray, rows: int) -> DomainLoss:
    """Held-out loss over `rows` windows."""
    network.eval()
    tokens = torch.from_numpy(streams.held_out_windows(stream, rows, WINDOW + _AHEAD))
    hidden = network.hidden(tokens[:, :WINDOW])
    drafts = network.mtp_hidden(0, hidden, tokens[:, 1 : WINDOW + 1])
    return DomainLoss(
        cross_entropy(network.lm_head(hidden), tokens[:, 1 : WINDOW + 1]).item(),
        cross_entropy(network.lm_head(drafts), tokens[:, 2:]).item(),
    )


@torch.no_grad()
def expert_loads(network: Network, stream: streams.TokenArray, rows: int) -> dict[int, Any]:
    """Tokens per expert `[experts]` of each MoE layer, first MTP layer included."""
    network.eval()
    tokens = torch.from_numpy(streams.held_out_windows(stream, rows, WINDOW + 1))
    hidden = network.hidden(tokens[:, :WINDOW])
    network.mtp_hidden(0, hidden, tokens[:, 1:])
    last = network.args.num_hidden_layers
    return {layer: moe.load.float() for layer, moe in network.moes().items() if layer <= last}


def skews(loads: Mapping[int, Any]) -> dict[int, Skew]:
    """How uneven each layer's load is."""
    return {
        layer: Skew((load.max() / load.mean()).item(), (load.min() / load.mean()).item())
        for layer, load in loads.items()
    }


def evaluate(network: Network, data: streams.Streams, tokenizer: Any, rows: int) -> dict[str, Any]:
    """All figures, as plain data; `rows` windows or continuations per domain."""
    losses, skew, drafts = {}, {}, {}
    mixed: dict[int, Any] = {}
    for domain, stream in data.held_out.items():
        losses[domain] = asdict(domain_loss(network, stream, rows))
        loads = expert_loads(network, stream, rows)
        mixed = {layer: load + mixed.get(layer, 0) for layer, load in loads.items()}
        skew[domain] = {layer: asdict(value) for layer, value in skews(loads).items()}
        drafts[domain] = asdict(acceptance.measure(network, stream, rows))
    skew["even mix"] = {layer: asdict(value) for layer, value in skews(mixed).items()}
    asked = [task for kind in tasks.KINDS for task in tasks.make_tasks(kind, rows, QUESTION_SEED)]
    return {
        "loss": losses,
        "skew": skew,
        "acceptance": drafts,
        "accuracy": tasks.accuracy(network, tokenizer, asked),
    }


def show(figures: Mapping[str, Any]) -> None:
    """Prints the figures as tables."""
    table = Table("traffic", "loss", "MTP loss", title="held-out nats per token")
    for domain, loss in figures["loss"].items():
        table.add_row(domain, f"{loss['loss']:.3f}", f"{loss['mtp_loss']:.3f}")
    console.print(table)
    layers = list(next(iter(figures["skew"].values())))
    table = Table("traffic", *(f"layer {layer}" for layer in layers), title="load, max over mean")
    for domain, by_layer in figures["skew"].items():
        table.add_row(domain, *(f"{by_layer[layer]['hottest']:.2f}" for layer in layers))
    console.print(table)
    table = Table(
        "traffic", "draft 1 accepted", "1 draft", "2, reused", "2, trained", title="tokens per step"
    )
    for domain, figure in figures["acceptance"].items():
        table.add_row(domain, *_acceptance_cells(Acceptance(**figure)))
    console.print(table)
    table = Table("task", "right", title="greedy answers")
    for kind, share in figures["accuracy"].items():
        table.add_row(kind, f"{share:.0%}")
    console.print(table)


def _acceptance_cells(figure: Acceptance) -> list[str]:
    trained = "-" if figure.second_tokens is None else f"{figure.second_tokens:.2f}"
    tokens = [f"{figure.first_tokens:.2f}", f"{figure.reused_tokens:.2f}", trained]
    return [f"{figure.first_share:.2f}", *tokens]


def main(argv: Sequence[str]) -> int:
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED, help="default: the shipped one")
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by `corpus`")
    parser.add_argument("--rows", type=int, default=24, help="samples per domain and task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    if options.rows < 1:
        raise BadInput("--rows must be at least 1", field="rows")
    set_up_torch(options.threads)
    tokenizer = streams.load_tokenizer(options.checkpoint)
    data = streams.load_streams(options.corpus, tokenizer)
    figures = evaluate(export.load_network(options.checkpoint), data, tokenizer, options.rows)
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
