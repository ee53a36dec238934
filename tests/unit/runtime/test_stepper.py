from __future__ import annotations

import numpy as np
import pytest

from libs.actor import Effect, Event, Received, Send, SetTimer, Started, TimerFired
from libs.errors import InvariantError
from libs.runtime import story as module
from libs.runtime.stepper import Stepper
from libs.runtime.story import Story, ids_of, summary_of
from libs.wire.request import Cancel
from libs.wire.tokens import StreamChunks, TokenRow, TokensCommitted
from libs.wire.transfer import ReceiveDone
from libs.wire.xccl import XcclWrite
from tests.support.cores import ScriptCore
from tests.support.requests import assign_prefill


def received(request_id: str, at_ns: int = 0) -> Received:
    return Received(at_ns, Cancel(request_id, "left"), "peer", 1, 1)


def test_time_never_goes_back_for_a_core() -> None:
    core = ScriptCore("echo.0")
    stepper = Stepper(core, validate=True)
    for at_ns in (50, 20, 80):
        stepper.step(TimerFired(at_ns, "tick"))
    assert [now for now, _ in core.seen] == [50, 50, 80]
    assert [event.at_ns for _, event in core.seen] == [50, 20, 80], "the event's own stamp stays"


def fail_on(request_id: str) -> ScriptCore:
    def react(event: Event) -> list[Effect]:
        if isinstance(event, Received) and event.message.request_id == request_id:
            raise KeyError("nothing here")
        return [SetTimer("t", 1)]

    return ScriptCore("echo.0", react)


def test_an_exception_becomes_an_invariant_error_with_the_story_of_what_it_touched() -> None:
    stepper = Stepper(fail_on("r1"), validate=False)
    stepper.step(received("r2"))
    stepper.step(Started(5))
    with pytest.raises(InvariantError) as caught:
        stepper.step(received("r1"))
    text = str(caught.value)
    assert text.startswith("echo.0 failed on cancel from peer: KeyError")
    assert "r2" not in text
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_story_holds_earlier_steps_about_the_same_request() -> None:
    core = ScriptCore("echo.0", lambda _event: [Send("xds.act.a", Cancel("r1", "on"))])
    stepper = Stepper(core, validate=False)
    stepper.step(Started(0))
    core._react = fail_on("r1")._react
    with pytest.raises(InvariantError, match=r"Started -> send cancel to xds.act.a"):
        stepper.step(received("r1"))


def test_a_broken_invariant_is_noticed_when_asked_for() -> None:
    class Broken(ScriptCore):
        def validate(self) -> None:
            raise AssertionError("two owners")

    assert Stepper(Broken("echo.0"), validate=False).step(Started(0)) == []
    with pytest.raises(InvariantError, match="two owners"):
        Stepper(Broken("echo.0"), validate=True).step(Started(0))


def test_a_story_is_bounded_and_can_be_told_about_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STORY_MAX", 3)
    story = Story("echo.0")
    for index in range(5):
        story.add(index, received(f"r{index}"), [])
    assert len(story.tell()) == 3
    assert story.tell("r4") == ["echo.0:        0.000 ms  cancel from peer -> nothing"]
    assert story.tell("r0") == [], "forgotten"


def test_ids_are_found_wherever_a_message_keeps_them() -> None:
    row = TokenRow("r2", 0, 5, 0, None, 0.0)
    done = ReceiveDone("kv-r3", "r3", "dp")
    assert ids_of(received("r1")) == {"r1"}
    assert ids_of(Send("s", assign_prefill("r4"))) == {"r4"}
    assert ids_of(Send("s", TokensCommitted("dp", 1, (row,)))) == {"r2"}
    assert ids_of(Send("s", done)) == {"kv-r3", "r3"}
    assert ids_of(Send("s", StreamChunks("output", ()))) == set()


def test_a_story_keeps_no_message_alive() -> None:
    story = Story("echo.0")
    write = XcclWrite(3, np.zeros(1, np.uint8))
    story.add(0, Received(0, write, "peer", 1, 1), [])
    chapter = story._chapters[0]
    assert all(isinstance(text, str) for text in (chapter.event, *chapter.effects, *chapter.ids))
    assert summary_of(Send("xds.view", write)) == "send xccl_write to xds.view"
