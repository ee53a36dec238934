"""The HTTP edge: OpenAI's endpoints for clients, health and metrics for operators.

    POST /v1/chat/completions, /v1/completions      answers, whole or streamed (SSE)
    GET  /v1/models, /v1/models/{id}                what is served
    GET  /health, /ready                            this process lives; the whole pod is there
    GET  /metrics, /xds/status                      for Prometheus; for people

One handler task per request, cancelled by the server the moment its client disconnects. It waits
for the first token before it begins the response, so a request that fails early gets the right HTTP
status even when it asked for a stream. After that an error is the last event of the stream, and no
`[DONE]` follows.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from libs import units
from libs.clock.pod_clock import PodClock, wall_ns
from libs.errors import Backpressure, BadInput, OperatingError
from libs.ids import new_request_id
from libs.wire.tokens import Chunk
from services.gateway.admission import Admission, Arrival, Ask
from services.gateway.core import GatewayCore
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai_api import Renderer, model_object
from services.gateway.problems import BodyTooLarge, BodyTooSlow, error_response, http_response
from services.gateway.schemas import parse_chat, parse_completion, parse_json_body
from services.gateway.sse import EventStream
from services.gateway.status import ready_document, require_ready, status_document
from services.gateway.stream import Answer, Shown, Streams

_REQUEST_ID = web.RequestKey("xds_request_id", str)
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EdgeHost(Protocol):
    """What the edge needs of the host that runs the core."""

    clock: PodClock

    def outside(self, message: Any) -> None:
        """Feed an event from outside to the core."""
        ...

    def on_present(self, presenter: Callable[[str, Any, int], None]) -> None:
        """Where visible effects go."""
        ...


class EdgeLog(Protocol):
    """Where the edge notes what went wrong in itself."""

    def note(self, event: str, **fields: Any) -> None:
        """One fact."""
        ...


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """Bounds of one connection, in real seconds; `stream_items_max` tokens wait for a reader."""

    body_s: float = 30.0
    write_s: float = 10.0
    stream_items_max: int = 1024


class HttpEdge:
    """All handlers of one gateway."""

    def __init__(
        self,
        core: GatewayCore,
        host: EdgeHost,
        admission: Admission,
        metrics: GatewayMetrics,
        log: EdgeLog,
        options: EdgeOptions | None = None,
    ) -> None:
        self._core = core
        self._clock = host.clock
        self._admission = admission
        self._metrics = metrics
        self._log = log
        self._options = options or EdgeOptions()
        self._streams = Streams(host.outside)
        self._created_s = self._clock.epoch_wall_ns // units.NS_PER_S
        self._shown_late_ns = 0
        host.on_present(self._present)
        metrics.watch(lambda: core.open_requests, lambda: self._shown_late_ns, self._clock.pace)

    def app(self) -> web.Application:
        """The aiohttp application."""
        limit = self._admission.limits.body_max_bytes
        app = web.Application(middlewares=[self._report_errors], client_max_size=limit)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._scrape),
                web.get("/xds/status", self._status),
            ]
        )
        app.on_response_prepare.append(_add_request_id)
        app.on_shutdown.append(self._stop)
        return app

    async def _stop(self, _app: web.Application) -> None:
        self._streams.end_all()

    def _present(self, key: str, item: Any, at_ns: int) -> None:
        self._shown_late_ns = self._clock.lag_ns(at_ns)
        self._streams.present(key, item, at_ns)

    # ------------------------------------------------------------ errors

    @web.middleware
    async def _report_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The one place where an error becomes a response."""
        try:
            return await handler(request)
        except OperatingError as error:
            return error_response(error)
        except web.HTTPException as error:
            return http_response(error, request)
        except Exception as error:  # noqa: BLE001 - our bug, and the client deserves an answer
            self._log.note("http_handler_failed", path=request.path, error=traceback.format_exc())
            bug = OperatingError(f"internal error ({type(error).__name__})", definite=False)
            return error_response(bug)

    # ------------------------------------------------------------ generation

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chatcmpl", self._admit_chat)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "cmpl", self._admit_completion)

    def _admit_chat(self, raw: dict[str, Any], arrival: Arrival) -> Ask:
        body = parse_chat(raw)
        self._require_service(body.model)
        return self._admission.chat(body, arrival)

    def _admit_completion(self, raw: dict[str, Any], arrival: Arrival) -> Ask:
        body = parse_completion(raw)
        self._require_service(body.model)
        return self._admission.completion(body, arrival)

    def _require_service(self, model: str) -> None:
        """What can be refused without looking at the prompt."""
        self._admission.require_model(model)
        require_ready(self._core)
        self._require_room(1)

    def _require_room(self, choices: int) -> None:
        if not self._core.can_admit(choices):
            open_now, limit = self._core.open_requests, self._core.config.requests_max
            raise Backpressure(
                f"{open_now} of {limit} requests are open, {choices} more do not fit"
            )

    def _arrival(self, request: web.Request) -> Arrival:
        # Nobody checks the key here; it only tells whose cached KV a prompt may use.
        api_key = request.headers.get("Authorization", "")
        created_s = wall_ns() // units.NS_PER_S
        return Arrival(request[_REQUEST_ID], self._clock.now_ns(), created_s, api_key)

    async def _generate(
        self, request: web.Request, prefix: str, admit: Callable[[dict[str, Any], Arrival], Ask]
    ) -> web.StreamResponse:
        request[_REQUEST_ID] = new_request_id(prefix)
        try:
            raw = parse_json_body(await self._read_body(request))
            ask = admit(raw, self._arrival(request))
            self._require_room(len(ask.specs))
        except OperatingError as error:
            self._metrics.refused(error)
            raise
        # Nothing is awaited between the check for room and this: all choices or none.
        tokens_max = sum(spec.max_tokens for spec in ask.specs)
        bound = min(tokens_max, self._options.stream_items_max) if ask.stream else tokens_max
        answer = self._streams.submit(ask, bound)
        try:
            if ask.stream:
                return await self._streamed(request, answer)
            return await self._whole(answer)
        finally:
            self._streams.leave(answer)

    async def _read_body(self, request: web.Request) -> bytes:
        limit, patience_s = self._admission.limits.body_max_bytes, self._options.body_s
        too_large = BodyTooLarge(f"the body is larger than the limit of {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        try:
            async with asyncio.timeout(patience_s):
                return await request.read()
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {patience_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except web.RequestPayloadError as error:
            raise BadInput(f"the body is broken: {error}") from None

    async def _whole(self, answer: Answer) -> web.Response:
        renderer = self._renderer(answer.ask)
        choices: list[list[Chunk]] = [[] for _ in answer.ask.specs]
        async for shown in answer:
            renderer.tallies[shown.choice].take(shown.chunk, shown.at_ns)
            choices[shown.choice].append(shown.chunk)
        self._count_phases(renderer)
        return web.json_response(renderer.body(choices))

    async def _streamed(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        renderer = self._renderer(answer.ask)
        shown = aiter(answer)
        item: Shown | None = await anext(shown)
        stream = EventStream(request, self._options.write_s)
        try:
            await stream.open()
            while item is not None:
                await stream.send(renderer.event(item.choice, item.chunk, item.at_ns))
                item = await anext(shown, None)
            self._count_phases(renderer)
            if answer.ask.include_usage:
                await stream.send(renderer.usage_event())
            await stream.finish()
        except OperatingError as error:
            # The pod stops working for this client before the last word is even sent.
            self._streams.leave(answer)
            await stream.fail(error)
        except BaseException:
            stream.abort()  # the response has begun: there is no other way to say it
            raise
        return stream.response

    def _renderer(self, ask: Ask) -> Renderer:
        return Renderer(ask, self._admission.model.tokenizer)

    def _count_phases(self, renderer: Renderer) -> None:
        for tally in renderer.tallies:
            phases = tally.phases()
            if phases is not None:
                self._metrics.finished(phases)

    # ------------------------------------------------------------ models

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._admission.require_model(request.match_info["id"])
        return web.json_response(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        context = self._admission.limits.context_max_tokens
        return model_object(self._admission.model.name, self._created_s, context)

    # ------------------------------------------------------------ operators

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "gateway": self._core.name})

    async def _ready(self, _request: web.Request) -> web.Response:
        view = self._core.view
        return web.json_response(ready_document(view), status=200 if view.ready else 503)

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response(status_document(self._core))

    async def _scrape(self, request: web.Request) -> web.Response:
        self._metrics.seen(self._core.view)
        self._metrics.carried(self._core.links)
        body, content_type = self._metrics.registry.expose(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """The client's own id if it gave a sane one, else ours."""
    given = request.headers.get("X-Request-Id", "")
    ours = request.get(_REQUEST_ID) or new_request_id("req")
    response.headers["X-Request-Id"] = given if _SANE_ID.fullmatch(given) else ours
