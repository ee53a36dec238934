"""The judge must see every kind of difference, or a green verdict means nothing."""

from __future__ import annotations

import pytest

from libs.model.output_parser import ToolCallPiece
from libs.workload.expected import Answer
from libs.workload.verdict import Seen, Verdict, joined_calls

EXPECTED = Answer((5, 6, 7), "abc", "why", (), "stop")


def perfect() -> Seen:
    return Seen([0, 1, 2], [5, 6, 7], "abc", "why", [], "stop")


def judged(seen: Seen, expected: Answer = EXPECTED) -> Verdict:
    verdict = Verdict()
    verdict.add("request", seen, expected)
    return verdict


def test_a_perfect_answer_is_ok() -> None:
    verdict = judged(perfect())
    assert verdict.ok
    assert (verdict.completed, verdict.tokens) == (1, 3)


def test_a_wrong_token_is_a_mismatch() -> None:
    seen = perfect()
    seen.tokens[1] = 9
    assert judged(seen).mismatched == 1


def test_a_missing_token_is_lost() -> None:
    seen = perfect()
    del seen.indices[1], seen.tokens[1]
    verdict = judged(seen)
    assert (verdict.lost, verdict.ok) == (1, False)


def test_a_repeated_token_is_a_duplicate() -> None:
    seen = perfect()
    seen.indices.append(2)
    seen.tokens.append(7)
    verdict = judged(seen)
    assert (verdict.duplicated, verdict.ok) == (1, False)


def test_a_surplus_token_is_a_mismatch() -> None:
    seen = perfect()
    seen.indices.append(3)
    seen.tokens.append(8)
    assert judged(seen).mismatched == 1


def test_a_request_that_never_ends_is_noticed() -> None:
    seen = perfect()
    seen.ended = None
    verdict = judged(seen)
    assert (verdict.unended, verdict.ok) == (1, False)


def test_a_failed_request_is_not_ok_and_claims_only_what_it_was_shown() -> None:
    seen = Seen([0], [5], ended="failed: peer_lost: gone")
    verdict = judged(seen)
    assert (verdict.failed, verdict.lost, verdict.ok) == (1, 0, False)


def test_a_client_that_left_must_still_have_seen_the_right_prefix() -> None:
    left = Seen([0, 1], [5, 6], left=True)
    assert judged(left).ok
    assert judged(left).cancelled == 1
    wrong = Seen([0, 1], [5, 9], left=True)
    assert judged(wrong).mismatched == 1
    gap = Seen([0, 2], [5, 7], left=True)
    assert judged(gap).lost == 1


@pytest.mark.parametrize("what", ["content", "reasoning"])
def test_different_text_over_equal_tokens_is_a_mismatch(what: str) -> None:
    seen = perfect()
    setattr(seen, what, "other")
    assert judged(seen).mismatched == 1


def test_another_finish_reason_is_a_mismatch() -> None:
    seen = perfect()
    seen.ended = "length"
    assert judged(seen).mismatched == 1


def test_tool_calls_compare_by_name_and_arguments_however_they_were_cut() -> None:
    whole = [ToolCallPiece(0, "call_1", "f", '{"a": 1}')]
    cut = [ToolCallPiece(0, "call_2", "f", ""), ToolCallPiece(0, None, None, '{"a": 1}')]
    assert joined_calls(whole) == joined_calls(cut) == [("f", '{"a": 1}')]
