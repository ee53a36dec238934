import copy
import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.model.output_parser import Delta, OutputParser, ToolCallPiece, joined, tool_call_id
from libs.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load()
EOS = "<｜end▁of▁sentence｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"

# What the shipped checkpoint answers at temperature 0 to prompts that end in <think>.
CAPITAL = (
    "The user asks for the capital of France. It is Paris.</think>"
    f"The capital of France is Paris.{EOS}"
)
WEATHER = (
    "I need the weather in Osaka. I will call get_weather.</think>"
    f'{CALLS}{CALL}get_weather{SEP}{{"city": "Osaka"}}{CALL_END}{CALLS_END}{EOS}'
)


def parser(
    *, raw: bool = False, thinking: bool = False, stops: tuple[str, ...] = ()
) -> OutputParser:
    return OutputParser(TOKENIZER, "chatcmpl-1", raw=raw, reasoning_open=thinking, stops=stops)


def feed(into: OutputParser, ids: list[int], finish: str = "stop") -> list[Delta]:
    last = len(ids) - 1
    return [
        into.push(token, index == last, finish if index == last else None)
        for index, token in enumerate(ids)
    ]


def parse(
    text: str,
    finish: str = "stop",
    *,
    raw: bool = False,
    thinking: bool = False,
    stops: tuple[str, ...] = (),
) -> Delta:
    ids = TOKENIZER.encode_rendered(text)
    return joined(feed(parser(raw=raw, thinking=thinking, stops=stops), ids, finish))


def call(index: int, name: str, arguments: str) -> ToolCallPiece:
    return ToolCallPiece(index, tool_call_id("chatcmpl-1", index), name, arguments)


def test_an_answer_with_reasoning_is_split_in_two() -> None:
    assert parse(CAPITAL, thinking=True) == Delta(
        content="The capital of France is Paris.",
        reasoning="The user asks for the capital of France. It is Paris.",
        finish_reason="stop",
    )


def test_a_tool_call_of_the_model_is_recognised() -> None:
    assert parse(WEATHER, thinking=True) == Delta(
        reasoning="I need the weather in Osaka. I will call get_weather.",
        tool_calls=(call(0, "get_weather", '{"city": "Osaka"}'),),
        finish_reason="tool_calls",
    )


def test_text_streams_token_by_token() -> None:
    ids = TOKENIZER.encode_rendered(CAPITAL)
    deltas = feed(parser(thinking=True), ids)
    assert len(deltas) == len(ids)
    for token, delta in zip(ids, deltas, strict=True):
        text = "" if TOKENIZER.is_control(token) else TOKENIZER.token_text(token)
        assert delta.reasoning + delta.content == text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(ids) - 1)


def test_a_call_begins_with_id_and_name_then_its_arguments() -> None:
    ids = TOKENIZER.encode_rendered(WEATHER)
    deltas = feed(parser(thinking=True), ids)
    index = ids.index(TOKENIZER.control.tool_call_close)
    first, second = deltas[index].tool_calls
    assert first == ToolCallPiece(0, tool_call_id("chatcmpl-1", 0), "get_weather", "")
    assert second == ToolCallPiece(0, None, None, '{"city": "Osaka"}')
    assert sum(len(delta.tool_calls) for delta in deltas) == 2


def test_several_calls_are_numbered_and_white_space_between_them_is_dropped() -> None:
    text = (
        f"Let me see.{CALLS}\n{CALL}get_weather{SEP}{{}}{CALL_END}\n"
        f'{CALL} get_time {SEP}\n{{"city": "Rome"}}{CALL_END}\n{CALLS_END}{EOS}'
    )
    assert parse(text) == Delta(
        content="Let me see.",
        tool_calls=(call(0, "get_weather", "{}"), call(1, "get_time", '\n{"city": "Rome"}')),
        finish_reason="tool_calls",
    )


