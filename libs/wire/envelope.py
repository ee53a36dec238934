"""What every frame says about itself, whatever message it carries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who sent a frame, in which life and epoch, and when on the emulated timeline.

    `deadline_ns` is absolute on the timeline of `at_ns`, 0 when there is none; `trace` is a W3C
    `traceparent` or empty; `reply_to` is the subject on which the sender waits, or empty.
    """

    sender: str
    incarnation: int
    epoch: int
    at_ns: int
    deadline_ns: int = 0
    trace: str = ""
    reply_to: str = ""
