"""What operators and dashboards read: health, readiness, models, status, metrics, request ids."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.config.topology import LimitsSection
from tests.unit.gateway.fake_pod import (
    STARTING_VIEW,
    TOKENIZER,
    Running,
    completion_body,
    failing,
    gateway,
    silent_after,
)


async def get(running: Running, path: str) -> tuple[int, Any]:
    async with running.http.get(running.url + path) as response:
        return response.status, await response.json()


async def samples(running: Running) -> dict[str, float]:
    """Every sample of `/metrics`, by `name{label=value,...}`."""
    async with running.http.get(running.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def test_health_is_about_this_process_alone() -> None:
    async with gateway(view=STARTING_VIEW) as running:
        assert await get(running, "/health") == (200, {"status": "ok", "gateway": "gateway.0"})


async def test_ready_lists_who_is_missing_until_nobody_is() -> None:
    async with gateway(view=STARTING_VIEW) as running:
        status, body = await get(running, "/ready")
    assert status == 503
    assert body["missing"] == ["decode_te.d0.dp0", "expert_die.d0.e1"]
    async with gateway() as running:
        assert await get(running, "/ready") == (
            200,
            {"status": "ready", "ready": True, "missing": []},
        )


async def test_the_model_is_listed_and_found_by_name() -> None:
    async with gateway() as running:
        _, listed = await get(running, "/v1/models")
        _, one = await get(running, "/v1/models/xds-tiny")
    assert listed["object"] == "list"
    assert listed["data"] == [one]
    assert (one["id"], one["object"]) == ("xds-tiny", "model")
    assert one["max_model_len"] == LimitsSection().context_max_tokens


async def test_status_shows_members_blocks_and_open_requests() -> None:
    async with gateway(silent_after(1)) as running:
        body = completion_body(stream=True)
        async with running.http.post(running.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            _, status = await get(running, "/xds/status")
    assert status["open_requests"] == 1
    assert status["kv_blocks"] == {
        "total": 150, "free": 140, "held": 6, "leased": 1, "in_transfer": 2, "quarantined": 1,
    }  # fmt: skip
    assert status["kv_blocks_held"] == 10
    assert [m["actor"] for m in status["members"]] == [
        "decode_te.d0.dp0", "prefill_te.p0.dp0", "output.d0.dp0",
    ]  # fmt: skip
    assert status["members"][0]["kv"]["quarantined"] == 1
    assert status["members"][2]["kv"] is None
    assert (status["ready"], status["missing"], status["epoch"]) == (True, [], 1)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("job-7:a.b_c", True), ("", False), ("a b", False), ("x" * 129, False), ("ö", False)],
)
async def test_a_sane_request_id_of_the_client_is_echoed(given: str, echoed: bool) -> None:
    async with gateway() as running:
        headers = {"X-Request-Id": given}
        _, body, answered = await running.post("/v1/completions", completion_body(), **headers)
    assert answered["X-Request-Id"] == (given if echoed else body["id"])
    assert body["xds"]["request_id"] == body["id"] != given


@pytest.mark.parametrize("path", ["/health", "/ready", "/nowhere", "/metrics"])
async def test_every_response_has_a_request_id(path: str) -> None:
    async with gateway() as running, running.http.get(running.url + path) as response:
        assert response.headers["X-Request-Id"].startswith("req-")


async def test_metrics_count_tokens_ends_and_where_time_went() -> None:
    async with gateway() as running:
        await running.complete(n=2)
        found = await samples(running)
    tokens = len(TOKENIZER.encode("Paris.")) + 1
    prompt = running.pod.submitted[0].prompt_tokens
    assert found["xds_request_total{finish_reason=stop,outcome=ok}"] == 2
    assert found["xds_generation_tokens_total"] == 2 * tokens
    assert found["xds_prompt_tokens_total"] == 2 * prompt
    assert found["xds_time_to_first_token_seconds_sum"] == pytest.approx(1.8)
    assert found["xds_time_to_first_token_seconds_bucket{le=0.9}"] == 2
    assert found["xds_time_to_first_token_seconds_bucket{le=0.8}"] == 0
    assert found["xds_inter_token_latency_seconds_count"] == 2 * (tokens - 1)
    assert found["xds_inter_token_latency_seconds_bucket{le=0.04}"] == 2 * (tokens - 1)
    assert found["xds_request_time_per_output_token_seconds_count"] == 2
    assert found["xds_request_duration_seconds_count"] == 2
    assert found["xds_request_queue_seconds_sum"] == pytest.approx(0.2)
    assert found["xds_request_prefill_seconds_sum"] == pytest.approx(1.4)
    assert found["xds_request_transfer_seconds_sum"] == pytest.approx(0.1)
    assert found["xds_request_decode_seconds_sum"] == pytest.approx(2 * 0.04 * (tokens - 1))


async def test_metrics_show_the_present_too() -> None:
    async with gateway(silent_after(1)) as running:
        body = completion_body(stream=True, n=3)
        async with running.http.post(running.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            found = await samples(running)
    assert found["xds_requests_running"] == 3
    assert found["xds_ready"] == 1
    assert found["xds_members_missing"] == 0
    assert found["xds_clock_pace"] == 0
    assert found["xds_clock_lag_seconds"] == 0
    assert any(name.startswith("xds_build_info{model=xds-tiny") for name in found)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [("peer_lost", "failed_fault"), ("backpressure", "rejected"), ("odd", "failed_internal")],
)
async def test_failures_are_counted_by_whose_fault_they_were(code: str, outcome: str) -> None:
    async with gateway(failing(code)) as running:
        await running.complete()
        found = await samples(running)
    assert found[f"xds_request_total{{finish_reason={code},outcome={outcome}}}"] == 1


async def test_refusals_of_the_edge_are_counted_once() -> None:
    async with gateway() as running:
        await running.complete(temperature=9)
        await running.complete(model="other")
        found = await samples(running)
    assert found["xds_request_total{finish_reason=bad_input,outcome=client_error}"] == 1
    assert found["xds_request_total{finish_reason=model_not_found,outcome=client_error}"] == 1


async def test_a_cancelled_request_is_counted_as_such() -> None:
    async with gateway(silent_after(1)) as running:
        body = completion_body(stream=True)
        async with running.http.post(running.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await running.pod.client_left()
        found = await samples(running)
    assert found["xds_request_total{finish_reason=client_gone,outcome=cancelled}"] == 1
    assert found["xds_requests_running"] == 0


async def test_scrapers_may_ask_for_openmetrics() -> None:
    async with gateway() as running:
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with running.http.get(running.url + "/metrics", headers=accept) as response:
            text = await response.text()
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