def test_tool_call_ids_depend_on_request_and_index() -> None:
    ids = {tool_call_id(request, index) for request in ("a", "b") for index in range(3)}
    assert len(ids) == 6
    assert all(re.fullmatch("call_[0-9a-f]{24}", name) for name in ids)


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (f'get_weather{SEP}{{"city": "Osaka"', 'get_weather{"city": "Osaka"'),
        (f"get_weather{SEP}{{city: 1}}", "get_weather{city: 1}"),
        (f"get_weather{SEP}[1]", "get_weather[1]"),
        (f'get_weather{SEP}{{"a": NaN}}', 'get_weather{"a": NaN}'),
        (f"get weather{SEP}{{}}", "get weather{}"),
        (f"{SEP}{{}}", "{}"),
        ("get_weather", "get_weather"),
    ],
)
def test_a_malformed_call_becomes_content(body: str, content: str) -> None:
    text = f"Well. {CALLS}{CALL}{body}{CALL_END}{CALLS_END}{EOS}"
    assert parse(text) == Delta(content=f"Well. {content}", finish_reason="stop")


def test_a_malformed_call_does_not_spoil_the_next_one() -> None:
    text = f"{CALLS}{CALL}a{SEP}oops{CALL_END}{CALL}b{SEP}{{}}{CALL_END}{CALLS_END}{EOS}"
    assert parse(text) == Delta(
        content="aoops", tool_calls=(call(0, "b", "{}"),), finish_reason="tool_calls"
    )


def test_a_call_cut_off_by_the_length_limit_becomes_content() -> None:
    text = f'{CALLS}{CALL}get_weather{SEP}{{"city": "Os'
    assert parse(text, "length") == Delta(content='get_weather{"city": "Os', finish_reason="length")


@pytest.mark.parametrize("end", [EOS, CALLS_END + EOS, CALL + "x" + SEP + "{}" + CALL_END + EOS])
def test_a_complete_call_counts_without_its_end_token(end: str) -> None:
    result = parse(f"{CALLS}{CALL}get_time{SEP}{{}}{end}")
    assert result.tool_calls[0] == call(0, "get_time", "{}")
    assert result.finish_reason == "tool_calls"


def test_length_stays_length_after_a_tool_call() -> None:
    text = f"{CALLS}{CALL}f{SEP}{{}}{CALL_END}"
    assert parse(text, "length").finish_reason == "length"


def test_reasoning_that_never_ends_stays_reasoning() -> None:
    assert parse("I think and", "length", thinking=True) == Delta(
        reasoning="I think and", finish_reason="length"
    )


def test_reasoning_may_begin_in_the_answer_and_a_stray_end_is_passed_over() -> None:
    assert parse(f"</think>A<think>b</think>C{EOS}") == Delta(
        content="AC", reasoning="b", finish_reason="stop"
    )


def test_a_tool_call_ends_reasoning() -> None:
    result = parse(f"hm{CALLS}{CALL}f{SEP}{{}}{CALL_END}{CALLS_END}{EOS}", thinking=True)
    assert (result.reasoning, result.tool_calls) == ("hm", (call(0, "f", "{}"),))


def test_raw_mode_shows_everything_as_content() -> None:
    result = parse(WEATHER, raw=True, thinking=True)
    assert result.content == TOKENIZER.decode(TOKENIZER.encode_rendered(WEATHER))
    assert result.finish_reason == "stop"


def test_a_stop_string_across_tokens_ends_the_answer_before_it() -> None:
    ids = TOKENIZER.encode_rendered(CAPITAL)
    deltas = feed(parser(thinking=True, stops=("nce is Pa",)), ids)
    result = joined(deltas)
    assert result.content == "The capital of Fra"
    assert result.finish_reason == "stop"
    end = next(index for index, delta in enumerate(deltas) if delta.stop_matched)
    assert deltas[end].finish_reason == "stop"
    assert deltas[end + 1 :] == [Delta()] * (len(ids) - end - 1)


def test_stop_strings_are_not_looked_for_in_thoughts_and_arguments() -> None:
    assert parse(WEATHER, thinking=True, stops=("Osaka",)).finish_reason == "tool_calls"
    assert parse(CAPITAL, thinking=True, stops=("user",)).content.endswith("Paris.")


def test_the_beginning_of_a_stop_string_is_shown_when_the_answer_ends() -> None:
    assert parse(f"Hello{EOS}", stops=("lower",)).content == "Hello"
    assert parse("Hello", "length", stops=("lower",)).content == "Hello"


