"""What the links of a running pod carry, as operators see it."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs import units
from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from services.cli.client import PodClient
from services.gateway.links import SILENT_NS
from services.pod.state import PodState

pytestmark = pytest.mark.pod

#: Real seconds in which a report must have come, or gone.
SOON_S = units.to_s(SILENT_NS) + 10
LONG = {"model": "xds-tiny", "prompt": "Emma", "max_tokens": 900, "ignore_eos": True}


async def scraped(pod: PodState) -> dict[tuple[str, ...], float]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{pod.base_url}/metrics") as response,
    ):
        text = await response.text()
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("xds_fabric_")
    }


def ingress_of(die: int) -> tuple[str, ...]:
    """The series of one ingress link; labels in alphabetical order."""
    return "xds_fabric_link_utilization_ratio", "ingress", str(die), "ub"


async def test_links_are_busy_while_requests_run_and_idle_when_none_does(pod: PodState) -> None:
    plan = plan_pod(load_topology(pod.topology))
    dies = [actor.dies[0] for actor in plan.of_role("decode_te")]
    before = (await scraped(pod)).get(("xds_fabric_bytes_total", "ub"), 0)

    async def read() -> None:
        async with PodClient(pod.base_url) as client:
            async for _ in client.stream("/v1/completions", LONG):
                pass

    readers = [asyncio.create_task(read()) for _ in range(4)]
    try:
        busy, links = await _until_busy(pod, dies)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert all(0 < busy[ingress_of(die)] <= 1 for die in dies)
    assert busy["xds_fabric_bytes_total", "ub"] > before
    assert any(link["direction"] == "egress" for link in links)
    await _until_idle(pod)


async def _until_busy(
    pod: PodState, dies: list[int]
) -> tuple[dict[tuple[str, ...], float], list[dict[str, object]]]:
    """The metrics once every decode die receives, and the busiest links by status."""
    async with PodClient(pod.base_url) as client, asyncio.timeout(SOON_S):
        while True:
            found = await scraped(pod)
            if all(ingress_of(die) in found for die in dies):
                _, status = await client.get("/xds/status")
                return found, status["links"]["busiest"]
            await asyncio.sleep(0.1)


async def _until_idle(pod: PodState) -> None:
    for _ in range(round(SOON_S / 0.1)):
        if not any(name[0].endswith("_ratio") for name in await scraped(pod)):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("links look busy though nothing runs")
