"""The outbox is bounded, ordered, and all or nothing."""

from __future__ import annotations

import asyncio

import pytest

from libs.bus.api import LanePolicy
from libs.bus.outbox import Outbox, Outgoing
from libs.errors import Backpressure

POLICY = LanePolicy(3, 10, 10, 10, 10)


def item(data: bytes) -> Outgoing:
    return Outgoing("t", data)


def test_items_leave_in_the_order_they_came() -> None:
    outbox = Outbox(POLICY)
    outbox.put([item(b"1"), item(b"2")])
    outbox.put([item(b"3")])
    taken = []
    while (head := outbox.head()) is not None:
        taken.append(head)
        outbox.pop()
    assert taken == [item(b"1"), item(b"2"), item(b"3")]
    assert (outbox.messages, outbox.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("first", "second"), [([b""] * 2, [b""] * 2), ([b"123456"], [b"12", b"345"])]
)
def test_what_does_not_fit_is_refused_as_a_whole(first: list[bytes], second: list[bytes]) -> None:
    outbox = Outbox(POLICY)
    outbox.put([item(data) for data in first])
    before = outbox.messages, outbox.bytes
    with pytest.raises(Backpressure) as caught:
        outbox.put([item(data) for data in second])
    assert caught.value.definite
    assert (outbox.messages, outbox.bytes) == before


def test_clearing_counts_what_is_lost_and_cancels_barriers() -> None:
    outbox = Outbox(POLICY)
    loop = asyncio.new_event_loop()
    barrier: asyncio.Future[None] = loop.create_future()
    outbox.put([item(b"12")])
    outbox.put_barrier(barrier)
    assert outbox.clear() == 1
    assert barrier.cancelled()
    assert (outbox.head(), outbox.messages, outbox.bytes) == (None, 0, 0)
    loop.close()
