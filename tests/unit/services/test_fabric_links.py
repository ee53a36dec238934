"""What a shard tells of its links: everything once, in bounded messages, and then silence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs import units
from libs.actor import Send, SetTimer
from libs.fabric.params import UB
from libs.fabric.superpod import SuperPod
from libs.units import transfer_ns
from libs.wire.codec import encode_frame
from libs.wire.envelope import Envelope
from libs.wire.fabric import LinkReport, LinkRow, PlaneTotal, UbFrame
from services.fabric_emulator.core import FabricEmulatorCore
from services.fabric_emulator.links import PERIOD_NS, ROWS_MAX
from tests.support.bench import Bench, Effects

PAYLOAD = np.zeros(8, np.uint8)
#: A tenth of a second of a UB link.
TENTH = UB.ub_bytes_per_s // 10
TENTH_NS = units.ms(100)


class LinksBench(Bench):
    """A shard whose timer the test fires."""

    def __init__(self, num_dies: int = 8, pod: SuperPod | None = None) -> None:
        core = FabricEmulatorCore("fabric_emulator.0", num_dies, pod=pod, check=True)
        super().__init__(core)
        self.timer = self.start().one(SetTimer, name="links")

    def send(self, source: int, target: int, begin_ns: int, nbytes: int = TENTH) -> None:
        """A frame whose sender reserved its egress."""
        self.take(UbFrame(source, target, begin_ns, nbytes, 1, PAYLOAD, begin_ns))

    def tick(self) -> Effects:
        """A period later."""
        effects = self.fire(self.timer)
        self.timer = effects.one(SetTimer, name="links")
        return effects

    def report(self) -> LinkReport:
        """The report of one period."""
        send = self.tick().one(Send, subject="xds.links")
        assert isinstance(send.message, LinkReport)
        return send.message


@pytest.fixture
def bench() -> LinksBench:
    return LinksBench()


def busy(report: LinkReport) -> dict[tuple[str, str, int], int]:
    return {(row.plane, row.direction, row.link): row.busy_ns for row in report.links}


def test_a_window_is_what_both_links_of_a_frame_carried_since_the_last_one(
    bench: LinksBench,
) -> None:
    bench.send(0, 1, units.ms(10))
    bench.send(0, 2, units.ms(300), TENTH // 2)
    report = bench.report()
    assert (report.begin_ns, report.end_ns) == (0, PERIOD_NS)
    assert report.links == (
        LinkRow("ub", 0, "egress", 2, TENTH + TENTH // 2, TENTH_NS + TENTH_NS // 2),
        LinkRow("ub", 1, "ingress", 1, TENTH, TENTH_NS),
        LinkRow("ub", 2, "ingress", 1, TENTH // 2, TENTH_NS // 2),
    )
    assert report.totals == (PlaneTotal("ub", 2, TENTH + TENTH // 2),)


def test_links_at_rest_say_so_once_and_are_silent_then(bench: LinksBench) -> None:
    assert not bench.tick().has(Send), "nothing has ever moved"
    bench.send(0, 1, bench.now_ns)
    assert bench.report().links
    rest = bench.report()
    assert rest.links == ()
    assert rest.totals == (PlaneTotal("ub", 1, TENTH),), "totals stay"
    assert not bench.tick().has(Send)
    bench.send(0, 1, bench.now_ns)
    assert bench.report().begin_ns == bench.now_ns - PERIOD_NS, "silence is not part of a window"


def test_a_frame_over_the_edge_of_a_window_is_in_both_with_its_part(bench: LinksBench) -> None:
    bench.send(0, 1, PERIOD_NS - TENTH_NS // 4)
    first, second = bench.report(), bench.report()
    assert busy(first)["ub", "egress", 0] == TENTH_NS // 4
    assert busy(second)["ub", "egress", 0] == TENTH_NS - TENTH_NS // 4
    assert second.links[0].frames == 0, "a frame counts where it was seen"


def test_a_frame_that_comes_late_for_its_window_is_in_the_next(bench: LinksBench) -> None:
    bench.send(0, 1, units.ms(500))
    bench.report()
    bench.send(0, 1, units.ms(100))
    assert busy(bench.report())["ub", "ingress", 1] == TENTH_NS


def test_in_an_unpaced_pod_a_window_waits_until_time_goes_on(bench: LinksBench) -> None:
    bench.send(0, 1, 0)
    assert not bench.fire("links").has(Send)
    assert bench.report().links[0].frames == 1


def test_a_report_has_a_bound_and_says_how_many_links_it_left_out() -> None:
    bench = LinksBench(SuperPod().num_dies)
    pairs = ROWS_MAX // 2 + 20
    for number in range(pairs):
        bench.send(2 * number, 2 * number + 1, 0, TENTH + number * 196_000)
    send = bench.tick().one(Send)
    report = send.message
    assert (len(report.links), report.left_out) == (ROWS_MAX, 40)
    assert report.totals[0].frames == pairs, "totals know no bound"
    kept = [row.busy_ns for row in report.links]
    assert kept == sorted(kept, reverse=True)
    assert min(kept) >= TENTH_NS + 20_000, "the idlest were left out"


def test_the_longest_report_is_still_a_control_message() -> None:
    most = 1 << 62
    row = LinkRow("roce", most, "ingress", most, most, most)
    totals = tuple(PlaneTotal(plane, most, most) for plane in ("roce", "ub", "vpc"))
    report = LinkReport(most, most, (row,) * ROWS_MAX, most, totals)
    encode_frame(Envelope("fabric_emulator.d767", most, most, most), report)


FRAMES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 3_000), st.integers(0, 4)),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(FRAMES)
def test_all_windows_together_are_all_that_was_carried(
    frames: list[tuple[int, int, int, int]],
) -> None:
    bench, carried = LinksBench(), [0, 0, 0]
    for source, target, begin_ms, tenths in frames:
        bench.send(source, target, units.ms(begin_ms), tenths * TENTH)
        carried[0] += 1
        carried[1] += tenths * TENTH
        carried[2] += transfer_ns(tenths * TENTH, UB.ub_bytes_per_s)
        if begin_ms % 3 == 0:
            add(bench, carried)
    for _ in range(40):
        add(bench, carried)
    assert carried == [0, 0, 0], "all of it, once per direction"


def add(bench: LinksBench, carried: list[int]) -> None:
    for send in bench.tick().all(Send):
        for row in send.message.links:
            if row.direction == "ingress":
                carried[0] -= row.frames
                carried[1] -= row.nbytes
                carried[2] -= row.busy_ns
