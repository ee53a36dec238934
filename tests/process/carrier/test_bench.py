from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from libs.carrier.segment import remove_abandoned
from services.cli import bench_carrier as view
from services.superpod import bench_carrier
from tests.process.carrier.dies import PATIENCE_S, Children

WAYS = ("shm", "shm_lent", "unix", "nats")


def test_every_way_is_measured_at_every_size_and_nothing_is_left(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench_carrier.run(sizes=(4096, 1 << 20), rounds=3, root=root)
    assert [row["bytes"] for row in report["rows"]] == [4096, 1 << 20]
    for row in report["rows"]:
        for way in WAYS:
            assert 0 < row[f"{way}_us"] <= row[f"{way}_p99_us"]
        assert row["memcpy_us"] < row["nats_us"]
    assert [target["bytes"] for target in report["targets"]] == [1 << 20, 1 << 20]
    view.show(report)
    assert capsys.readouterr().out.count("met") == 2


def test_the_targets_are_judged_at_the_sizes_they_are_about() -> None:
    def row(nbytes: int, shm_us: float) -> dict[str, float]:
        return {"bytes": nbytes, "shm_us": shm_us, "memcpy_us": 100.0, "nats_us": 1000.0}

    asked = bench_carrier.targets([row(4096, 900.0), row(1 << 20, 200.0), row(4 << 20, 201.0)])
    found = [(target["bytes"], target["measured"], target["met"]) for target in asked]
    assert found == [(1 << 20, 2.0, True), (1 << 20, 5.0, True), (4 << 20, 2.01, False)]


def test_a_killed_benchmark_leaves_no_process_and_no_memory_in_use(
    root: Path, tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nobody is left to empty it
    pid = children.fork(lambda: measure_for_ever(root))
    deadline = time.perf_counter() + PATIENCE_S
    while not list(tmp_path.glob("xds-bench-*/socket")):  # the last thing that the far side opens
        assert time.perf_counter() < deadline
        time.sleep(0.01)
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(started) == 2, "the broker and the far side"
    children.kill(pid)
    while any(alive(int(child)) for child in started):
        assert time.perf_counter() < deadline, started
        time.sleep(0.01)
    assert len(remove_abandoned(root)) == 1


def measure_for_ever(root: Path) -> None:
    bench_carrier.run(sizes=(4096,), rounds=1_000_000, root=root)


def alive(pid: int) -> bool:
    """Whether it runs: one that ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
