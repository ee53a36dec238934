"""Matching by the rules of NATS, checked against a second, naive statement of them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.bus.subjects_match import SubjectRouter, check_pattern, check_subject
from libs.errors import BadInput

tokens = st.sampled_from(["a", "b", "c"])
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join)
patterns = st.lists(tokens | st.just("*"), min_size=1, max_size=4).map(".".join) | st.lists(
    tokens | st.just("*"), max_size=3
).map(lambda head: ".".join([*head, ">"]))


def naive(pattern: str, subject: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(expression, subject) is not None


@settings(max_examples=300, deadline=None)
@given(st.lists(patterns, max_size=12), subjects)
def test_a_subject_reaches_exactly_the_patterns_that_match(listed: list[str], subject: str) -> None:
    router: SubjectRouter[int] = SubjectRouter()
    for index, pattern in enumerate(listed):
        router.add(pattern, index)
    assert router.match(subject) == [
        index for index, pattern in enumerate(listed) if naive(pattern, subject)
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(patterns, min_size=1, max_size=8), subjects, st.data())
def test_a_removed_subscription_matches_no_more(
    listed: list[str], subject: str, data: st.DataObject
) -> None:
    router: SubjectRouter[int] = SubjectRouter()
    handles = [router.add(pattern, index) for index, pattern in enumerate(listed)]
    router.match(subject)
    gone = data.draw(st.integers(0, len(listed) - 1))
    router.remove(handles[gone])
    router.remove(handles[gone])
    assert router.match(subject) == [
        index for index, pattern in enumerate(listed) if index != gone and naive(pattern, subject)
    ]


def test_a_queue_group_gets_one_copy_and_every_member_its_share() -> None:
    router: SubjectRouter[str] = SubjectRouter(seed=3)
    router.add("t", "plain")
    for member in ("a", "b", "c"):
        router.add("t", member, "workers")
    router.add(">", "lonely", "others")
    matches = [router.match("t") for _ in range(300)]
    assert all(match[0] == "plain" and match[2] == "lonely" for match in matches)
    shares = [sum(match[1] == member for match in matches) for member in ("a", "b", "c")]
    assert all(share > 60 for share in shares)


def test_the_same_seed_draws_the_same_members() -> None:
    def draws(seed: int) -> list[list[int]]:
        router: SubjectRouter[int] = SubjectRouter(seed)
        for member in range(5):
            router.add("t", member, "q")
        return [router.match("t") for _ in range(50)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_many_different_subjects_do_not_grow_the_memory_of_matches() -> None:
    router: SubjectRouter[int] = SubjectRouter()
    router.add("t.*", 1)
    for index in range(10_000):
        assert router.match(f"t.{index}") == [1]
    assert len(router._cache) <= 4096


@pytest.mark.parametrize("subject", ["a", "a.b-c_d.E9", "_INBOX.x", "$SYS.x", "x" * 255])
def test_ordinary_subjects_pass(subject: str) -> None:
    check_subject(subject)
    check_pattern(subject)


@pytest.mark.parametrize(
    "subject",
    ["", ".", "a.", ".a", "a..b", "a b", "a\tb", "a\r\nb", "a\x00", "*", "a.>", "x" * 256],
)
def test_malformed_subjects_are_bad_input(subject: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_subject(subject)
    assert caught.value.field == "subject"


@pytest.mark.parametrize("pattern", ["*", ">", "a.*", "a.*.b", "*.>", "a.>"])
def test_wildcard_patterns_pass(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["", ">.a", "a.>.b", "a*", "a.b>", "*a", "a.>>", "a..>"])
def test_malformed_patterns_are_bad_input(pattern: str) -> None:
    with pytest.raises(BadInput, match="malformed pattern"):
        SubjectRouter[int]().add(pattern, 1)


@pytest.mark.parametrize("queue", ["a b", "a.b", "*"])
def test_malformed_queue_groups_are_bad_input(queue: str) -> None:
    with pytest.raises(BadInput) as caught:
        SubjectRouter[int]().add("t", 1, queue)
    assert caught.value.field == "queue"
