"""Token streams: the corpus as integers, split for training and judging, cut into windows.

Each domain is one long stream `[tokens]` of uint16. The last 2 % are held out. A training batch is
`[rows, window]`: each row draws its domain by weight and its place in it at random; a row of chat
starts where a dialogue starts, so that the model always sees what it answers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from libs.errors import BadInput
from libs.model.training import corpus, markup
from libs.model.training.tokenizer_trainer import TOKENIZER_FILE

TokenArray = npt.NDArray[np.integer]

HELD_OUT_SHARE = 0.02
# A batch is mostly conversation, which is what the model is asked for.
DOMAIN_WEIGHTS = {"novels": 0.28, "scripture": 0.17, "docs": 0.15, "chat": 0.40}
_ENCODED_CHARS = 200_000  # one call of the encoder; bounds its memory


@dataclass(frozen=True, slots=True)
class Streams:
    """One stream of token ids per domain, for training and for judging."""

    train: Mapping[str, TokenArray]
    held_out: Mapping[str, TokenArray]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; `BadInput` when it has none."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise BadInput(f"no {TOKENIZER_FILE} in {folder}", field="tokenizer")
    return Tokenizer.from_file(str(path))


def encode_corpus(texts: Mapping[str, str], tokenizer: Tokenizer) -> Streams:
    """Encodes every domain of `texts` and holds out the end of each."""
    train, held_out = {}, {}
    for domain, text in texts.items():
        stream = _encode_chat(text, tokenizer) if domain == "chat" else _encode(text, tokenizer)
        cut = int(len(stream) * (1 - HELD_OUT_SHARE))
        train[domain], held_out[domain] = stream[:cut], stream[cut:]
    return Streams(train, held_out)


def load_streams(folder: Path, tokenizer: Tokenizer) -> Streams:
    """The streams of a built corpus."""
    return encode_corpus(corpus.load(folder), tokenizer)


def _encode(text: str, tokenizer: Tokenizer) -> TokenArray:
    pieces = [text[at : at + _ENCODED_CHARS] for at in range(0, len(text), _ENCODED_CHARS)]
    return _join([encoding.ids for encoding in tokenizer.encode_batch(pieces)])


def _encode_chat(text: str, tokenizer: Tokenizer) -> TokenArray:
    # Line by line: the line break separates dialogues in the file and is no part of them.
    lines = text.splitlines()
    return _join([encoding.ids for encoding in tokenizer.encode_batch(lines)])


def _join(parts: list[list[int]]) -> TokenArray:
    return np.concatenate([np.asarray(part, dtype=np.uint16) for part in parts])


class Batches:
    """Draws training windows; the same seed and the same streams give the same windows."""

    def __init__(self, streams: Streams, window: int, seed: int) -> None:
        """`window` is the tokens per row, including those only predicted."""
        self._streams = streams.train
        self._window = window
        self._rng = np.random.default_rng(seed)
        self._domains = [domain for domain in DOMAIN_WEIGHTS if domain in streams.train]
        for domain in self._domains:
            if len(streams.train[domain]) <= window:
                raise BadInput(f"domain {domain} is shorter than one window", field=domain)
        weights = np.array([DOMAIN_WEIGHTS[domain] for domain in self._domains])
        self._shares = weights / weights.sum()
        self._starts = {
            domain: _starts(stream, window)
            for domain, stream in streams.train.items()
            if domain == "chat"
        }

    def draw(self, rows: int) -> npt.NDArray[np.int64]:
        """A batch `[rows, window]`."""
        batch = np.empty((rows, self._window), dtype=np.int64)
        for row in batch:
            domain = self._domains[self._rng.choice(len(self._domains), p=self._shares)]
            stream = self._streams[domain]
            start = self._start(domain, len(stream))
            row[:] = stream[start : start + self._window]
        return batch

    def _start(self, domain: str, length: int) -> int:
        starts = self._starts.get(domain)
        if starts is None:
            return int(self._rng.integers(length - self._window))
        return int(starts[self._rng.integers(len(starts))])

    def state(self) -> dict[str, object]:
        """What has to be saved to go on drawing where this object stands."""
        return dict(self._rng.bit_generator.state)

    def restore(self, state: dict[str, object]) -> None:
        """Goes on where `state` was taken."""
        self._rng.bit_generator.state = state


def _starts(stream: TokenArray, window: int) -> npt.NDArray[np.int64]:
    starts = np.nonzero(stream[: len(stream) - window] == markup.BOS_ID)[0]
    if len(starts) == 0:
        raise BadInput("the chat stream holds no dialogue as long as a window", field="chat")
    return starts


def held_out_windows(stream: TokenArray, rows: int, window: int) -> npt.NDArray[np.int64]:
    """`rows` evenly spaced windows `[rows, window]` of a held-out stream."""
    if len(stream) <= window:
        raise BadInput(f"held-out text of {len(stream)} tokens is shorter than one window")
    starts = np.linspace(0, len(stream) - window, rows).astype(np.int64)
    return np.stack([stream[start : start + window] for start in starts]).astype(np.int64)
