"""A small client of the pod's HTTP API, for the command line's own use.

Programs use the official `openai` package; this one exists so that `xds` needs nothing beyond
what the pod itself needs. Every call has a deadline; errors arrive as the project's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from libs.errors import BadInput, OperatingError, PeerLost
from services.pod.state import PodState, read_state


def running_pod() -> PodState:
    """The pod of this folder; raises `PeerLost` with the remedy when there is none."""
    state = read_state()
    if state is None:
        raise PeerLost("no pod is running here; start one with: xds up --detach")
    return state


class PodClient:
    """An HTTP session with one pod; an async context manager."""

    def __init__(self, base_url: str, *, timeout_s: float = 300.0) -> None:
        self.base_url = base_url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> PodClient:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body of a GET."""
        assert self._session is not None
        try:
            async with self._session.get(self.base_url + path) as response:
                return response.status, await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerLost(f"no answer from {self.base_url}: {error}") from error

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON answer of a POST; an error answer is raised."""
        assert self._session is not None
        try:
            async with self._session.post(self.base_url + path, json=body) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerLost(f"no answer from {self.base_url}: {error}") from error
        _raise_error(answer)
        return answer

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streaming POST; leaving the iteration closes the connection."""
        assert self._session is not None
        body = {**body, "stream": True}
        try:
            async with self._session.post(self.base_url + path, json=body) as response:
                if response.status != 200:
                    _raise_error(await response.json())
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        return
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        _raise_error(event)
                        yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerLost(f"the stream from {self.base_url} broke: {error}") from error


async def wait_ready(base_url: str, timeout_s: float) -> None:
    """Poll `/ready` until it says yes; raises `PeerLost` naming what is missing."""
    missing: object = "no answer yet"
    async with PodClient(base_url, timeout_s=5.0) as client:
        for _ in range(round(timeout_s / 0.1)):
            try:
                status, body = await client.get("/ready")
            except PeerLost as error:
                missing = error.message
            else:
                if status == 200:
                    return
                missing = body.get("missing", body)
            await asyncio.sleep(0.1)
    raise PeerLost(f"the pod is not ready after {timeout_s:.0f} s; missing: {missing}")


def _raise_error(answer: Any) -> None:
    if not isinstance(answer, dict) or "error" not in answer:
        return
    error = answer["error"]
    message = str(error.get("message", error))
    if error.get("type") == "invalid_request_error":
        raise BadInput(message, field=error.get("param"))
    raise OperatingError(message)
