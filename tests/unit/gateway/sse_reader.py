"""Reads a stream of server-sent events the way a strict client does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Streamed:
    """Everything one stream said."""

    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def of_choice(self, index: int) -> list[dict[str, Any]]:
        """The parts about one choice."""
        return [part for e in self.events for part in e["choices"] if part["index"] == index]

    def text(self, index: int = 0, channel: str = "content") -> str:
        """The text of one choice, whichever endpoint it came from."""
        parts = self.of_choice(index)
        return "".join(p["text"] if "text" in p else p["delta"].get(channel, "") for p in parts)

    def finish_reason(self, index: int = 0) -> str | None:
        """Why the choice ended, said once and by its last event."""
        reasons: list[str | None] = [p["finish_reason"] for p in self.of_choice(index)]
        assert not any(reasons[:-1]), reasons
        return reasons[-1]


async def read_stream(response: aiohttp.ClientResponse) -> Streamed:
    """All events until the connection ends; asserts the framing of each."""
    assert response.status == 200, await response.text()
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    body = (await response.read()).decode("ascii")
    assert body.endswith("\n\n")
    streamed = Streamed()
    for block in body[:-2].split("\n\n"):
        assert block.startswith("data: "), block
        assert "\n" not in block, block
        assert not streamed.done, "an event after [DONE]"
        if block == "data: [DONE]":
            streamed.done = True
        else:
            streamed.events.append(json.loads(block[6:]))
    return streamed
