"""Errors that travel as replies, and bounded bookkeeping of probes."""

from __future__ import annotations

import pytest

from libs.bus.requests import (
    ERROR_TEXT_BYTES,
    PROBES_MAX,
    PendingRequests,
    read_error,
    write_error,
)
from libs.errors import (
    Backpressure,
    DeadlineExceeded,
    LocalProtocolError,
    OperatingError,
    StaleEpoch,
)


@pytest.mark.parametrize(
    "error",
    [
        StaleEpoch("old"),
        Backpressure("full"),
        DeadlineExceeded("late"),
        StaleEpoch("?", definite=False),
    ],
)
def test_an_operating_error_survives_the_trip(error: OperatingError) -> None:
    read = read_error(*write_error(error))
    assert (type(read), read.message, read.definite) == (type(error), error.message, error.definite)


def test_the_text_of_a_bug_does_not_leave_the_process() -> None:
    read = read_error(*write_error(RuntimeError("prompt: my secret")))
    assert str(read) == "internal: handler raised RuntimeError"
    assert not read.definite


def test_a_protocol_error_is_the_askers_mistake() -> None:
    assert read_error(*write_error(LocalProtocolError("x"))).code == "bad_input"


def test_a_long_text_is_cut() -> None:
    assert len(write_error(StaleEpoch("é" * 5000))[0]) <= ERROR_TEXT_BYTES


def test_probes_expire_and_never_pile_up() -> None:
    pending = PendingRequests("_INBOX.x")
    replies = [pending.open_probe(lambda: None, float(index)) for index in range(PROBES_MAX + 10)]
    assert len(set(replies)) == PROBES_MAX + 10
    assert len(pending._probes) == PROBES_MAX
    pending.expire(1e9)
    assert len(pending._probes) == 0


def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    pending = PendingRequests("_INBOX.x")
    pending.resolve("_INBOX.x.7", b"late", {})
    assert len(pending) == 0
