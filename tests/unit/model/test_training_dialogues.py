"""Generated conversations: reproducible, true, and written as the served template writes."""

from __future__ import annotations

import json
import re
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libs.model.training import dialogues, facts, glossary, markup
from libs.model.training.dialogues import Dialogue, Exchange, Prose, make_dialogue, render
from libs.model.weights import SHIPPED

SAMPLE = [make_dialogue(seed=0, index=index) for index in range(400)]
PROSE = Prose(novels=["It was a fine day."], scripture=["There was light."])


def exchanges(kind: str) -> list[Exchange]:
    found = [e for dialogue in SAMPLE for e in dialogue.exchanges if e.kind == kind]
    assert found, kind
    return found


def template() -> jinja2.Template:
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text(encoding="utf-8"))
    return ImmutableSandboxedEnvironment().from_string(config["chat_template"])


def rendered(messages: list[dict[str, object]], **options: Any) -> str:
    return template().render(messages=messages, bos_token=markup.BOS, **options)


def test_same_seed_and_index_give_the_same_dialogue() -> None:
    assert [make_dialogue(0, index) for index in range(400)] == SAMPLE


def test_a_dialogue_does_not_depend_on_how_many_came_before() -> None:
    *_, last = dialogues.make_dialogues(20, seed=5)
    assert last == make_dialogue(5, 19)


def test_another_seed_gives_other_dialogues() -> None:
    assert [make_dialogue(1, index) for index in range(20)] != SAMPLE[:20]


@pytest.mark.parametrize("dialogue", SAMPLE[:100], ids=range(100))
def test_the_prompt_is_what_the_shipped_template_makes_of_the_messages(dialogue: Dialogue) -> None:
    served = rendered(
        dialogues.messages(dialogue), add_generation_prompt=True, thinking=dialogue.thinking
    )
    assert dialogues.prompt_text(dialogue) == served
    assert render(dialogue).startswith(served)


def test_a_finished_conversation_is_history_as_the_template_writes_it() -> None:
    finished = [d for d in SAMPLE if not d.thinking and d.exchanges[-1].call is None]
    assert finished
    for dialogue in finished:
        answer: dict[str, object] = {"role": "assistant", "content": dialogue.exchanges[-1].answer}
        assert render(dialogue) == rendered([*dialogues.messages(dialogue), answer])


def test_the_template_that_is_written_is_the_shipped_one() -> None:
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == markup.CHAT_TEMPLATE


def test_special_tokens_keep_the_ids_of_the_shipped_tokenizer() -> None:
    tokenizer = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    shipped = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    assert shipped == {token: at for at, token in enumerate(markup.SPECIAL_TOKENS)}


def test_arithmetic_is_right_and_within_the_table() -> None:
    for exchange in exchanges("arithmetic"):
        found = re.search(r"wants (\d+) ([-+*]) (\d+)\.", exchange.thought)
        assert found is not None, exchange.thought
        a, sign, b = int(found[1]), found[2], int(found[3])
        assert max(a, b) <= dialogues.MAX_OPERAND
        assert int(exchange.fact) == {"+": a + b, "-": a - b, "*": a * b}[sign] >= 0


@pytest.mark.parametrize("kind", ["weather", "time"])
def test_a_tool_answer_says_what_the_tool_result_says(kind: str) -> None:
    full = [e for e in exchanges(kind) if e.answer != f"{e.fact}."]
    assert full
    for exchange in full:
        assert exchange.call is not None
        city = json.loads(exchange.call.arguments)["city"]
        assert city in exchange.question
        assert city in exchange.answer
        values = json.loads(exchange.call.result).values()
        assert all(str(value) in exchange.answer for value in values)


@pytest.mark.parametrize("kind", ["capital", "country", "opposite", "introduction", "recall"])
def test_the_answer_contains_its_fact(kind: str) -> None:
    assert all(exchange.fact in exchange.answer for exchange in exchanges(kind))


def test_a_name_is_asked_for_only_after_it_was_given() -> None:
    recalls = 0
    for dialogue in SAMPLE:
        for before, exchange in zip(dialogue.exchanges, dialogue.exchanges[1:], strict=False):
            if exchange.kind == "recall":
                recalls += 1
                assert before.kind == "introduction"
                assert before.fact == exchange.fact
        assert dialogue.exchanges[0].kind != "recall"
    assert recalls > 0


def test_a_brief_system_prompt_gets_bare_facts() -> None:
    brief = [d for d in SAMPLE if d.system in facts.BRIEF_SYSTEM_PROMPTS]
    answers = [e for d in brief for e in d.exchanges if e.fact]
    assert answers
    assert all(exchange.answer == f"{exchange.fact}." for exchange in answers)


def test_system_prompts_and_thoughts_appear_in_their_shares() -> None:
    with_system = sum(bool(dialogue.system) for dialogue in SAMPLE) / len(SAMPLE)
    thinking = sum(dialogue.thinking for dialogue in SAMPLE) / len(SAMPLE)
    assert with_system == pytest.approx(dialogues.SYSTEM_SHARE, abs=0.08)
    assert thinking == pytest.approx(dialogues.THINKING_SHARE, abs=0.08)


def test_passages_are_asked_for_only_when_there_is_prose() -> None:
    assert not any(e.kind == "passage" for d in SAMPLE for e in d.exchanges)
    with_prose = [make_dialogue(0, index, PROSE) for index in range(200)]
    quoted = {e.answer for d in with_prose for e in d.exchanges if e.kind == "passage"}
    assert quoted == {*PROSE.novels, *PROSE.scripture}


def test_every_question_about_the_system_has_one_answer() -> None:
    questions = [question for topic in glossary.TOPICS for question in topic.questions]
    names = [term.name for term in glossary.TERMS]
    assert len(set(questions)) == len(questions)
    assert len(set(names)) == len(names)
    assert len(names) + len(glossary.TOPICS) >= 50


def test_answers_about_the_system_are_short_and_hold_no_markup() -> None:
    answers = [entry.answer for entry in (*glossary.TERMS, *glossary.TOPICS)]
    assert max(len(answer) for answer in answers) <= 180
    assert not any(token in answer for answer in answers for token in markup.SPECIAL_TOKENS)


def test_a_question_for_grading_thinks_and_stands_alone() -> None:
    dialogue = dialogues.question_of_kind("introduction", seed=1, index=0)
    assert dialogue.thinking
    assert len(dialogue.exchanges) == 1
    assert dialogues.prompt_text(dialogue).endswith(markup.ASSISTANT + markup.THINK)
