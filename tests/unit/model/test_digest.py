"""The digest engine: as independent of how it is run as the tensors are, and no less sensitive."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.errors import InvariantError
from libs.model.any_engine import Parts
from libs.model.digest import DigestEngine, digest_args
from libs.model.kv import KvStore, PagedKv, Span
from libs.model.moe import Routed
from libs.model.reference import Reference, greedy, logit_hash
from libs.model.resources import SHIPPED, ModelResources
from libs.model.sampling import SamplingParams, sample
from tests.unit.model.checkpoints import TINY, random_tokens

MODEL = ModelResources("xds-tiny", "digest")
ENGINE = MODEL.engine()
ARGS = MODEL.args
LAYERS = ARGS.num_hidden_layers
MOE_LAYERS = range(1, LAYERS)
#: The prompt of the sensitivity tests; its 41st token is decoded.
LENGTH = 40
PROMPT = random_tokens(LENGTH + 1, seed=21)


def logits_of(ids: list[int], sizes: list[int], kv: KvStore, sequence: int = 0) -> np.ndarray:
    """Logits of `ids`, prefilled in chunks whose sizes cycle through `sizes`."""
    rows: list[np.ndarray] = []
    start = 0
    while start < len(ids):
        length = min(sizes[len(rows) % len(sizes)], len(ids) - start)
        span = Span(sequence, start, length)
        rows.append(ENGINE.forward(ids[start : start + length], [span], kv)[0])
        start += length
    return np.concatenate(rows)


# ---------------------------------------------------------------- independence


@pytest.mark.parametrize("sizes", [[1], [7], [3, 1, 16], [50, 2]])
def test_chunks_and_single_tokens_equal_one_pass(sizes: list[int]) -> None:
    ids = random_tokens(60, seed=11)
    whole = Reference(ENGINE).prefill(ids)
    assert logits_of(ids, sizes, ENGINE.contiguous_kv()).tobytes() == whole.tobytes()


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_a_batch_equals_each_of_its_sequences_alone(batch: int) -> None:
    prompts = [random_tokens(n, seed=n) for n in (1, 2, 3, 15, 16, 17, 40, 64)]
    alone = [Reference(ENGINE).prefill([*prompt, 77, 78]) for prompt in prompts]
    for first in range(0, 8, batch):
        some = range(first, min(8, first + batch))
        kv = ENGINE.contiguous_kv()
        joined = [token for s in some for token in prompts[s]]
        logits, _ = ENGINE.forward(joined, [Span(s, 0, len(prompts[s])) for s in some], kv)
        assert logits.tobytes() == b"".join(alone[s][:-2].tobytes() for s in some)
        for step, token in enumerate((77, 78)):
            spans = [Span(s, len(prompts[s]) + step, 1) for s in some]
            logits, _ = ENGINE.forward([token] * len(some), spans, kv)
            for row, s in zip(logits, some, strict=True):
                assert row.tobytes() == alone[s][len(prompts[s]) + step].tobytes()


def test_a_mixed_batch_of_prefill_chunks_and_decode_steps() -> None:
    kv, short, long = ENGINE.contiguous_kv(), random_tokens(9, 1), random_tokens(31, 2)
    ENGINE.forward(short[:8], [Span(0, 0, 8)], kv)
    ENGINE.forward(long[:20], [Span(1, 0, 20)], kv)
    logits, _ = ENGINE.forward(short[8:] + long[20:], [Span(0, 8, 1), Span(1, 20, 11)], kv)
    wanted = [Reference(ENGINE).prefill(short)[8:], Reference(ENGINE).prefill(long)[20:]]
    assert logits.tobytes() == np.concatenate(wanted).tobytes()


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_the_layout_of_kv_blocks_does_not_matter(block_size: int) -> None:
    ids = random_tokens(45, seed=3)
    kv = ENGINE.paged_kv(num_blocks=64, block_size=block_size)
    kv.bind(9, np.random.default_rng(0).permutation(64)[: -(-45 // block_size)].tolist())
    assert logits_of(ids, [13, 1], kv, 9).tobytes() == Reference(ENGINE).prefill(ids).tobytes()


def test_decode_goes_on_from_transferred_blocks() -> None:
    ids = random_tokens(21, seed=4)
    source, target = ENGINE.paged_kv(8, 8), ENGINE.paged_kv(16, 8)
    source.bind(0, [7, 1, 4])
    target.bind(5, [0, 15, 3])
    ENGINE.forward(ids[:20], [Span(0, 0, 20)], source)
    for old, new in zip([7, 1, 4], [0, 15, 3], strict=True):
        target.import_block(new, source.export_block(old))
    logits, _ = ENGINE.forward(ids[20:], [Span(5, 20, 1)], target)
    assert logits[0].tobytes() == Reference(ENGINE).prefill(ids)[20].tobytes()


@pytest.mark.parametrize("dies", [1, 2, 3, 7, 17])
def test_experts_on_any_number_of_dies_in_any_order(dies: int) -> None:
    """Each die is an engine with its own experts; choices of other dies may be hidden from it."""
    rng, x = np.random.default_rng(dies), ENGINE.embed(random_tokens(26, 6))
    for layer in MOE_LAYERS:
        routed = ENGINE.gate(layer, x)
        partials = []
        for share in np.array_split(rng.permutation(17), dies):
            experts = share.tolist()
            die = DigestEngine(ARGS, Parts(attention=False, experts={layer: experts}))
            seen = np.where(np.isin(routed.topk_idx, experts), routed.topk_idx, -1)
            partials.append(
                die.expert_partial(
                    layer, routed.rows, seen.astype(np.int32), routed.topk_weights, experts
                )
            )
        order = rng.permutation(dies)
        wanted = ENGINE.mlp(layer, x)
        x = ENGINE.combine(x, [partials[i] for i in order])
        assert x.tobytes() == wanted.tobytes()


# ---------------------------------------------------------------- sensitivity

Touch = Callable[[PagedKv], None]


def decoded(touch: Touch | None = None, prompt: list[int] = PROMPT, position: int = LENGTH) -> str:
    """Digest of the logits of the last token, decoded after something happened to the KV."""
    kv = ENGINE.paged_kv(32, 4)
    kv.bind(0, list(range(16)))
    kv.bind(1, list(range(16, 32)))
    ENGINE.forward(prompt[:-1], [Span(0, 0, len(prompt) - 1)], kv)
    ENGINE.forward(random_tokens(LENGTH, 99), [Span(1, 0, LENGTH)], kv)
    if touch is not None:
        touch(kv)
    logits, _ = ENGINE.forward(prompt[-1:], [Span(0, position, 1)], kv)
    return logit_hash(logits)


def row(kv: PagedKv, layer: int, position: int, sequence: int = 0) -> np.ndarray:
    rows: np.ndarray = kv.read(sequence, layer, LENGTH)
    return np.array(rows[position])


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("position", [0, 17, 39])
@pytest.mark.parametrize("word", range(4))
def test_one_bit_of_one_kv_row(layer: int, position: int, word: int) -> None:
    def touch(kv: PagedKv) -> None:
        changed = row(kv, layer, position)
        changed[word] = float(int(changed[word]) ^ 1)
        kv.write(0, layer, position, changed[None])

    assert decoded(touch) != decoded()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("pair", [(0, 1), (3, 36), (38, 39)])
def test_two_kv_rows_in_each_others_place(layer: int, pair: tuple[int, int]) -> None:
    def touch(kv: PagedKv) -> None:
        one, other = row(kv, layer, pair[0]), row(kv, layer, pair[1])
        kv.write(0, layer, pair[0], other[None])
        kv.write(0, layer, pair[1], one[None])

    assert decoded(touch) != decoded()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("source", ["a row of another sequence", "its neighbour", "zeros"])
def test_a_kv_row_that_is_not_this_one(layer: int, source: str) -> None:
    def touch(kv: PagedKv) -> None:
        match source:
            case "a row of another sequence":
                other = row(kv, layer, 12, sequence=1)
            case "its neighbour":
                other = row(kv, layer, 13)
            case _:
                other = np.zeros(4, np.float32)
        kv.write(0, layer, 12, other[None])

    assert decoded(touch) != decoded()


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_a_kv_row_of_another_layer(layer: int) -> None:
    def touch(kv: PagedKv) -> None:
        kv.write(0, layer, 12, row(kv, layer - 1, 12)[None])

    assert decoded(touch) != decoded()


@pytest.mark.parametrize("stale", [0, 20, 39])
def test_a_stale_kv_row_from_before_a_rollback(stale: int) -> None:
    """The row that stood there when the sequence had another token at this position."""
    old = [*PROMPT[:stale], PROMPT[stale] ^ 1]

    def touch(kv: PagedKv) -> None:
        past = ENGINE.contiguous_kv()
        ENGINE.forward(old, [Span(0, 0, len(old))], past)
        for layer in range(LAYERS):
            kv.write(0, layer, stale, past.read(0, layer, len(old))[-1:])

    assert decoded(touch) != decoded()


@pytest.mark.parametrize("table", [[1, 0], [0, 1, 2, 4, 3], [0, 1, 18]])
def test_a_wrong_block_in_the_table(table: list[int]) -> None:
    def touch(kv: PagedKv) -> None:
        kv.bind(0, [*table, *range(len(table), 16)])

    assert decoded(touch) != decoded()


def test_a_kv_row_that_nobody_wrote_is_refused() -> None:
    with pytest.raises(InvariantError, match="nobody wrote"):
        decoded(position=LENGTH + 1)


def test_a_shifted_position() -> None:
    whole = decoded()
    assert decoded(position=LENGTH - 1) != whole
    assert decoded(prompt=[PROMPT[1], *PROMPT[1:]]) != whole


@pytest.mark.parametrize("position", range(0, LENGTH + 1, 4))
def test_another_token_anywhere_before(position: int) -> None:
    changed = list(PROMPT)
    changed[position] ^= 1
    assert decoded(prompt=changed) != decoded()


def test_two_tokens_in_each_others_place() -> None:
    changed = list(PROMPT)
    changed[4], changed[5] = changed[5], changed[4]
    assert decoded(prompt=changed) != decoded()


class FrozenKv:
    """A memory that loses every write and always holds the same rows."""

    def write(self, sequence: int, layer: int, start: int, rows: np.ndarray) -> None:
        """Lost."""

    def read(self, sequence: int, layer: int, length: int) -> np.ndarray:
        """The same rows."""
        return np.ones((length, 4), np.float32)


def test_attention_chains_row_position_and_layer_whatever_the_memory_says() -> None:
    """So a lost write cannot hide behind the memory that it should have changed."""
    x, kv = ENGINE.embed([7, 8]), FrozenKv()
    seen = [
        ENGINE.attend(layer, x[which : which + 1], [Span(0, position, 1)], kv).tobytes()
        for layer in (0, 1)
        for which in (0, 1)
        for position in (3, 4)
    ]
    assert len(set(seen)) == 8


def test_kv_rows_are_four_numbers_of_16_bits() -> None:
    kv = ENGINE.contiguous_kv()
    ENGINE.forward(range(2048), [Span(0, 0, 2048)], kv)
    words = kv.read(0, 3, 2048).astype(np.int64)
    assert (words == kv.read(0, 3, 2048)).all()
    assert words.min() >= 0
    assert np.bitwise_or.reduce(words).tolist() == [0xFFFF] * 4
    assert np.bitwise_and.reduce(words).tolist() == [0] * 4


@dataclass
class Exchange:
    """One layer's exchange with two dies, of odd and of even experts; the latter have the shared.

    So every row has an answer from die 1.
    """

    layer: int
    x: np.ndarray
    routed: Routed

    def partial(self, die: int, **changes: Any) -> Any:
        routed = replace(self.routed, **{k: v for k, v in changes.items() if k != "layer"})
        layer = changes.get("layer", self.layer)
        experts = range(1 - die, 17, 2)
        return ENGINE.expert_partial(
            layer, routed.rows, routed.topk_idx, routed.topk_weights, experts
        )


def lost(at: Exchange) -> list[Any]:
    return [at.partial(0)]


def doubled(at: Exchange) -> list[Any]:
    return [at.partial(0), at.partial(1), at.partial(1)]


def misrouted(at: Exchange) -> list[Any]:
    """One row's best expert is taken for the next one."""
    chosen = at.routed.topk_idx.copy()
    chosen[0, 0] = (chosen[0, 0] + 1) % 16
    return [at.partial(0, topk_idx=chosen), at.partial(1, topk_idx=chosen)]


