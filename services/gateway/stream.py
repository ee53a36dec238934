"""The bridge between the host, which presents chunks one by one, and the handler of each client.

    handler --submit--> host.outside(ClientSubmit) per choice
    host --present(request id, Chunk | Failure)--> Streams --> Answer of that client --> handler
    handler --leave--> host.outside(ClientGone) per choice that has not ended

An `Answer` is bounded: a client that reads too slowly is cut off instead of remembered without end,
and the dies stop working for it at once. Whatever way a handler ends, it leaves, so a request can
never outlive its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from libs.errors import OperatingError, PeerLost
from libs.wire.tokens import Chunk
from services.gateway.admission import Ask
from services.gateway.core import ClientGone, ClientSubmit, Failure
from services.gateway.problems import error_of_failure


class SlowReader(OperatingError):
    """The client reads more slowly than its tokens come."""

    code: ClassVar[str] = "slow_reader"
    definite_default: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Shown:
    """One chunk of one choice, due at emulated `at_ns`."""

    choice: int
    chunk: Chunk
    at_ns: int


class Answer:
    """The chunks of one client's request, in order; iterate it to get them.

    Iteration ends after the last choice, or raises the `OperatingError` that ended the request. At
    most `items_max` chunks wait to be taken.
    """

    def __init__(self, ask: Ask, items_max: int) -> None:
        self.ask = ask
        self.open_choices = {spec.request_id: i for i, spec in enumerate(ask.specs)}
        self._items_max = items_max
        self._items: list[Shown] = []
        self._error: OperatingError | None = None
        self._changed = asyncio.Event()

    def put(self, request_id: str, item: Chunk | Failure, at_ns: int) -> bool:
        """Take what the host shows; False when the client is too slow and has to go."""
        if self._error is not None:
            return True
        if isinstance(item, Failure):
            self.open_choices.pop(request_id)
            self.fail(error_of_failure(item))
            return True
        if len(self._items) >= self._items_max:
            self.fail(SlowReader(f"{self._items_max} tokens wait to be read; the stream ends"))
            return False
        choice = self.open_choices[request_id]
        if item.finish_reason is not None:
            del self.open_choices[request_id]
        self._items.append(Shown(choice, item, at_ns))
        self._changed.set()
        return True

    def fail(self, error: OperatingError) -> None:
        """End the request with `error`, once what was shown before has been taken."""
        self._error = self._error or error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Shown]:
        """The chunks of all choices, as they come."""
        while True:
            taken, self._items = self._items, []
            for shown in taken:
                yield shown
            if self._items:
                continue
            if self._error is not None:
                raise self._error
            if not self.open_choices:
                return
            self._changed.clear()
            await self._changed.wait()


class Streams:
    """Every answer in the making, by the request ids of its choices."""

    def __init__(self, outside: Callable[[Any], None]) -> None:
        self._outside = outside
        self._answers: dict[str, Answer] = {}

    def submit(self, ask: Ask, items_max: int) -> Answer:
        """Hand every choice to the core; the caller has checked that all of them fit."""
        answer = Answer(ask, items_max)
        # The core may answer within the call, so the way back is laid first.
        self._answers.update((spec.request_id, answer) for spec in ask.specs)
        for spec in ask.specs:
            self._outside(ClientSubmit(spec))
        return answer

    def present(self, key: str, item: Any, at_ns: int) -> None:
        """The host's callback: `item` for request `key` is due."""
        assert isinstance(item, Chunk | Failure), item
        answer = self._answers.get(key)
        if answer is None:
            return  # the client left while this was on its way
        if not answer.put(key, item, at_ns):
            # We are inside an effect of the core: it learns of it as the next event.
            asyncio.get_running_loop().call_soon(self.leave, answer)
        elif key not in answer.open_choices:
            del self._answers[key]

    def leave(self, answer: Answer) -> None:
        """The client is done or gone: cancel every choice that has not ended; idempotent."""
        for request_id in list(answer.open_choices):
            if self._answers.pop(request_id, None) is not None:
                self._outside(ClientGone(request_id))

    def end_all(self) -> None:
        """Tell every client that the gateway stops."""
        for answer in set(self._answers.values()):
            answer.fail(PeerLost("the gateway is stopping"))
