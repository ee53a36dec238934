"""Every metric of the pod, declared once; the only module that imports the Prometheus client.

A process has one `Metrics`: its own registry, so that nothing leaks between pods of one test run
or between a parent and its forks. Names, labels and buckets stand in the catalogue below and
nowhere else. Times are seconds of the emulated timeline: what a real SuperPod would have shown, at
any pace.

Records of cores become metrics in a sink of the service that knows their meaning
(`services.gateway.metrics`); `FanOut` lets several sinks see every record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from libs.actor import Record

# A second series per counter with its time of birth would double the size of every scrape.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

TTFT_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9,
    1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.0325, 0.035, 0.0375, 0.04, 0.045,
    0.05, 0.055, 0.06, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip
KV_TRANSFER_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
DURATION_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: what it is called and what it says; `buckets` belong to histograms alone."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


BUILD_INFO = MetricSpec(
    "xds_build_info", "Always 1; the labels say what runs here.", ("version", "python", "model")
)
CLOCK_PACE = MetricSpec(
    "xds_clock_pace", "Wall seconds per emulated second; 0 means as fast as the machine can."
)
CLOCK_LAG = MetricSpec(
    "xds_clock_lag_seconds",
    "Emulated seconds by which the newest token was late: the machine is too slow for the pace.",
)
READY = MetricSpec("xds_ready", "1 while every planned member of the pod is alive.")
MEMBERS_MISSING = MetricSpec("xds_members_missing", "Planned members that are not alive.")
REQUESTS_RUNNING = MetricSpec("xds_requests_running", "Requests (choices) that have not ended.")
REQUEST_TOTAL = MetricSpec(
    "xds_request_total",
    "Requests (choices) that ended, or HTTP requests refused before any die was touched.",
    ("outcome", "finish_reason"),
)
PROMPT_TOKENS = MetricSpec("xds_prompt_tokens_total", "Prompt tokens of ended requests.")
PREFIX_CACHE_QUERIES = MetricSpec(
    "xds_prefix_cache_queries_total", "Prompt tokens of finished requests, all looked for."
)
PREFIX_CACHE_HITS = MetricSpec(
    "xds_prefix_cache_hits_total", "Prompt tokens of finished requests found in the prefix cache."
)
GENERATION_TOKENS = MetricSpec("xds_generation_tokens_total", "Tokens shown to clients.")
TIME_TO_FIRST_TOKEN = MetricSpec(
    "xds_time_to_first_token_seconds", "From arrival to the first token.", (), TTFT_BUCKETS
)
INTER_TOKEN_LATENCY = MetricSpec(
    "xds_inter_token_latency_seconds", "Between two tokens of one stream.", (), TPOT_BUCKETS
)
TIME_PER_OUTPUT_TOKEN = MetricSpec(
    "xds_request_time_per_output_token_seconds",
    "Mean time per token after the first, one observation per request.",
    (),
    TPOT_BUCKETS,
)
REQUEST_DURATION = MetricSpec(
    "xds_request_duration_seconds", "From arrival to the end of a request.", (), DURATION_BUCKETS
)
REQUEST_QUEUE = MetricSpec(
    "xds_request_queue_seconds", "From arrival to the start of prefill.", (), TTFT_BUCKETS
)
REQUEST_PREFILL = MetricSpec(
    "xds_request_prefill_seconds", "Prefill of one request.", (), TTFT_BUCKETS
)
REQUEST_TRANSFER = MetricSpec(
    "xds_request_transfer_seconds",
    "KV transfer of one request from prefill to decode.",
    (),
    KV_TRANSFER_BUCKETS,
)
REQUEST_DECODE = MetricSpec(
    "xds_request_decode_seconds", "From the first token to the last.", (), DURATION_BUCKETS
)

LINK_UTILIZATION = MetricSpec(
    "xds_fabric_link_utilization_ratio",
    "Busy part of the last second or so of one link that carries anything, in emulated time.",
    ("plane", "direction", "link"),
)
FABRIC_BYTES = MetricSpec(
    "xds_fabric_bytes_total", "Bytes charged to the links of one plane.", ("plane",)
)
FABRIC_FRAMES = MetricSpec("xds_fabric_frames_total", "Frames that crossed one plane.", ("plane",))


class Metrics:
    """The metrics of one process; each spec may be made once."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def counter(self, spec: MetricSpec) -> Counter:
        """A counter; its name ends in `_total`."""
        assert spec.name.endswith("_total"), spec.name
        assert not spec.buckets, spec.name
        return Counter(spec.name, spec.help, spec.labels, registry=self._registry)

    def gauge(self, spec: MetricSpec) -> Gauge:
        """A gauge."""
        assert not spec.name.endswith("_total"), spec.name
        assert not spec.buckets, spec.name
        return Gauge(spec.name, spec.help, spec.labels, registry=self._registry)

    def histogram(self, spec: MetricSpec) -> Histogram:
        """A histogram of seconds or bytes, with the buckets of the catalogue."""
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name
        assert spec.buckets, spec.name
        return Histogram(
            spec.name, spec.help, spec.labels, registry=self._registry, buckets=spec.buckets
        )

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition for a scraper that accepts `accept`: body and content type."""
        encode, content_type = exposition.choose_encoder(accept)
        return encode(self._registry), content_type


class Sink(Protocol):
    """Takes domain facts; what hosts call a record sink."""

    def record(self, actor: str, at_ns: int, record: Record) -> None:
        """Take one fact."""
        ...


class FanOut:
    """Hands every record to several sinks, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def record(self, actor: str, at_ns: int, record: Record) -> None:
        """One fact, to each."""
        for sink in self._sinks:
            sink.record(actor, at_ns, record)
