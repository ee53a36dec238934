"""Who waits for an answer: one inbox per lane, one token per question.

A question travels with `reply = <inbox>.<token>`; the lane subscribes to `<inbox>.*` once and hands
every answer to `resolve`. Two headers turn an answer into an error: the broker's `Status: 503`
(nobody listens) and our `Xds-Error` (the handler raised). Late answers find no token and are
ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libs.bus.api import NoResponders
from libs.errors import OperatingError, ProtocolError, error_from_code

STATUS_HEADER, NO_RESPONDERS_STATUS = "Status", "503"
ERROR_HEADER, DEFINITE_HEADER = "Xds-Error", "Xds-Definite"
ERROR_TEXT_BYTES = 1024
PROBE_TTL_S = 5.0
PROBES_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Probe:
    unreachable: Callable[[], None]
    due_s: float


class PendingRequests:
    """The open questions of one lane."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._count = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[bytes]]] = {}
        self._probes: dict[str, _Probe] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self, subject: str) -> tuple[str, asyncio.Future[bytes]]:
        """A fresh reply subject and the future that its answer resolves."""
        reply = self._fresh()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = subject, future
        return reply, future

    def open_probe(self, unreachable: Callable[[], None], now_s: float) -> str:
        """A fresh reply subject on which only "nobody listens" matters."""
        reply = self._fresh()
        if len(self._probes) >= PROBES_MAX:  # the oldest has been delivered long ago
            del self._probes[next(iter(self._probes))]
        self._probes[reply] = _Probe(unreachable, now_s + PROBE_TTL_S)
        return reply

    def close(self, reply: str) -> None:
        """Forget a question, answered or not."""
        self._waiting.pop(reply, None)

    def resolve(self, reply: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Hand an answer, or the error it stands for, to whoever asked."""
        nobody = headers.get(STATUS_HEADER) == NO_RESPONDERS_STATUS
        probe = self._probes.pop(reply, None)
        if probe is not None:
            if nobody:  # soon: the owner's code must not run inside a carrier
                asyncio.get_running_loop().call_soon(probe.unreachable)
            return
        subject, future = self._waiting.pop(reply, ("", None))
        if future is None or future.done():
            return
        if nobody:
            future.set_exception(NoResponders(f"nobody listens on {subject}"))
        elif ERROR_HEADER in headers:
            future.set_exception(read_error(data, headers))
        else:
            future.set_result(data)

    def fail(self, error: OperatingError, subject: str | None = None) -> None:
        """End every question, or those to `subject` (compared without case), with `error`."""
        for asked, future in list(self._waiting.values()):
            if (subject is None or asked.lower() == subject.lower()) and not future.done():
                future.set_exception(error)

    def expire(self, now_s: float) -> None:
        """Forget probes that were evidently delivered."""
        for reply in [reply for reply, probe in self._probes.items() if probe.due_s <= now_s]:
            del self._probes[reply]

    def _fresh(self) -> str:
        self._count += 1
        return f"{self.inbox}.{self._count}"


def write_error(error: BaseException) -> tuple[bytes, dict[str, str]]:
    """Data and headers of the reply that tells a requester what its handler raised."""
    match error:
        case OperatingError():
            code, definite, text = error.code, error.definite, error.message
        case ProtocolError():
            code, definite, text = "bad_input", True, str(error)
        case _:  # our bug: its text may hold anything, so only its type travels
            code, definite, text = "internal", False, f"handler raised {type(error).__name__}"
    headers = {ERROR_HEADER: code, DEFINITE_HEADER: str(int(definite))}
    return text.encode(errors="replace")[:ERROR_TEXT_BYTES], headers


def read_error(data: bytes, headers: Mapping[str, str]) -> OperatingError:
    """The error that `write_error` described."""
    text = data.decode(errors="replace")
    definite = headers.get(DEFINITE_HEADER) == "1"
    return error_from_code(headers[ERROR_HEADER], text, definite=definite)