def hidden_choice(at: Exchange) -> list[Any]:
    """One choice of one row is skipped: a single expert's answer is lost."""
    chosen = at.routed.topk_idx.copy()
    chosen[0, 3] = -1
    return [at.partial(0, topk_idx=chosen), at.partial(1, topk_idx=chosen)]


def without_shared(at: Exchange) -> list[Any]:
    routed = at.routed
    return [
        ENGINE.expert_partial(
            at.layer, routed.rows, routed.topk_idx, routed.topk_weights, range(16)
        )
    ]


def other_layer(at: Exchange) -> list[Any]:
    return [at.partial(0), at.partial(1, layer=at.layer % (LAYERS - 1) + 1)]


def other_rows(at: Exchange) -> list[Any]:
    """The answers of two rows in each other's place."""
    return [at.partial(0), at.partial(1)[[1, 0]]]


def other_weights(at: Exchange) -> list[Any]:
    weights = at.routed.topk_weights[:, [1, 0, 2, 3]]
    return [at.partial(0, topk_weights=weights), at.partial(1, topk_weights=weights)]


def other_input(at: Exchange) -> list[Any]:
    """One bit of a row is wrong when it arrives at one die."""
    rows = replace(at.routed.rows, data=at.routed.rows.data ^ np.uint64(1))
    return [at.partial(0), at.partial(1, rows=rows)]


