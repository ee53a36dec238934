"""A pod behind a real gateway core and the real HTTP edge, whose dies are a script.

`FakePod` stands where the host stands: it feeds the core, shows what the core presents, and instead
of a broker there is a script that turns a submitted request into chunks. Nothing is paced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from libs import units
from libs.actor import Effect, Event, Present, Received, Record, Send
from libs.clock.pod_clock import PodClock
from libs.config.topology import LimitsSection
from libs.model.output_parser import OutputParser
from libs.model.resources import ModelResources
from libs.wire.control import ClusterView, KvCounts, MemberState
from libs.wire.request import Accepted, PrefillTiming, RequestFailed, RequestSpec, Submit
from libs.wire.tokens import Chunk, RequestTiming, StreamChunks, TokenLogprob
from services.gateway.admission import Admission
from services.gateway.core import ClientGone, GatewayConfig, GatewayCore
from services.gateway.edge import EdgeOptions, HttpEdge
from services.gateway.metrics import GatewayMetrics
from services.gateway.shell import HttpAddress, listening

MODEL = ModelResources("xds-tiny")
TOKENIZER = MODEL.tokenizer
EOS = TOKENIZER.control.eos
FIRST_NS = units.ms(900)
GAP_NS = units.ms(40)

Script = Callable[[RequestSpec], Iterable[Chunk | RequestFailed]]


def member(name: str, kv: KvCounts | None = None) -> MemberState:
    return MemberState(name, name.split(".")[0], 1, 1, True, "serving", 0, 0, 0, kv)


READY_VIEW = ClusterView(
    3,
    1,
    True,
    (
        member("decode_te.d0.dp0", KvCounts(100, 90, 6, 1, 2, 1)),
        member("prefill_te.p0.dp0", KvCounts(50, 50, 0, 0, 0, 0)),
        member("output.d0.dp0"),
    ),
    (),
)
STARTING_VIEW = ClusterView(1, 1, False, (), ("decode_te.d0.dp0", "expert_die.d0.e1"))


def chunks_of(spec: RequestSpec, ids: Sequence[int], finish: str | None = None) -> list[Chunk]:
    """What output processes would stream for the tokens `ids`; `finish` ends after the last."""
    parser = OutputParser(
        TOKENIZER,
        spec.request_id,
        raw=spec.output.raw,
        reasoning_open=spec.output.reasoning_open,
        stops=spec.output.stops,
    )
    chunks: list[Chunk] = []
    for index, token in enumerate(ids):
        last = finish is not None and index == len(ids) - 1
        delta = parser.push(token, last, finish if last else None)
        asked = spec.output.logprobs
        chunk = Chunk(
            spec.request_id,
            index,
            token,
            spec.submitted_at_ns + FIRST_NS + index * GAP_NS,
            delta.content,
            delta.reasoning,
            delta.tool_calls,
            delta.finish_reason,
            _logprob(token, -0.5) if asked else None,
            tuple(_logprob(40 + i, -1.0 - i) for i in range(max(0, spec.sampling.logprobs))),
            _timing(spec) if delta.finish_reason else None,
        )
        chunks.append(chunk)
        if delta.finish_reason is not None:
            break
    return chunks


def saying(text: str, *, finish: str = "stop") -> Script:
    """Every request gets `text`; behind a thought where one was asked for."""

    def script(spec: RequestSpec) -> list[Chunk]:
        thought: list[int] = []
        if spec.output.reasoning_open:
            thought = [*TOKENIZER.encode("Hmm, well."), TOKENIZER.control.think_close]
        end = [EOS] if finish == "stop" else []
        return chunks_of(spec, [*thought, *TOKENIZER.encode(text), *end], finish)

    return script


def failing(code: str, *, definite: bool = True, after: int = 0) -> Script:
    """Every request fails with `code` after `after` tokens."""

    def script(spec: RequestSpec) -> list[Chunk | RequestFailed]:
        failed = RequestFailed(spec.request_id, code, "the die is on fire", definite, "decode")
        return [*chunks_of(spec, TOKENIZER.encode("one two three four")[:after]), failed]

    return script


def silent_after(tokens: int) -> Script:
    """Every request gets so many tokens and then nothing any more."""
    return lambda spec: chunks_of(spec, TOKENIZER.encode("one two three four")[:tokens])


def _logprob(token: int, value: float) -> TokenLogprob:
    return TokenLogprob(token, TOKENIZER.token_text(token), value)


def _timing(spec: RequestSpec) -> RequestTiming:
    start = spec.submitted_at_ns
    prefill = PrefillTiming("p0", "prefill_te.p0.dp0", start + units.ms(100), start + units.ms(800))
    transferred = (start + units.ms(810), start + units.ms(860))
    return RequestTiming(prefill, "d0", "decode_te.d0.dp1", (10, 11), 4096, *transferred)


class FakePod:
    """The host of one gateway core; `script` is everything behind it."""

    def __init__(self, core: GatewayCore, sink: GatewayMetrics, script: Script) -> None:
        self.core = core
        self.clock = PodClock(0, 0)
        self.script = script
        self.submitted: list[RequestSpec] = []
        self.gone: list[str] = []
        self.cancelled: list[str] = []
        self._sink = sink
        self._presenter: Callable[[str, Any, int], None] | None = None
        self._left = asyncio.Event()
        self._answered = asyncio.Semaphore(0)

    def on_present(self, presenter: Callable[[str, Any, int], None]) -> None:
        self._presenter = presenter

    def outside(self, message: Any) -> None:
        if isinstance(message, ClientGone):
            self.gone.append(message.request_id)
            self._left.set()
        self.receive(message, "outside")

    def receive(self, message: Any, sender: str = "job_executor.0") -> None:
        """The core gets `message`."""
        self.feed(Received(self.clock.now_ns(), message, sender, 1, 1))

    def feed(self, event: Event) -> None:
        effects = self.core.handle(event, event.at_ns)
        self.core.validate()
        for effect in effects:
            self._carry_out(effect)

    async def answered(self, choices: int) -> None:
        """Return when the script has been played for so many choices."""
        async with asyncio.timeout(2):
            for _ in range(choices):
                await self._answered.acquire()

    async def client_left(self) -> None:
        """Return when the edge has told the core that a client is gone."""
        async with asyncio.timeout(2):
            await self._left.wait()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Present():
                assert self._presenter is not None
                self._presenter(effect.key, effect.item, effect.at_ns)
            case Record():
                self._sink.record(self.core.name, 0, effect)
            case Send(message=Submit(spec=spec)):
                self.submitted.append(spec)
                asyncio.get_running_loop().call_soon(self._play, spec)
            case Send():
                self.cancelled.append(effect.message.request_id)
            case _:
                pass  # timers: nothing here is ever late

    def _play(self, spec: RequestSpec) -> None:
        self.receive(Accepted(spec.request_id, "job_executor.0"))
        for item in self.script(spec):
            message = StreamChunks("output.d0.dp1", (item,)) if isinstance(item, Chunk) else item
            self.receive(message)
        self._answered.release()


class Notes:
    """The edge's log."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, event: str, **fields: Any) -> None:
        self.events.append(event)


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that listens, and a client session at its door."""

    pod: FakePod
    url: str
    http: aiohttp.ClientSession
    notes: Notes
    metrics: GatewayMetrics

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON and headers of the answer."""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def chat(self, **fields: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def complete(self, **fields: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/completions", completion_body(**fields))


def chat_body(**fields: Any) -> dict[str, Any]:
    """A good chat body, with `fields` on top; None takes a field away."""
    body = {"model": "xds-tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return {name: value for name, value in body.items() if value is not None}


def completion_body(**fields: Any) -> dict[str, Any]:
    """A good completion body, with `fields` on top; None takes a field away."""
    body = {"model": "xds-tiny", "prompt": "Once upon a time", **fields}
    return {name: value for name, value in body.items() if value is not None}


@asynccontextmanager
async def gateway(
    script: Script | None = None,
    *,
    limits: LimitsSection | None = None,
    options: EdgeOptions | None = None,
    view: ClusterView = READY_VIEW,
) -> AsyncIterator[Running]:
    """A listening gateway with `script` behind it (default: it says "Paris.")."""
    limits = limits or LimitsSection()
    core = GatewayCore(GatewayConfig("gateway.0", limits.requests_in_flight_max))
    metrics, notes = GatewayMetrics(MODEL.name), Notes()
    pod = FakePod(core, metrics, script or saying("Paris."))
    pod.receive(view, "control_plane.0")
    admission = Admission(MODEL, limits, core.name)
    edge = HttpEdge(core, pod, admission, metrics, notes, options)
    async with (
        listening(edge, HttpAddress(port=0)) as port,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
    ):
        yield Running(pod, f"http://127.0.0.1:{port}", http, notes, metrics)
