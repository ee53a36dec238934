"""The catalogue of metrics and the sinks that fill it."""

from __future__ import annotations

import pytest

from libs.actor import Record
from libs.telemetry import metrics
from libs.telemetry.metrics import FanOut, Metrics, MetricSpec

CATALOGUE = [item for item in vars(metrics).values() if isinstance(item, MetricSpec)]


class Seen:
    def __init__(self) -> None:
        self.records: list[tuple[str, int, str]] = []

    def record(self, actor: str, at_ns: int, record: Record) -> None:
        self.records.append((actor, at_ns, record.name))


def test_every_record_reaches_every_sink() -> None:
    first, second = Seen(), Seen()
    FanOut(first, second).record("gateway.0", 7, Record("token", {"gap_ns": 1}))
    assert first.records == second.records == [("gateway.0", 7, "token")]


def test_names_are_the_pods_own_and_declared_once() -> None:
    names = [spec.name for spec in CATALOGUE]
    assert len(names) == len(set(names))
    assert all(name.startswith("xds_") for name in names)


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_every_declared_metric_can_be_made_and_is_exposed(spec: MetricSpec) -> None:
    made = Metrics()
    if spec.buckets:
        made.histogram(spec)
    elif spec.name.endswith("_total"):
        made.counter(spec)
    else:
        made.gauge(spec)
    text = made.expose()[0].decode()
    assert f"# HELP {spec.name} {spec.help}" in text


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    one, other = Metrics(), Metrics()
    one.counter(metrics.PROMPT_TOKENS).inc(5)
    other.counter(metrics.PROMPT_TOKENS)
    assert b"xds_prompt_tokens_total 5.0" in one.expose()[0]
    assert b"xds_prompt_tokens_total 0.0" in other.expose()[0]


def test_counters_have_no_second_series_with_their_time_of_birth() -> None:
    made = Metrics()
    made.counter(metrics.GENERATION_TOKENS).inc()
    assert b"_created" not in made.expose()[0]