def one_too_many(at: Exchange) -> list[Any]:
    """The sum is wrong in its last digit."""
    return [at.partial(0), at.partial(1) + 1]


def answered(spoil: Callable[[Exchange], list[Any]] | None, where: int) -> np.ndarray:
    """Logits of two decoded rows; the exchange of layer `where` is spoiled."""
    kv = ENGINE.contiguous_kv()
    prompts = [random_tokens(12, 31), random_tokens(9, 32)]
    spans = [Span(s, 0, len(prompt)) for s, prompt in enumerate(prompts)]
    ENGINE.forward([token for prompt in prompts for token in prompt], spans, kv)
    x = ENGINE.embed([50, 51])
    for layer in range(LAYERS):
        x = ENGINE.attend(layer, x, [Span(0, 12, 1), Span(1, 9, 1)], kv)
        if spoil is not None and layer == where:
            x = ENGINE.combine(x, spoil(Exchange(layer, x, ENGINE.gate(layer, x))))
        else:
            x = ENGINE.mlp(layer, x)
    return ENGINE.head(x)


@pytest.mark.parametrize("layer", MOE_LAYERS)
@pytest.mark.parametrize(
    "spoil",
    [
        lost, doubled, misrouted, hidden_choice, without_shared, other_layer, other_rows,
        other_weights, other_input, one_too_many,
    ],
)  # fmt: skip
def test_an_experts_answer_that_is_not_the_right_one(
    spoil: Callable[[Exchange], list[Any]], layer: int
) -> None:
    assert answered(spoil, layer)[0].tobytes() != answered(None, layer)[0].tobytes()


