"""The digest engine: instead of a tensor, a digest of everything that the tensor depends on.

A model is only one way to make a token depend on its inputs, and a costly one. Here a hidden row is
64 bits, and each piece of the model mixes into them what the tensor would have been made from:

    embed       the token
    attend      the row, its position, the layer, and every KV row up to the position, in order
    gate        the experts are chosen by the row; the row itself travels
    experts     per (layer, logical expert, row, weight) one integer from 1 to 2^44
    combine     the row and the sum of those integers
    logits      a few likely tokens out of the row's bits, and now and then the end of sequence

So a KV row that is stale, lost, foreign or in another's place, an expert's answer that is missing,
doubled or from elsewhere, a shifted position or another token anywhere before changes the tokens,
as surely as with tensors: a difference goes unnoticed once in 2^44 cases. Nothing is learnt and the
text is noise; what is proved is that the right bytes came to the right place.

Like the exact tensor engines this one gives the same bits whatever the batch, chunking, placement
or number of partial sums: a KV row depends on the tokens up to its own position, KV rows are
hashed with their position and added mod 2^64, and the experts' integers stay exact in float64 up
to 512 of them. A KV row is four float32 numbers of 16 bits each, so that KV memory, transfer
and the NaN of rows that nobody wrote are those of the tensor engines. Attention reads all rows of
a sequence, in one vectorised pass per layer: 64K rows take a millisecond or two.

Drafts of the MTP layers are digests too and therefore wrong nearly always: speculation is exercised
as far as proposing, refusing and writing KV again, hardly in accepting.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvariantError
from libs.model.any_engine import AnyEngine, Float32, Parts, TokenIds
from libs.model.args import ModelArgs
from libs.model.kv import KvStore, Span
from libs.model.linear import Rows
from libs.model.moe import Routed, choose_experts

#: The name of this engine where others have the name of their arithmetic.
DIGEST: Final = "digest"

UInt64 = NDArray[np.uint64]

#: A digest has no rotary table, so the model's trained window does not bound its positions.
MAX_POSITIONS: Final = 1 << 20
#: Numbers of a KV row, and the bits in each.
KV_WORDS: Final = 4
#: Bits of one expert's contribution; 2^53 / 2^44 of them add up exactly in float64.
EXPERT_BITS: Final = 44
#: Likely tokens per row. One in four of them comes from a few common ones, so that tokens repeat
#: and penalties have something to punish.
CANDIDATES: Final = 8
COMMON: Final = 8
#: Logits: the candidates lie in [6, 14), all other tokens in (-32, -24], where no temperature that
#: the API admits finds them.
HOT_FROM: Final = 6.0
COLD_BELOW: Final = -24.0
#: One row in 32 ends the sequence, with a logit above every candidate's.
END_SHIFT: Final = np.uint64(59)
END_LOGIT: Final = 16.0

_ODD = np.uint64(0x9E3779B97F4A7C15)
_LEFT = np.uint64(0xBF58476D1CE4E5B9)
_RIGHT = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_TO_24_BITS = np.uint64(40)


def digest_args(args: ModelArgs) -> ModelArgs:
    """`args` with the row sizes of this engine: whoever sizes a buffer by them sizes it right."""
    return replace(
        args,
        hidden_size=1,
        kv_lora_rank=KV_WORDS - 2,
        qk_rope_head_dim=2,
        max_position_embeddings=max(MAX_POSITIONS, args.max_position_embeddings),
    )


def mixed(values: UInt64) -> UInt64:
    """The finaliser of splitmix64, in place: a permutation in which every bit reaches every bit."""
    values ^= values >> _S30
    values *= _LEFT
    values ^= values >> _S27
    values *= _RIGHT
    values ^= values >> _S31
    return values


def chained(left: UInt64, right: UInt64, key: np.uint64) -> UInt64:
    """A digest of both and of the place that `key` stands for; another one for either changed."""
    return mixed(left * _ODD + right * _LEFT + key)


@lru_cache(maxsize=4096)
def key_of(what: str, *numbers: int) -> np.uint64:
    """The key of a place in the model: a constant of its name and numbers."""
    value = np.frombuffer(what.encode().ljust(8)[:8], "<u8").astype(np.uint64)
    for number in numbers:
        value = chained(value, np.array([number], np.uint64), _RIGHT)
    key: np.uint64 = mixed(value)[0]
    return key


@lru_cache(maxsize=256)
def keys_of(what: str, place: int, count: int) -> UInt64:
    """The keys of `count` things of one kind at one place."""
    return np.array([key_of(what, place, number) for number in range(count)], np.uint64)


@lru_cache(maxsize=21)
def position_keys(size: int) -> UInt64:
    """Keys of positions `0 .. size`."""
    return mixed(np.arange(size, dtype=np.uint64) * _ODD + key_of("place"))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where a batch's rows find their KV rows, once these are read one sequence after another.

    `position` of each row; `last` is the index of a row's own KV row and `first` that of its
    sequence's first one, among all that were read; `keys` are those of the positions read.
    """

    position: UInt64
    first: NDArray[np.intp]
    last: NDArray[np.intp]
    keys: UInt64