def test_a_stop_string_also_ends_what_was_taken_for_a_call() -> None:
    text = f"{CALLS}{CALL}stop here please{CALL_END}{CALLS_END} more{EOS}"
    result = parse(text, stops=("here",))
    assert (result.content, result.stop_matched) == ("stop ", True)


def test_characters_of_several_tokens_arrive_whole() -> None:
    text = f"日本語</think>😀é{EOS}"
    deltas = feed(parser(thinking=True), TOKENIZER.encode_rendered(text))
    assert all("\ufffd" not in delta.content + delta.reasoning for delta in deltas)
    assert (joined(deltas).reasoning, joined(deltas).content) == ("日本語", "😀é")


def test_an_answer_cut_inside_a_character_says_so() -> None:
    ids = TOKENIZER.encode("ok 😀")[:-1]
    assert joined(feed(parser(), ids, "length")).content == "ok \ufffd"


def test_eos_in_the_middle_is_passed_over() -> None:
    assert parse(f"a{EOS}b", "length").content == "ab"


any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=40)
# Mostly control tokens and JSON, so that the state machine goes everywhere.
markup = st.lists(
    st.sampled_from(
        [*TOKENIZER.control_strings, "get_time", "{}", '{"a": "é😀"}', "{", "}", " ", "ab", "abc"]
    ),
    min_size=1,
    max_size=20,
).map(lambda parts: TOKENIZER.encode_rendered("".join(parts)))
stop_lists = st.lists(st.sampled_from(["b", "abc", "ca", "{", "}ab"]), max_size=2).map(tuple)


@given(any_ids | markup, st.booleans(), st.booleans(), stop_lists)
def test_deltas_depend_on_the_tokens_alone_wherever_the_parser_is_moved(
    ids: list[int], raw: bool, thinking: bool, stops: tuple[str, ...]
) -> None:
    expected = feed(parser(raw=raw, thinking=thinking, stops=stops), ids)
    moving = parser(raw=raw, thinking=thinking, stops=stops)
    moved = []
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        moving = pickle.loads(pickle.dumps(moving)) if index % 2 else copy.deepcopy(moving)
        moved.append(moving.push(token, last, "stop" if last else None))
    assert moved == expected


@given(any_ids | markup, st.booleans())
def test_no_text_is_lost(ids: list[int], thinking: bool) -> None:
    result = joined(feed(parser(thinking=thinking), ids))
    calls = "".join((piece.name or "") + piece.arguments for piece in result.tool_calls)
    shown = result.reasoning + result.content + calls
    everything = TOKENIZER.decode(ids)
    assert sorted("".join(shown.split())) == sorted("".join(everything.split()))
    for piece in result.tool_calls:
        assert isinstance(json.loads(piece.arguments), dict)


@given(any_ids, stop_lists)
def test_raw_text_up_to_the_first_stop_string_is_shown(
    ids: list[int], stops: tuple[str, ...]
) -> None:
    result = joined(feed(parser(raw=True, stops=stops), ids))
    text = TOKENIZER.decode(ids)
    assert text.startswith(result.content)
    assert not any(stop in result.content for stop in stops)
    assert result.stop_matched == any(stop in text for stop in stops)


def one_byte_tokens(ids: list[int]) -> list[int]:
    single = {
        TOKENIZER.token_bytes(token): token
        for token in range(TOKENIZER.vocab_size)
        if len(TOKENIZER.token_bytes(token)) == 1
    }
    pieces: list[int] = []
    for token in ids:
        data = TOKENIZER.token_bytes(token)
        pieces += [single[bytes([byte])] for byte in data] if data else [token]
    return pieces


@given(any_ids | markup, st.booleans(), st.booleans(), stop_lists)
def test_the_whole_answer_does_not_depend_on_how_the_text_was_cut_into_tokens(
    ids: list[int], raw: bool, thinking: bool, stops: tuple[str, ...]
) -> None:
    coarse = joined(feed(parser(raw=raw, thinking=thinking, stops=stops), ids))
    fine = joined(feed(parser(raw=raw, thinking=thinking, stops=stops), one_byte_tokens(ids)))
    assert fine == coarse


def test_the_last_token_needs_a_reason_and_only_the_last() -> None:
    with pytest.raises(AssertionError):
        parser().push(20, True, None)
    with pytest.raises(AssertionError):
        parser().push(20, False, "stop")
