"""The monolith: one sequence, one contiguous cache, no batching; right by definition.

Every other path (batched, chunked, disaggregated, faulted, rolled back, speculative) is compared
with `Reference.generate`, token for token, and with `logit_hash`, bit for bit. Speculation is here
as well, in its plainest form, because its output must be the same as without (P082).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.errors import BadInput, CapacityExceeded
from libs.model.any_engine import AnyEngine, Hidden
from libs.model.engine import Engine
from libs.model.kv import ContiguousKv, Span
from libs.model.weights import Checkpoint

Float32 = NDArray[np.float32]

# choose(logits [vocab], position of the token to choose, all tokens before it) -> token
Choose = Callable[[Float32, int, Sequence[int]], int]

_SEQUENCE = 0


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Chosen tokens (a stop token included), and every logits row of the prompt and of them.

    With drafts, `draft_logits` holds the drafts' rows, and of `proposed` drafts `accepted` were
    right. `steps` counts passes of the main model after the prefill.
    """

    tokens: tuple[int, ...]
    logits: Float32
    steps: int
    draft_logits: Float32
    proposed: int = 0
    accepted: int = 0


def greedy(logits: Float32, position: int, history: Sequence[int]) -> int:
    """The most likely token; ties go to the lower id."""
    del position, history
    return int(logits.argmax())