@lru_cache(maxsize=8)
def layout_of(spans: tuple[Span, ...]) -> Layout:
    """The layout of a batch; every layer of an iteration asks for the same one."""
    longest = max(span.stop for span in spans)
    # Rounded up, so that a growing sequence does not make a new table at each step.
    keys = position_keys(1 << max(10, longest.bit_length()))
    before = np.cumsum([0, *(span.stop for span in spans)])[:-1]
    first = np.repeat(before, [span.length for span in spans])
    position = joined([np.arange(span.start, span.stop) for span in spans])
    read = joined([keys[: span.stop] for span in spans])
    return Layout(position.astype(np.uint64), first, first + position, read)


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """`parts` one after another, without a copy where there is only one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class DigestEngine(AnyEngine):
    """The pieces of a model of the sizes `args`, on digests; `parts` says which experts are held.

    `args` are as `digest_args` makes them. Rows are uint64 `[tokens, 1]`.
    """

    def __init__(self, args: ModelArgs, parts: Parts | None = None) -> None:
        parts = parts or Parts()
        self.args = digest_args(args)
        self.mode = DIGEST
        self._attention = parts.attention
        moe_layers = [layer for layer in range(args.num_kv_layers) if args.is_moe(layer)]
        self._held: dict[int, set[int]] = {layer: set() for layer in moe_layers}
        wanted = parts.experts
        if wanted is None:
            wanted = dict.fromkeys(moe_layers, args.expert_ids())
        for layer, experts in wanted.items():
            self.hold_experts(layer, experts)
        ids = np.arange(args.vocab_size, dtype=np.uint64) * _ODD + key_of("cold")
        self._cold = np.float32(COLD_BELOW) - _fraction(mixed(ids)) * np.float32(8)
        self._ends = np.asarray(args.eos_token_ids, np.intp)

    # ------------------------------------------------------------ attention side

    def embed(self, token_ids: TokenIds) -> UInt64:
        """`[tokens] -> [tokens, 1]`."""
        ids = np.asarray(token_ids, np.int64)
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < self.args.vocab_size, "foreign token"
        return mixed(ids.astype(np.uint64) * _ODD + key_of("embed"))[:, None]

    def attend(self, layer: int, x: UInt64, spans: Sequence[Span], kv: KvStore) -> UInt64:
        """Chain each row with its position, the layer and all KV rows up to its position."""
        if not self._attention:
            raise InvariantError(f"this engine holds no attention for layer {layer}")
        assert sum(span.length for span in spans) == len(x), "spans must cover the batch"
        if not spans:
            return x
        layout = layout_of(tuple(spans))
        rows = x[:, 0]
        self._write(chained(rows, layout.position, key_of("kv", layer)), layer, spans, kv)
        read = [kv.read(span.sequence, layer, span.stop) for span in spans]
        digests = _row_digests(joined(read), layout.keys)
        sums = np.cumsum(digests, dtype=np.uint64)
        # The sum over a sequence's rows is a difference of running sums; mod 2^64 it is exact.
        seen = sums[layout.last] - (sums[layout.first] - digests[layout.first])
        # The position is in it already: the sum is over as many rows, each with its own position.
        return chained(rows, seen, key_of("attend", layer))[:, None]

    def _write(self, digests: UInt64, layer: int, spans: Sequence[Span], kv: KvStore) -> None:
        """Store each digest as four numbers of 16 bits, low bits first."""
        words = digests.astype("<u8", copy=False).view("<u2").reshape(-1, KV_WORDS)
        rows, first = words.astype(np.float32), 0
        for span in spans:
            kv.write(span.sequence, layer, span.start, rows[first : first + span.length])
            first += span.length

    def dense_mlp(self, layer: int, x: UInt64) -> UInt64:
        """Chain each row with the layer."""
        return mixed(x * _ODD + key_of("dense", layer))

    def gate(self, layer: int, x: UInt64) -> Routed:
        """Scores by row and expert; their choice is that of the tensor engines' gate."""
        keys = keys_of("gate", layer, self.args.n_routed_experts)
        scores = _fraction(mixed(x * _LEFT + keys)) + np.float32(2**-25)
        topk_idx, topk_weights = choose_experts(self.args, scores)
        return Routed(Rows(x), topk_idx, topk_weights)

    def combine(self, x: UInt64, partials: Sequence[NDArray[Any]]) -> UInt64:
        """Chain each row with the sum of the experts' integers."""
        assert partials, "at least one expert die must have answered"
        total = np.zeros(x.shape, np.float64)
        for partial in partials:
            assert partial.shape == total.shape, (partial.shape, total.shape)
            total += partial
        # As bits and not as an integer: a sum from a broken die may be any number.
        return chained(x, total.view(np.uint64), key_of("combine"))

    def final_hidden(self, x: UInt64) -> UInt64:
        """A digest that is no layer's row."""
        return mixed(x * _ODD + key_of("final"))

    def logits(self, hidden: UInt64) -> Float32:
        """`[tokens, vocab]`: a few likely tokens by the row's bits, the rest far below."""
        tokens = len(hidden)
        logits = np.empty((tokens, self.args.vocab_size), np.float32)
        logits[:] = self._cold
        slots = min(CANDIDATES, self.args.vocab_size)
        bits = mixed(hidden * _ODD + keys_of("slot", 0, slots))
        classes = np.uint64(self.args.vocab_size // slots)
        chosen = (bits >> np.uint64(8)) % classes
        common = (bits & np.uint64(3)) == 0
        np.minimum(chosen, chosen % np.uint64(COMMON), out=chosen, where=common)
        # One residue class per candidate: no two of a row are the same token.
        ids = (chosen * np.uint64(slots)).astype(np.intp) + np.arange(slots)
        hot = np.float32(HOT_FROM) + _fraction(bits) * np.float32(8)
        np.put_along_axis(logits, ids, hot, axis=1)
        if len(self._ends):
            last = mixed(hidden[:, 0] * _ODD + key_of("end"))
            ending = np.flatnonzero(last >> END_SHIFT == 0)
            which = (last[ending] % np.uint64(len(self._ends))).astype(np.intp)
            logits[ending, self._ends[which]] = END_LOGIT
        return logits

    # ------------------------------------------------------------ expert side

    def hold_experts(self, layer: int, experts: Collection[int]) -> None:
        """Hold `experts` of `layer` beside those already held."""
        for expert in experts:
            if expert not in self.args.expert_ids():
                raise InvariantError(f"layer {layer} has no expert {expert}")
        self._experts(layer).update(experts)

    def release_experts(self, layer: int, experts: Collection[int]) -> None:
        """Hold `experts` of `layer` no longer; one that is not held is fine."""
        self._experts(layer).difference_update(experts)

    def held_experts(self, layer: int) -> tuple[int, ...]:
        """The experts of `layer` that are held, ascending."""
        return tuple(sorted(self._experts(layer)))

    def expert_partial(
        self,
        layer: int,
        rows: Rows,
        topk_idx: NDArray[np.int32],
        topk_weights: Float32,
        experts: Sequence[int],
    ) -> NDArray[Any]:
        """Sum, per row, one integer for each of `experts` that the row chose, `[tokens, 1]`.

        An entry of `topk_idx` that is no routed expert is skipped, as by the tensor engines.
        """
        held, routed = self._experts(layer), self.args.n_routed_experts
        if not held.issuperset(experts):
            missing = min(set(experts) - held)
            raise InvariantError(f"expert {missing} of layer {layer} is not held here")
        keys = keys_of("expert", layer, routed + 1)
        # -1 is a large number without its sign; the last entry stands for all that are no experts.
        index = np.minimum(topk_idx.astype(np.uint32), np.uint32(routed)).astype(np.intp)
        here = np.zeros(routed + 1, np.bool_)
        here[list(experts)] = True
        here[routed] = False
        weights = np.ascontiguousarray(topk_weights, np.float32).view(np.uint32)
        terms = _contributions(rows.data, weights.astype(np.uint64), keys[index])
        total: NDArray[Any] = np.where(here[index], terms, 0.0).sum(axis=1, keepdims=True)
        if self.args.shared_expert in experts:
            one = np.zeros((len(rows), 1), np.uint64)
            total += _contributions(rows.data, one, keys[routed:])
        return total

    def _experts(self, layer: int) -> set[int]:
        held = self._held.get(layer)
        if held is None:
            raise InvariantError(f"this engine holds no experts for layer {layer}")
        return held

    # ------------------------------------------------------------ drafts

    def mtp_embed(self, layer: int, hidden: UInt64, next_token_ids: TokenIds) -> UInt64:
        """Chain each hidden state with the token that follows it."""
        return chained(hidden, self.embed(next_token_ids), key_of("join", layer))

    def mtp_hidden(self, layer: int, x: UInt64) -> UInt64:
        """A digest that is no layer's row."""
        return mixed(x * _ODD + key_of("draft", layer))


def _row_digests(rows: Float32, keys: UInt64) -> UInt64:
    """One digest per KV row `[rows, 4]`, of its bits and its position's key."""
    if np.isnan(rows).any():
        raise InvariantError("attention reads a KV row that nobody wrote")
    halves = np.ascontiguousarray(rows).view(np.uint64)
    digests = halves[:, 0] * _LEFT
    digests += halves[:, 1] * _RIGHT
    digests ^= keys
    return mixed(digests)


def _contributions(rows: UInt64, weights: UInt64, keys: UInt64) -> NDArray[np.float64]:
    """Integers from 1 to 2^44 that stand for the weighted outputs of experts."""
    bits = chained(rows, weights, _RIGHT) + keys
    return ((mixed(bits) >> np.uint64(64 - EXPERT_BITS)) + np.uint64(1)).astype(np.float64)


def _fraction(digests: UInt64) -> Float32:
    """The upper 24 bits as a number in [0, 1), exact in float32."""
    return (digests >> _TO_24_BITS).astype(np.float32) * np.float32(2**-24)
