"""Conversations whose prompts begin alike, as a function of their seed."""

from __future__ import annotations

from itertools import pairwise

from libs.model.resources import ModelResources
from libs.workload.chats import TENANTS, TURNS_MAX, make_chats
from libs.workload.requests import prompt_of, spec_of


def test_the_same_seed_gives_the_same_chats_and_another_seed_others() -> None:
    assert make_chats(3, 30) == make_chats(3, 30)
    assert make_chats(3, 30) != make_chats(4, 30)
    assert make_chats(3, 30)[:10] == make_chats(3, 10)


def test_tenants_ask_the_very_same_under_different_salts() -> None:
    chats = make_chats(1, 200)
    asked = {(chat.cache_salt, chat.earlier, chat.text) for chat in chats}
    assert {salt for salt, _, _ in asked} == set(TENANTS)
    first = {question for salt, question in map(flat, asked) if salt == TENANTS[0]}
    second = {question for salt, question in map(flat, asked) if salt == TENANTS[1]}
    assert first & second


def flat(asked: tuple[str, object, str]) -> tuple[str, str]:
    salt, earlier, text = asked
    return salt, f"{earlier} {text}"


def test_a_later_turn_repeats_everything_before_it() -> None:
    chats = make_chats(1, 200)
    assert all(a.arrive_ns <= b.arrive_ns for a, b in pairwise(chats))
    assert {len(chat.earlier) for chat in chats} == {1 + 2 * turn for turn in range(TURNS_MAX)}
    system = {chat.earlier[0] for chat in chats}
    assert len(system) == 1, "one system prompt for all"
    openings = {chat.earlier[:3] for chat in chats if len(chat.earlier) > 1}
    assert len(openings) < sum(len(chat.earlier) > 1 for chat in chats) / 3


def test_prompts_share_their_beginning_as_tokens_and_carry_their_salt() -> None:
    model = ModelResources("xds-tiny")
    late = max(make_chats(1, 60), key=lambda chat: len(chat.earlier))
    early = next(c for c in make_chats(1, 60) if c.text == late.earlier[1][1])
    long, _ = prompt_of(late, model.tokenizer, model.template)
    short, _ = prompt_of(early, model.tokenizer, model.template)
    shared = next(i for i, (a, b) in enumerate(zip(long, short, strict=False)) if a != b)
    assert shared > 32, "at least two blocks: the system prompt"
    assert spec_of(late, "r", 0, model).cache_salt == late.cache_salt
