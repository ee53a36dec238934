from __future__ import annotations

import gc

import pytest

from services.superpod.bench_jitter import STRETCH, Meter, run


def test_ways_alternate_and_each_counts_its_own_pauses() -> None:
    meter = Meter()
    gc.callbacks.append(meter.count)
    try:
        for number in range(4 * STRETCH):
            meter.next_iteration()
            assert gc.isenabled() == (number // STRETCH % 2 == 0)
            if number == STRETCH // 2:
                gc.collect()
    finally:
        gc.callbacks.remove(meter.count)
        gc.enable()
        gc.unfreeze()
    assert meter.ways["automatic"].pauses.collections >= 1
    assert meter.ways["manual"].pauses.collections == 0, "the chosen moment is no pause"


@pytest.mark.slow
def test_both_ways_are_measured_in_one_run_and_the_manual_one_never_pauses() -> None:
    automatic, manual = run(tokens=64)["rows"]
    assert automatic["gc"] == "automatic"
    assert min(automatic["iterations"], manual["iterations"]) >= STRETCH
    assert automatic["pauses_in_iterations"] > 0 == manual["pauses_in_iterations"]
    for row in (automatic, manual):
        assert 0 < row["first_dispatch_ms"] <= row["first_dispatch_ms_p99"]
