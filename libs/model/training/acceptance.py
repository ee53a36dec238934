"""How many draft tokens the main model would accept: MTP acceptance, measured on its greedy text.

Verification never changes the text, so it can be written first, in one go, and the drafts compared
with it afterwards. A step at row i commits token i + 1 for certain, then the first draft when it
equals token i + 2, then the second when it equals token i + 3; the next step begins behind the last
accepted one. The figure of merit is tokens per step (1 without MTP).
"""

# torch is an optional extra; a type checker that does not find it takes it for Any.
# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.model.training import streams, tasks
from libs.model.training.network import Network
from libs.model.training.torch_extra import Tensor, torch

PROMPT_TOKENS = 64
NEW_TOKENS = 120

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted share of first drafts, and tokens per step for each way to draft.

    `second_tokens` is None for a model without a trained second MTP layer.
    """

    first_share: float
    first_tokens: float
    reused_tokens: float
    second_tokens: float | None


@torch.no_grad()
def measure(network: Network, stream: streams.TokenArray, rows: int) -> Acceptance:
    """Acceptance on `rows` greedy continuations of windows of a held-out stream."""
    prompts = streams.held_out_windows(stream, rows, PROMPT_TOKENS)
    padding = np.zeros((rows, NEW_TOKENS), dtype=np.int64)
    tokens = torch.from_numpy(np.concatenate([prompts, padding], axis=1))
    tasks.extend(network, tokens, torch.full((rows,), PROMPT_TOKENS), NEW_TOKENS)

    hidden = network.hidden(tokens)[:, :-2]
    first = network.mtp_hidden(0, hidden, tokens[:, 1:-1])
    first_ok = _agrees(network, first, tokens, ahead=2)
    reused_ok = _agrees(network, network.mtp_reused(hidden, first, tokens), tokens, ahead=3)
    second_ok = None
    if network.args.num_nextn_predict_layers > 1:
        second = network.mtp_hidden(1, first, tokens[:, 2:])
        second_ok = _agrees(network, second, tokens, ahead=3)
    never = np.zeros_like(reused_ok)
    return Acceptance(
        first_share=float(first_ok[:, PROMPT_TOKENS - 1 :].mean()),
        first_tokens=tokens_per_step(first_ok, never),
        reused_tokens=tokens_per_step(first_ok, reused_ok),
        second_tokens=None if second_ok is None else tokens_per_step(first_ok, second_ok),
    )


def _agrees(network: Network, hidden: Tensor, tokens: Tensor, ahead: int) -> Flags:
    """Whether the draft of each row i is token i + `ahead`, `[rows, rows that have a target]`."""
    drafts = network.lm_head(hidden).argmax(-1)
    targets = tokens[:, ahead:]
    length = min(drafts.shape[1], targets.shape[1])
    agreement: Flags = (drafts[:, :length] == targets[:, :length]).numpy()
    return agreement


def tokens_per_step(first_ok: Flags, second_ok: Flags, start: int = PROMPT_TOKENS - 1) -> float:
    """Tokens committed per step by walking each row from `start`; both flags `[rows, length]`.

    A second draft counts only behind an accepted first one.
    """
    length = min(first_ok.shape[1], second_ok.shape[1])
    steps = committed = 0
    for first, second in zip(first_ok, second_ok, strict=True):
        at = start
        while at < length:
            taken = 1 + int(first[at]) + int(first[at] and second[at])
            steps, committed, at = steps + 1, committed + taken, at + taken
    assert steps > 0, "no row reaches the start"
    return committed / steps
