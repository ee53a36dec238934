"""Reports of the fabric's shards, put together: sums, silence, other lives, what is no report."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from libs import units
from libs.actor import CancelTimer, Record, SetTimer, TimerFired
from libs.wire.fabric import LinkReport, LinkRow, PlaneTotal
from services.cli.status_view import status_tables
from services.gateway.core import GatewayConfig, GatewayCore
from services.gateway.links import REPORTERS_MAX, SILENT_NS
from services.gateway.status import BUSIEST_LINKS_MAX
from services.pod.state import PodState
from tests.support.bench import Bench, Effects
from tests.unit.gateway.fake_pod import Running, gateway

ONE, OTHER = "fabric_emulator.d1", "fabric_emulator.d2"
SECOND = units.s(1)


def row(link: int, direction: str = "ingress", busy: float = 0.25, plane: str = "ub") -> LinkRow:
    """A link that was busy for a part of one second, at a byte per nanosecond."""
    busy_ns = round(busy * SECOND)
    return LinkRow(plane, link, direction, 10, busy_ns, busy_ns)


def report(*rows: LinkRow, frames: int = 0, window_ns: int = SECOND, left_out: int = 0) -> Any:
    totals = (PlaneTotal("ub", frames, 100 * frames),)
    return LinkReport(5 * SECOND, 5 * SECOND + window_ns, rows, left_out, totals)


class LinksBench(Bench):
    core: GatewayCore

    def __init__(self) -> None:
        self.core = GatewayCore(GatewayConfig("gateway.0", 4))
        super().__init__(self.core)

    def hear(self, told: LinkReport, sender: str = ONE, life: int = 1) -> Effects:
        return self.take(told, sender=sender, incarnation=life)

    def busy(self) -> dict[tuple[str, int], float]:
        return {(load.direction, load.link): load.utilization for load in self.core.links.loads()}

    def frames(self) -> dict[str, int]:
        return {total.plane: total.frames for total in self.core.links.carried()}


@pytest.fixture
def bench() -> LinksBench:
    return LinksBench()


def test_parts_of_one_egress_link_are_added_up_each_by_its_own_window(bench: LinksBench) -> None:
    bench.hear(report(row(0, "egress"), row(1)))
    bench.hear(report(row(0, "egress", busy=1.0), row(2), window_ns=2 * SECOND), OTHER)
    assert bench.busy() == {("egress", 0): 0.75, ("ingress", 1): 0.25, ("ingress", 2): 0.125}
    busiest = bench.core.links.loads()[0]
    assert (busiest.direction, busiest.bytes_per_s) == ("egress", 0.75e9)
    assert busiest.frames_per_s == 10 + 5


def test_the_next_report_of_a_shard_replaces_its_last(bench: LinksBench) -> None:
    bench.hear(report(row(1)))
    bench.hear(report(row(2), left_out=3))
    assert bench.busy() == {("ingress", 2): 0.25}
    assert bench.core.links.left_out() == 3
    assert bench.hear(report()).has(CancelTimer, name=f"links:{ONE}")
    assert bench.busy() == {}
    assert bench.core.links.left_out() == 0


def test_a_shard_that_falls_silent_is_forgotten_and_its_totals_are_not(bench: LinksBench) -> None:
    timer = bench.hear(report(row(1), frames=7)).one(SetTimer)
    assert (timer.name, timer.delay_ns) == (f"links:{ONE}", SILENT_NS)
    bench.hear(report(row(2), frames=1), OTHER)
    bench.step(TimerFired(bench.now_ns, timer.name))
    assert bench.busy() == {("ingress", 2): 0.25}
    bench.hear(report(row(1), frames=9))
    assert bench.frames() == {"ub": 10}, "only what is new since its last report is added"


def test_totals_survive_lost_repeated_and_overtaken_reports(bench: LinksBench) -> None:
    for frames in (4, 4, 20, 11):
        bench.hear(report(row(1), frames=frames))
    assert bench.frames() == {"ub": 20}


def test_a_new_life_of_a_shard_counts_from_nothing_and_the_old_one_no_more(
    bench: LinksBench,
) -> None:
    bench.hear(report(row(1), frames=20))
    bench.hear(report(row(2), frames=30), life=2)
    assert bench.hear(report(row(1), frames=25), life=1) == []
    assert bench.frames() == {"ub": 50}
    assert bench.busy() == {("ingress", 2): 0.25}


@pytest.mark.parametrize(
    "bad",
    [
        report(row(1, plane="moon")),
        report(row(1, direction="sideways")),
        report(row(-1)),
        report(row(1, busy=-0.5)),
        report(row(1), window_ns=0),
        report(row(1), window_ns=-1),
        report(left_out=-1),
        report(frames=-1),
    ],
)
def test_what_cannot_be_a_report_is_recorded_and_changes_nothing(
    bench: LinksBench, bad: LinkReport
) -> None:
    bench.hear(report(row(1), frames=3))
    refused = bench.hear(bad).one(Record, name="link_report_refused")
    assert refused.fields == {"reporter": ONE}
    assert bench.busy() == {("ingress", 1): 0.25}
    assert bench.frames() == {"ub": 3}


def test_the_number_of_reporters_is_bounded(bench: LinksBench) -> None:
    for number in range(REPORTERS_MAX):
        bench.hear(report(row(number)), f"fabric_emulator.d{number}")
    assert bench.hear(report(row(1)), "fabric_emulator.more").has(Record)
    assert not bench.hear(report(row(1)), ONE).has(Record), "known ones still count"


# ---------------------------------------------------------------- what operators see


async def scraped(running: Running) -> dict[str, float]:
    async with running.http.get(running.url + "/metrics") as response:
        text = await response.text()
    return {
        ",".join([sample.name, *sorted(sample.labels.values())]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("xds_fabric_")
    }


async def status_of(running: Running) -> Any:
    async with running.http.get(running.url + "/xds/status") as response:
        return await response.json()


async def test_metrics_show_links_while_they_are_busy_and_count_for_ever() -> None:
    async with gateway() as running:
        running.pod.receive(report(row(3, "egress"), row(4, busy=0.5), frames=6), ONE)
        busy = await scraped(running)
        running.pod.receive(report(frames=8), ONE)
        rest = await scraped(running)
    assert busy == {
        "xds_fabric_link_utilization_ratio,3,egress,ub": 0.25,
        "xds_fabric_link_utilization_ratio,4,ingress,ub": 0.5,
        "xds_fabric_bytes_total,ub": 600,
        "xds_fabric_frames_total,ub": 6,
    }
    assert rest == {"xds_fabric_bytes_total,ub": 800, "xds_fabric_frames_total,ub": 8}


async def test_status_shows_the_busiest_links_and_how_many_more_there_are() -> None:
    rows = [row(link, busy=link / 100) for link in range(1, BUSIEST_LINKS_MAX + 3)]
    async with gateway() as running:
        running.pod.receive(report(*rows, left_out=5), ONE)
        links = (await status_of(running))["links"]
    assert [link["link"] for link in links["busiest"]] == list(range(BUSIEST_LINKS_MAX + 2, 2, -1))
    assert links["busiest"][0]["utilization"] == pytest.approx((BUSIEST_LINKS_MAX + 2) / 100)
    assert links["others"] == 2 + 5


async def test_the_command_line_prints_them_in_a_small_table() -> None:
    async with gateway() as running:
        idle = await status_of(running)
        running.pod.receive(report(row(4, busy=0.5), left_out=2), ONE)
        busy = await status_of(running)
    assert "GB/s" not in printed(idle)
    lines = [line.split() for line in printed(busy).splitlines()]
    assert ["ub", "4", "ingress", "50.000", "%", "0.500", "10"] in lines
    assert ["and", "2", "more"] in lines


def printed(status: dict[str, Any]) -> str:
    state = PodState(1, 8000, "", "mini", pace=0.1, epoch_ns=0, carrier="nats", actors={})
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        for table in status_tables(state, status):
            console.print(table)
    return capture.get()
