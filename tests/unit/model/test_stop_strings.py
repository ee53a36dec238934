import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.model.stop_strings import StopFilter

short = st.text(alphabet="ab<", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stop_filter = StopFilter(stops)
    passed = [stop_filter.push(piece) for piece in pieces]
    return [*passed, stop_filter.flush()], stop_filter.matched


def first_stop_character_by_character(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(stop_lists, st.lists(short, max_size=6))
def test_the_result_is_that_of_reading_character_by_character(
    stops: list[str], pieces: list[str]
) -> None:
    passed, matched = run(stops, pieces)
    assert ("".join(passed), matched) == first_stop_character_by_character(stops, "".join(pieces))


def test_a_possible_beginning_is_held_back_until_decided() -> None:
    assert run(["END"], ["so E", "N", "ough EN"]) == (["so ", "", "ENough ", "EN"], False)


def test_a_match_across_pieces_lets_nothing_of_it_through() -> None:
    assert run(["END"], ["so E", "N", "D and more", "more"]) == (["so ", "", "", "", ""], True)


def test_text_is_not_held_back_longer_than_needed() -> None:
    assert run(["\n\n"], ["a\n", "b\n", "c"])[0] == ["a", "\nb", "\nc", ""]


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], False)


def test_an_empty_stop_string_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="empty stop string"):
        StopFilter([""])