def logit_hash(rows: Iterable[Float32]) -> str:
    """SHA-256 over the bytes of logits rows, little-endian float32, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.ascontiguousarray(row, "<f4").tobytes())
    return digest.hexdigest()


class Reference:
    """Plain generation with one engine, or with a checkpoint loaded for it."""

    def __init__(self, source: AnyEngine | Checkpoint, mode: str = "int8") -> None:
        self.engine: AnyEngine = source if isinstance(source, AnyEngine) else Engine(source, mode)

    def prefill(self, ids: Sequence[int]) -> Float32:
        """Logits of every position of `ids`, `[tokens, vocab]`."""
        self._check(ids, 0)
        logits, _ = self.engine.forward(
            ids, [Span(_SEQUENCE, 0, len(ids))], self.engine.contiguous_kv()
        )
        return logits

    def generate(
        self,
        prompt_ids: Sequence[int],
        choose: Choose,
        max_tokens: int,
        stop_ids: Collection[int] = (),
    ) -> list[int]:
        """Continue the prompt until a stop token (kept) or `max_tokens`.

        `BadInput` for an empty or foreign prompt, `CapacityExceeded` beyond the model's positions.
        The same tokens as `trace`, without the logits of the prompt, which a long one has no room
        for.
        """
        self._check(prompt_ids, max_tokens)
        engine, kv = self.engine, self.engine.contiguous_kv()
        history, fed = list(prompt_ids), 0
        while True:
            span = Span(_SEQUENCE, fed, len(history) - fed)
            hidden = engine.hidden_states(history[fed:], [span], kv)
            fed = len(history)
            token = choose(engine.logits(hidden[-1:])[0], fed, history)
            history.append(token)
            if token in stop_ids or len(history) - len(prompt_ids) >= max_tokens:
                return history[len(prompt_ids) :]

    def trace(
        self,
        prompt_ids: Sequence[int],
        choose: Choose,
        max_tokens: int,
        stop_ids: Collection[int] = (),
    ) -> Generation:
        """As `generate`, keeping the logits."""
        self._check(prompt_ids, max_tokens)
        kv = self.engine.contiguous_kv()
        history = list(prompt_ids)
        logits, _ = self.engine.forward(history, [Span(_SEQUENCE, 0, len(history))], kv)
        rows = [logits]
        while True:
            token = choose(rows[-1][-1], len(history), history)
            history.append(token)
            produced = len(history) - len(prompt_ids)
            if token in stop_ids or produced >= max_tokens:
                break
            span = Span(_SEQUENCE, len(history) - 1, 1)
            rows.append(self.engine.forward(history[-1:], [span], kv)[0])
        none = np.zeros((0, logits.shape[1]), np.float32)
        tokens = tuple(history[len(prompt_ids) :])
        return Generation(tokens, np.concatenate(rows), len(rows) - 1, none)

    def speculate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_ids: Collection[int] = (),
        *,
        drafts: int = 1,
        choose: Choose = greedy,
    ) -> Generation:
        """As `trace`, with `drafts` tokens proposed per step by the MTP layers.

        The five steps of P082: propose, verify in one pass of the main model, choose at each
        verified position as if alone, accept while draft and choice agree, carry hidden states on.
        """
        assert drafts >= 1, drafts
        self._check(prompt_ids, max_tokens)
        kv = self.engine.contiguous_kv()
        history = list(prompt_ids)
        prompt = len(history)
        logits, hidden = self.engine.forward(history, [Span(_SEQUENCE, 0, prompt)], kv)
        drafter = Drafter(self.engine, kv, drafts)
        kept, draft_rows = [logits], []
        proposed = accepted = steps = 0
        history.append(choose(logits[-1], prompt, history))
        fresh = history[1:]  # the tokens that follow the positions of `hidden`
        while history[-1] not in stop_ids and len(history) - prompt < max_tokens:
            guesses, guess_rows = drafter.propose(hidden, fresh)
            draft_rows.append(guess_rows)
            verified = [history[-1], *guesses]
            span = Span(_SEQUENCE, len(history) - 1, len(verified))
            logits, hidden = self.engine.forward(verified, [span], kv)
            steps += 1
            proposed += drafts
            fresh = []
            for row in range(len(verified)):
                token = choose(logits[row], len(history), history)
                history.append(token)
                fresh.append(token)
                ended = token in stop_ids or len(history) - prompt >= max_tokens
                if ended or row == drafts or token != guesses[row]:
                    break
                accepted += 1
            kept.append(logits[: len(fresh)])
            hidden = hidden[: len(fresh)]
        none = np.zeros((0, logits.shape[1]), np.float32)
        return Generation(
            tuple(history[prompt:]),
            np.concatenate(kept),
            steps,
            np.concatenate([none, *draft_rows]),
            proposed,
            accepted,
        )

    def _check(self, ids: Sequence[int], max_tokens: int) -> None:
        args = self.engine.args
        if not ids:
            raise BadInput("the prompt has no tokens", field="prompt")
        if not all(0 <= token < args.vocab_size for token in ids):
            raise BadInput(
                f"the prompt has a token id outside 0..{args.vocab_size - 1}", field="prompt"
            )
        if len(ids) + max_tokens > args.max_position_embeddings:
            raise CapacityExceeded(
                f"{len(ids)} prompt tokens and {max_tokens} to generate exceed the model's "
                f"{args.max_position_embeddings} positions"
            )


class Drafter:
    """Proposes tokens for one sequence and keeps the KV rows of its MTP layers true.

    A trained layer of depth `d` looks `d` tokens beyond the verified ones, so its last `d` rows are
    provisional after each proposal; the next one writes them again, from hidden states carried
    over.
    """

    def __init__(self, engine: AnyEngine, kv: ContiguousKv, drafts: int) -> None:
        self._engine, self._kv, self._drafts = engine, kv, drafts
        self._verified = 0  # positions whose hidden state was handed over
        self._carried: dict[int, Hidden] = {}

    def propose(self, hidden: Hidden, fresh: Sequence[int]) -> tuple[list[int], Float32]:
        """Draft the tokens that follow `fresh`.

        `hidden [n, hidden]` are final hidden states of the next `n` verified positions and `fresh`
        the `n` tokens after each. Returns the drafts and their logits `[drafts, vocab]`.
        """
        assert len(hidden) == len(fresh), (len(hidden), len(fresh))
        self._verified += len(fresh)
        tokens = list(fresh)
        rows: list[Float32] = []
        for depth in range(self._drafts):
            if self._engine.mtp_place(depth).row_shift > 0:
                hidden = hidden[-1:]  # reused layer: its rows exist, it looks one token further
            elif depth > 0:
                carried = self._carried.get(depth, hidden[:0])
                provisional = len(hidden) - depth
                self._carried[depth] = hidden[max(0, provisional) : max(0, provisional + 1)]
                hidden = np.concatenate([carried, hidden])
            count = len(hidden)
            span = Span(_SEQUENCE, self._verified - count, count)
            logits, hidden = self._engine.mtp_forward(
                depth, hidden, tokens[-count:], [span], self._kv
            )
            rows.append(logits[-1])
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(fresh) :], np.stack(rows)
