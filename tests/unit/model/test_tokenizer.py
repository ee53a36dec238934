import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import BadInput
from libs.model.tokenizer import ABSENT, IncrementalDetokenizer, Tokenizer
from libs.model.weights import SHIPPED

TOKENIZER = Tokenizer.load()
LIBRARY = tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))

any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
tricky = st.sampled_from(
    ["é", "日本語", "😀", "👩‍👩‍👧", "  \n\t", "<think>", "<｜User｜>", "ﬁ", "\x00", "123"]
)
texts = st.lists(st.text(max_size=12) | tricky, max_size=8).map("".join)


def stream(ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@given(texts)
def test_any_text_survives_the_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.count(text) == len(ids)


@given(texts)
def test_typed_control_strings_never_become_control_tokens(text: str) -> None:
    assert not any(TOKENIZER.is_control(token) for token in TOKENIZER.encode(text))


@pytest.mark.parametrize("string", TOKENIZER.control_strings)
def test_each_control_string_is_text_when_typed_and_control_when_rendered(string: str) -> None:
    typed = TOKENIZER.encode(f"a{string}b")
    assert TOKENIZER.decode(typed) == f"a{string}b"
    rendered = TOKENIZER.encode_rendered(f"a{string}b")
    assert sum(TOKENIZER.is_control(token) for token in rendered) == 1
    assert TOKENIZER.decode(rendered) == "ab"


@given(texts)
def test_rendered_text_is_cut_as_the_tokenizers_library_cuts_it(text: str) -> None:
    assert TOKENIZER.encode_rendered(text) == LIBRARY.encode(text).ids


def test_hidden_characters_keep_control_strings_apart_and_vanish() -> None:
    ids = TOKENIZER.encode_rendered("<#think>x#</think>", hidden="#")
    assert ids == [*TOKENIZER.encode("<think>x"), TOKENIZER.control.think_close]


@given(any_ids)
def test_pieces_of_any_stream_add_up_to_its_decoding(ids: list[int]) -> None:
    assert "".join(stream(ids)) == TOKENIZER.decode(ids)


@given(texts)
def test_a_stream_of_valid_text_never_shows_half_a_character(text: str) -> None:
    pieces = stream(TOKENIZER.encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


def test_an_emoji_appears_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("😀")
    assert len(ids) > 1
    assert stream(ids) == [""] * (len(ids) - 1) + ["😀", ""]


def test_a_control_token_ends_a_character() -> None:
    first, *rest = TOKENIZER.encode("é")
    ids = [first, TOKENIZER.control.think_close, *rest]
    assert stream(ids) == ["", "\ufffd", *(["\ufffd"] * len(rest)), ""]
    assert TOKENIZER.decode(ids).count("\ufffd") == 1 + len(rest)


@given(any_ids)
def test_decoding_agrees_with_the_tokenizers_library(ids: list[int]) -> None:
    ordinary = [token for token in ids if not TOKENIZER.is_control(token)]
    assert TOKENIZER.decode(ordinary) == LIBRARY.decode(ordinary)


def test_special_ids_are_those_of_the_checkpoint() -> None:
    control = TOKENIZER.control
    assert (control.bos, control.eos) == (1, 2)
    assert TOKENIZER.token_text(control.think_open) == "<think>"
    assert TOKENIZER.token_text(control.tool_separator) == "<｜tool▁sep｜>"
    assert TOKENIZER.vocab_size == json.loads((SHIPPED / "config.json").read_text())["vocab_size"]


def test_padding_ids_beyond_the_vocabulary_carry_no_text() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5]) == ""


def test_copies_and_pickles_are_references() -> None:
    assert copy.deepcopy(TOKENIZER) is TOKENIZER
    data = pickle.dumps(TOKENIZER)
    assert pickle.loads(data) is TOKENIZER
    assert len(data) < 1000


def test_a_detokenizer_can_be_pickled_between_the_bytes_of_a_character() -> None:
    first, *rest = TOKENIZER.encode("日")
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.push(first) == ""
    moved = pickle.loads(pickle.dumps(detokenizer))
    assert "".join(map(moved.push, rest)) == "日"


def test_half_a_surrogate_pair_is_refused_by_field() -> None:
    with pytest.raises(BadInput) as caught:
        TOKENIZER.encode("ok \ud83d", field="prompt")
    assert caught.value.field == "prompt"
    assert "character 3" in str(caught.value)


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    layout = json.loads((SHIPPED / "tokenizer.json").read_text())
    folder.joinpath("tokenizer.json").write_text(json.dumps({**layout, **changes}))
    folder.joinpath("tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    return folder


def test_control_tokens_need_no_special_flag(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path,
        added_tokens=[
            {"id": 5, "content": "<think>", "special": False, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False},
            {"id": 2048, "content": "    ", "special": False, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False},
        ],
    )  # fmt: skip
    foreign = Tokenizer.load(folder)
    assert foreign.control.think_open == 5
    assert foreign.control.eos == ABSENT
    assert not any(map(foreign.is_control, foreign.encode("<think>")))
    assert foreign.decode(foreign.encode("x    y")) == "x    y"
    assert foreign.vocab_size == 2049


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"decoder": {"type": "Metaspace"}}, "ByteLevel"),
        ({"model": {"type": "Unigram", "vocab": []}}, "BPE"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "tokenizer.json"),
    ],
)
def test_a_foreign_tokenizer_is_refused_with_its_file(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BadInput, match=problem) as caught:
        Tokenizer.load(write_checkpoint(tmp_path, **changes))
    assert caught.value.field == "tokenizer.json"


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_or_missing_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match=r"tokenizer_config\.json: No such file"):
        Tokenizer.load(tmp_path)
    write_checkpoint(tmp_path).joinpath("tokenizer_config.json").write_text(content)
    with pytest.raises(BadInput, match=r"tokenizer_config\.json: (not JSON|expected)"):
        Tokenizer.load(tmp_path)