@pytest.mark.parametrize("layer", MOE_LAYERS)
def test_an_unspoiled_exchange_is_the_right_one(layer: int) -> None:
    def both(at: Exchange) -> list[Any]:
        return [at.partial(1), at.partial(0)]

    assert answered(both, layer).tobytes() == answered(None, layer).tobytes()


def test_no_contribution_is_zero_or_too_large_to_add_exactly() -> None:
    x = ENGINE.embed(range(2048))
    routed = ENGINE.gate(1, x)
    alone = [
        ENGINE.expert_partial(1, routed.rows, routed.topk_idx, routed.topk_weights, [expert])
        for expert in range(17)
    ]
    chosen = (routed.topk_idx[:, :, None] == np.arange(16)).any(axis=1)
    for expert in range(16):
        values = alone[expert][:, 0]
        assert ((values > 0) == chosen[:, expert]).all()
        assert values.max() <= 2.0**44
        assert (values == np.rint(values)).all()
    assert (alone[16] > 0).all()


def test_every_expert_has_work() -> None:
    chosen = ENGINE.gate(3, ENGINE.embed(range(2048))).topk_idx
    share = np.bincount(chosen.ravel(), minlength=16) / chosen.size
    assert 0.05 < share.min() <= share.max() < 0.08, share
    assert all(len(set(row)) == 4 for row in chosen.tolist())


def test_a_changed_digest_changes_the_token_itself() -> None:
    """Not only the distribution: whatever the sampling, tokens of two digests seldom agree."""
    left, right = ENGINE.head(ENGINE.embed(range(2048))), ENGINE.head(ENGINE.embed(range(2048)) ^ 1)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.2, seed=3)):
        pairs = [
            tuple(sample(z[i], params, (), (), 5, 0).token for z in (left, right))
            for i in range(2048)
        ]
        assert sum(a == b for a, b in pairs) < 0.01 * len(pairs)


# ---------------------------------------------------------------- head and sampling


def test_the_end_of_sequence_comes_up_once_in_32_rows() -> None:
    tokens = ENGINE.head(ENGINE.embed(range(2048))).argmax(axis=1)
    assert 0.02 < (tokens == ARGS.eos_token_ids[0]).mean() < 0.045
    assert len(set(tokens.tolist())) > 800, "the vocabulary is used"


