"""Drafts never change an answer; they are exact, useful, and kept true after rejections."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from libs.errors import InvariantError
from libs.model.engine import Engine
from libs.model.kv import Span
from libs.model.mtp import MtpPlace
from libs.model.reference import Drafter, Reference, greedy
from libs.model.weights import load_checkpoint
from tests.unit.model.checkpoints import random_tokens, shipped, write_checkpoint

EXACT = ["int8", "fx"]
CHAT = [1, 3, 387, 281, 362, 4, 5]


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_speculation_gives_the_tokens_and_logit_bits_of_plain_decoding(
    mode: str, drafts: int
) -> None:
    reference = Reference(shipped(mode))
    for prompt in (CHAT, random_tokens(17, seed=1), [77]):
        plain = reference.trace(prompt, greedy, 20, {2})
        drafted = reference.speculate(prompt, 20, {2}, drafts=drafts)
        assert drafted.tokens == plain.tokens
        assert drafted.logits.tobytes() == plain.logits.tobytes()


def test_speculation_saves_steps() -> None:
    reference = Reference(shipped("int8"))
    prompt = random_tokens(8, seed=4)
    plain = reference.trace(prompt, greedy, 60)
    one = reference.speculate(prompt, 60, drafts=1)
    two = reference.speculate(prompt, 60, drafts=2)
    assert plain.steps > one.steps > two.steps
    assert 0 < one.accepted <= one.proposed
    assert two.draft_logits.shape == (two.proposed, 2048)


def test_speculation_follows_any_choice_not_only_the_greedy_one() -> None:
    reference = Reference(shipped("int8"))

    def second_best(logits: np.ndarray, position: int, history: object) -> int:
        return int(np.argsort(-logits, kind="stable")[position % 2])

    prompt = random_tokens(9, seed=2)
    plain = reference.trace(prompt, second_best, 15)
    assert reference.speculate(prompt, 15, drafts=2, choose=second_best).tokens == plain.tokens


@pytest.mark.parametrize("mode", EXACT)
def test_drafts_do_not_depend_on_how_the_prompt_was_cut(mode: str) -> None:
    engine, ids = shipped(mode), random_tokens(30, seed=3)
    _, hidden = engine.forward(ids, [Span(0, 0, 30)], engine.contiguous_kv())
    following = [*ids[1:], 99]
    whole, _ = engine.mtp_forward(0, hidden, following, [Span(0, 0, 30)], engine.contiguous_kv())
    kv, rows = engine.contiguous_kv(), []
    for start in range(0, 30, 7):
        cut = slice(start, min(start + 7, 30))
        span = Span(0, start, cut.stop - start)
        rows.append(engine.mtp_forward(0, hidden[cut], following[cut], [span], kv)[0])
    assert np.concatenate(rows).tobytes() == whole.tobytes()


def test_a_drafter_after_rejections_proposes_what_a_fresh_one_would() -> None:
    """Provisional rows of the second layer must be replaced once the true token is known."""
    engine, ids = shipped("fx"), random_tokens(40, seed=9)
    _, hidden = engine.forward(ids, [Span(0, 0, 40)], engine.contiguous_kv())
    following = [*ids[1:], 50]
    stepwise = Drafter(engine, engine.contiguous_kv(), 2)
    for start, stop in ((0, 20), (20, 21), (21, 23), (23, 40)):
        proposed = stepwise.propose(hidden[start:stop], following[start:stop])
    fresh = Drafter(engine, engine.contiguous_kv(), 2).propose(hidden, following)
    assert proposed[0] == fresh[0]
    assert proposed[1].tobytes() == fresh[1].tobytes()


def test_places_say_which_layer_drafts_and_where_its_rows_lie() -> None:
    engine = shipped("int8")
    assert engine.mtp_place(0) == MtpPlace(6, 0)
    assert engine.mtp_place(1) == MtpPlace(7, 0)
    assert engine.mtp_place(2) == MtpPlace(7, 1)
    assert MtpPlace(7, 1).shift([Span(4, 9, 1)]) == (Span(4, 10, 1),)


def test_one_trained_layer_is_reused_for_the_second_draft(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_checkpoint(tmp_path))
    engine = Engine(checkpoint, "fx")
    assert engine.mtp_place(1) == MtpPlace(3, 1)
    reference, prompt = Reference(engine), random_tokens(12, vocab=96)
    plain = reference.trace(prompt, greedy, 20)
    assert reference.speculate(prompt, 20, drafts=2).logits.tobytes() == plain.logits.tobytes()


def test_the_trained_second_layer_beats_reusing_the_first() -> None:
    shipped_one = load_checkpoint()
    first_only = replace(shipped_one, args=replace(shipped_one.args, num_nextn_predict_layers=1))
    accepted = []
    for engine in (shipped("int8"), Engine(first_only, "int8")):
        reference = Reference(engine)
        runs = [reference.speculate(random_tokens(10, seed=s), 60, drafts=2) for s in range(3)]
        accepted.append(sum(run.accepted for run in runs) / sum(run.steps for run in runs))
    assert accepted[0] > accepted[1]


def test_drafts_may_reach_past_the_last_position(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_position_embeddings=64)
    reference = Reference(Engine(load_checkpoint(folder), "fx"))
    prompt = random_tokens(40, vocab=96)
    plain = reference.trace(prompt, greedy, 24)
    assert reference.speculate(prompt, 24, drafts=2).tokens == plain.tokens


def test_a_model_without_mtp_layers_cannot_draft(tmp_path: Path) -> None:
    engine = Engine(load_checkpoint(write_checkpoint(tmp_path, num_nextn_predict_layers=0)), "fx")
    with pytest.raises(InvariantError, match="no MTP layer"):
        engine.mtp_place(0)
