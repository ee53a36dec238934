"""One streamed response: server-sent events, written no faster than the client reads.

    data: {...}    data: {...}    data: [DONE]
    data: {...}    data: {"error": {...}}           when it goes wrong

Writing waits for the socket's buffer, within a time limit; a client that has stopped reading is
disconnected instead of waited for.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from libs.errors import Cancelled, OperatingError
from services.gateway.problems import error_object
from services.gateway.stream import SlowReader

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect events
}
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Writes the events of one response; `broken` once nothing more can reach the client."""

    def __init__(self, request: web.Request, write_s: float) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self.broken = False
        self._request = request
        self._write_s = write_s

    async def open(self) -> None:
        """Send the headers."""
        await self.response.prepare(self._request)

    async def send(self, event: dict[str, Any] | None) -> None:
        """Send one event, None being none; raises `SlowReader` or `Cancelled` if it cannot."""
        if event is not None:
            data = json.dumps(event, separators=(",", ":")).encode("ascii")
            await self._write(b"data: " + data + b"\n\n")

    async def finish(self) -> None:
        """End the stream well."""
        await self._write(_DONE)
        await self.response.write_eof()

    async def fail(self, error: OperatingError) -> None:
        """End the stream with an error event, if there is still somebody to read it."""
        try:
            await self.send(error_object(error))
            await self.response.write_eof()
        except (OperatingError, ConnectionError):
            self.abort()

    def abort(self) -> None:
        """Cut the connection: whatever waits to be sent is dropped."""
        self.broken = True
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _write(self, data: bytes) -> None:
        if self.broken:
            raise Cancelled("the connection is gone")
        try:
            async with asyncio.timeout(self._write_s):
                await self.response.write(data)
        except TimeoutError:
            self.abort()
            raise SlowReader(f"the client read nothing for {self._write_s:g} s") from None
        except ConnectionError as error:
            self.broken = True
            raise Cancelled(f"the client left: {error}") from error