def test_without_an_end_token_none_is_forced() -> None:
    engine = DigestEngine(replace(ARGS, eos_token_ids=()))
    assert engine.head(engine.embed(range(64))).shape == (64, 2048)


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "top_p": 0.01}, False),
        ({"temperature": 1.0, "top_k": 1}, False),
        ({"frequency_penalty": 2.0, "presence_penalty": 2.0}, True),
        ({"logit_bias": ((1999, 100.0),)}, True),
        ({"stop_token_ids": (2,), "min_tokens": 40}, True),
    ],
)
def test_the_sampler_has_something_to_choose(changes: dict[str, Any], differs: bool) -> None:
    plain = SamplingParams(temperature=0.0, seed=5)
    asked = replace(plain, **changes)
    logits = ENGINE.head(ENGINE.embed(range(512)))
    best = logits.argmax(axis=1).tolist()
    picked = [sample(z, asked, (best[i],), (), 7, 0).token for i, z in enumerate(logits)]
    assert (picked != best) == differs
    if "min_tokens" in changes:
        assert 2 not in picked


def test_log_probabilities_are_finite_and_ordered() -> None:
    logits = ENGINE.head(ENGINE.embed([7]))[0]
    told = sample(logits, SamplingParams(temperature=0.0, logprobs=20), (), (), 7, 0)
    values = [value for _, value in told.top]
    assert len(values) == 20
    assert values == sorted(values, reverse=True)
    assert told.logprob == values[0] < 0


def test_speculation_gives_the_tokens_of_plain_generation() -> None:
    reference, prompt = Reference(ENGINE), random_tokens(12, 8)
    plain = reference.trace(prompt, greedy, 24)
    for drafts in (1, 2):
        assert reference.speculate(prompt, 24, drafts=drafts).tokens == plain.tokens
    assert tuple(reference.generate(prompt, greedy, 24)) == plain.tokens


# ---------------------------------------------------------------- loading and misuse


def test_only_config_and_tokenizer_are_read(tmp_path: Path) -> None:
    for path in (SHIPPED / "xds-tiny").iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    model = ModelResources(str(tmp_path), "digest")
    tokens = Reference(model.engine()).generate([1, 2, 3], greedy, 8)
    assert tokens == Reference(ENGINE).generate([1, 2, 3], greedy, 8)
    assert model.expert_engine([1]) is model.attention_engine() is model.engine()
    assert not list(tmp_path.glob("*.safetensors"))


def test_other_shapes_of_the_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"n_shared_experts": 0}))
    model = ModelResources(str(tmp_path), "digest")
    engine = model.engine()
    assert engine.args == digest_args(model.args), "made once, it stays"
    assert model.paged_kv(4, 16).block_bytes == 3 * 16 * 16
    tokens = Reference(engine).generate([5, 6, 7], greedy, 12)
    assert all(0 <= token < 96 for token in tokens)


def test_long_contexts_have_room() -> None:
    ids = random_tokens(20_000, 1)
    kv = ENGINE.paged_kv(1300, 16)
    kv.bind(0, list(range(1300)))
    ENGINE.hidden_states(ids[:-1], [Span(0, 0, len(ids) - 1)], kv)
    logits, _ = ENGINE.forward(ids[-1:], [Span(0, len(ids) - 1, 1)], kv)
    whole = ENGINE.hidden_states(ids, [Span(0, 0, len(ids))], ENGINE.contiguous_kv())
    assert logits.tobytes() == ENGINE.logits(whole[-1:]).tobytes()


def test_an_expert_that_is_not_held_is_refused() -> None:
    die = DigestEngine(ARGS, Parts(attention=False, experts={2: {1}}))
    routed = ENGINE.gate(2, ENGINE.embed([4]))
    with pytest.raises(InvariantError, match="expert 3 of layer 2"):
        die.expert_partial(2, routed.rows, routed.topk_idx, routed.topk_weights, [1, 3])
    with pytest.raises(InvariantError, match="no attention"):
        die.attend(0, ENGINE.embed([4]), [Span(0, 0, 1)], ENGINE.contiguous_kv())
    with pytest.raises(InvariantError, match="no expert 17"):
        die.hold_experts(2, [17])
    with pytest.raises(InvariantError, match="no experts for layer 0"):
        die.held_experts(0)
    die.hold_experts(2, [3])
    assert die.held_experts(2) == (1, 3)
    die.release_experts(2, [1, 5])
    assert die.held_experts(2) == (3,)


def test_indices_from_the_wire_that_name_no_expert_are_skipped() -> None:
    rows = ENGINE.gate(1, ENGINE.embed([4])).rows
    foreign = np.array([[-1, 16, 17, 2**31 - 1]], np.int32)
    weights = np.ones((1, 4), np.float32)
    assert ENGINE.expert_partial(1, rows, foreign, weights, range(16)).tolist() == [[0.0]]
