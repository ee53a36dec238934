"""The gateway's metrics: a sink that turns its records into what Prometheus scrapes.

Tokens and ends come as records of the core, so that refusals by the edge are the only outcomes
counted elsewhere (`refused`). Where the time of a finished request went is known to the edge, from
the last chunk (`finished`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from libs import units
from libs.actor import Record
from libs.errors import OperatingError
from libs.telemetry import metrics as catalogue
from libs.wire.control import ClusterView
from libs.wire.fabric import PlaneTotal
from services.gateway.links import LinkBook
from services.gateway.tally import Phases

#: Codes of failures that a fault of the pod explains; others are its own mistakes.
_FAULTS = frozenset({"peer_lost", "transfer_failed", "stale_epoch", "deadline_exceeded"})
_CLIENTS = frozenset(
    {
        "bad_input", "context_length_exceeded", "model_not_found", "body_too_large",
        "body_too_slow",
    }
)  # fmt: skip
_REJECTED = frozenset({"backpressure", "not_ready", "capacity_exceeded"})


class GatewayMetrics:
    """All metrics of one gateway process."""

    def __init__(self, model: str) -> None:
        made = self.registry = catalogue.Metrics()
        self._requests = made.counter(catalogue.REQUEST_TOTAL)
        self._prompt_tokens = made.counter(catalogue.PROMPT_TOKENS)
        self._cache_queries = made.counter(catalogue.PREFIX_CACHE_QUERIES)
        self._cache_hits = made.counter(catalogue.PREFIX_CACHE_HITS)
        self._generation_tokens = made.counter(catalogue.GENERATION_TOKENS)
        self._ttft = made.histogram(catalogue.TIME_TO_FIRST_TOKEN)
        self._itl = made.histogram(catalogue.INTER_TOKEN_LATENCY)
        self._tpot = made.histogram(catalogue.TIME_PER_OUTPUT_TOKEN)
        self._duration = made.histogram(catalogue.REQUEST_DURATION)
        self._queue = made.histogram(catalogue.REQUEST_QUEUE)
        self._prefill = made.histogram(catalogue.REQUEST_PREFILL)
        self._transfer = made.histogram(catalogue.REQUEST_TRANSFER)
        self._decode = made.histogram(catalogue.REQUEST_DECODE)
        self._running = made.gauge(catalogue.REQUESTS_RUNNING)
        self._ready = made.gauge(catalogue.READY)
        self._missing = made.gauge(catalogue.MEMBERS_MISSING)
        self._utilization = made.gauge(catalogue.LINK_UTILIZATION)
        self._fabric_bytes = made.counter(catalogue.FABRIC_BYTES)
        self._fabric_frames = made.counter(catalogue.FABRIC_FRAMES)
        self._counted: dict[str, PlaneTotal] = {}
        self._lag = made.gauge(catalogue.CLOCK_LAG)
        self._pace = made.gauge(catalogue.CLOCK_PACE)
        info = made.gauge(catalogue.BUILD_INFO)
        info.labels(_version(), platform.python_version(), model).set(1)

    def record(self, actor: str, at_ns: int, record: Record) -> None:
        """Take one fact of the core; those that are no metric are passed over."""
        fields = record.fields
        match record.name:
            case "first_token":
                self._ttft.observe(units.to_s(fields["ttft_ns"]))
                self._generation_tokens.inc()
            case "token":
                self._itl.observe(units.to_s(fields["gap_ns"]))
                self._generation_tokens.inc()
            case "request_ended":
                self._ended(fields)
            case _:
                pass

    def _ended(self, fields: dict[str, Any]) -> None:
        reason = str(fields["finish_reason"])
        outcome = str(fields["outcome"])
        outcome = outcome_of(reason) if outcome == "failed" else outcome
        self._requests.labels(outcome, reason).inc()
        self._prompt_tokens.inc(fields["prompt_tokens"])
        self._duration.observe(units.to_s(fields["duration_ns"]))

    def refused(self, error: OperatingError) -> None:
        """The edge refused an HTTP request; the core never saw it."""
        self._requests.labels(outcome_of(error.code), error.code).inc()

    def finished(self, phases: Phases) -> None:
        """A choice finished, and this is where its time went."""
        self._queue.observe(units.to_s(phases.queue_ns))
        self._prefill.observe(units.to_s(phases.prefill_ns))
        self._decode.observe(units.to_s(phases.decode_ns))
        self._cache_queries.inc(phases.prompt_tokens)
        self._cache_hits.inc(phases.cached_tokens)
        if phases.transfer_ns is not None:
            self._transfer.observe(units.to_s(phases.transfer_ns))
        if phases.per_token_ns is not None:
            self._tpot.observe(units.to_s(round(phases.per_token_ns)))

    def watch(self, running: Callable[[], int], lag_ns: Callable[[], int], pace: float) -> None:
        """What is read at each scrape."""
        self._running.set_function(running)
        self._lag.set_function(lambda: units.to_s(lag_ns()))
        self._pace.set(pace)

    def seen(self, view: ClusterView) -> None:
        """Readiness as of `view`, asked for before each scrape."""
        self._ready.set(view.ready)
        self._missing.set(len(view.missing))

    def carried(self, links: LinkBook) -> None:
        """Links as they are now; one that carries nothing any more has no series any more."""
        self._utilization.clear()
        for load in links.loads():
            labels = load.plane, load.direction, str(load.link)
            self._utilization.labels(*labels).set(load.utilization)
        for total in links.carried():
            before = self._counted.get(total.plane, PlaneTotal(total.plane, 0, 0))
            self._fabric_bytes.labels(total.plane).inc(total.nbytes - before.nbytes)
            self._fabric_frames.labels(total.plane).inc(total.frames - before.frames)
            self._counted[total.plane] = total


def outcome_of(code: str) -> str:
    """The outcome label of a request that ended with error `code`."""
    if code in _FAULTS:
        return "failed_fault"
    if code in _CLIENTS:
        return "client_error"
    return "rejected" if code in _REJECTED else "failed_internal"


def _version() -> str:
    try:
        return metadata.version("xdeepserve")
    except metadata.PackageNotFoundError:
        return "source"
