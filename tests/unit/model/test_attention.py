"""Rotary tables, tiling, and attention over batches of spans."""

import math

import numpy as np
import pytest

from libs.model.args import ModelArgs
from libs.model.attention import TILE_SCORES, plan_tiles
from libs.model.kv import Span
from libs.model.rope import Rope, inverse_frequencies, sine_cosine, softmax_scale, yarn_mscale
from tests.unit.model.checkpoints import TINY, YARN, random_tokens, shipped

PLAIN = ModelArgs.from_config(TINY)
STRETCHED = ModelArgs.from_config(TINY | {"rope_scaling": YARN})


def test_sine_and_cosine_agree_with_the_library_far_out() -> None:
    angles = np.concatenate([np.linspace(-10, 10, 997), np.linspace(0, 200_000, 9973)])
    sine, cosine = sine_cosine(angles)
    assert max(abs(s - math.sin(a)) for s, a in zip(sine, angles, strict=True)) < 1e-11
    assert max(abs(c - math.cos(a)) for c, a in zip(cosine, angles, strict=True)) < 1e-11


def test_frequencies_are_powers_of_theta() -> None:
    wanted = [10000.0 ** (-2 * i / 8) for i in range(4)]
    np.testing.assert_allclose(inverse_frequencies(PLAIN), wanted, rtol=1e-7)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain, stretched = inverse_frequencies(PLAIN), inverse_frequencies(STRETCHED)
    assert stretched[0] == plain[0]
    assert stretched[-1] == np.float32(plain[-1] / 8)
    assert softmax_scale(STRETCHED) == pytest.approx(24**-0.5 * yarn_mscale(8, 0.5) ** 2)


def test_rotation_depends_on_distance_only() -> None:
    rope = Rope(PLAIN, 64)
    pair = np.random.default_rng(0).standard_normal((2, 1, 8)).astype(np.float32)
    near = rope.rotate(pair, np.array([3, 10]))
    far = rope.rotate(pair, np.array([40, 47]))
    assert np.vdot(near[0], near[1]) == pytest.approx(np.vdot(far[0], far[1]), abs=1e-5)


def test_a_position_beyond_the_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="rotary table"):
        Rope(PLAIN, 4).rotate(np.zeros((1, 1, 8), np.float32), np.array([4]))


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 0, 1)],
        [Span(i, 7 * i, 1) for i in range(40)],
        [Span(0, 0, 900), Span(1, 3, 2), Span(2, 50, 1), Span(3, 1900, 3)],
        [Span(i, 1000, 64) for i in range(5)],
    ],
)
def test_tiles_cover_each_query_once_and_stay_small(spans: list[Span]) -> None:
    seen = []
    for tile in plan_tiles(spans, heads=4):
        rows = max(tile.limits) + tile.queries - 1
        scores = len(tile.spans) * tile.queries * 4 * rows
        assert scores <= TILE_SCORES or len(tile.spans) == tile.queries == 1
        for first, limit in zip(tile.first_rows, tile.limits, strict=True):
            seen += [(first + i, limit + i) for i in range(tile.queries)]
    wanted: list[tuple[int, int]] = []
    for span in spans:
        first = len(wanted)
        wanted += [(first + i, span.start + 1 + i) for i in range(span.length)]
    assert sorted(seen) == wanted


def test_tiles_do_not_pad_a_short_sequence_to_a_long_one() -> None:
    tiles = list(plan_tiles([Span(0, 9, 1), Span(1, 999, 1), Span(2, 11, 1)], heads=1))
    assert [tile.spans for tile in tiles] == [(0, 2), (1,)]


@pytest.mark.parametrize("mode", ["int8", "fx"])
def test_a_mixed_batch_gives_each_sequence_the_bits_of_being_alone(mode: str) -> None:
    engine = shipped(mode)
    spans = [Span(0, 0, 30), Span(1, 0, 1), Span(2, 0, 3), Span(3, 0, 200)]
    x = engine.embed(random_tokens(sum(span.length for span in spans)))
    together = engine.attend(0, x, spans, engine.contiguous_kv())
    first = 0
    for span in spans:
        rows = slice(first, first + span.length)
        alone = engine.attend(0, x[rows], [span], engine.contiguous_kv())
        assert together[rows].tobytes() == alone.tobytes()
        first += span.length


def test_later_tokens_do_not_reach_earlier_rows() -> None:
    engine = shipped("int8")
    x = engine.embed(random_tokens(40))
    whole = engine.attend(2, x, [Span(0, 0, 40)], engine.contiguous_kv())
    prefix = engine.attend(2, x[:25], [Span(0, 0, 25)], engine.contiguous_kv())
    assert whole[:25].tobytes() == prefix.tobytes()


def test_rewriting_rows_undoes_a_rejected_draft() -> None:
    engine = shipped("int8")
    x = engine.embed(random_tokens(12))
    kv = engine.contiguous_kv()
    engine.attend(0, x[:10], [Span(0, 0, 10)], kv)
    straight = engine.attend(0, x[10:11], [Span(0, 10, 1)], kv)
    engine.attend(0, x[11:12], [Span(0, 10, 1)], kv)  # another token at the same position
    assert engine.attend(0, x[10:11], [Span(0, 10, 1)], kv).tobytes() == straight.tobytes()
