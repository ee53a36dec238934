"""`xds bench xccl` and `xds bench fabric`: one document, the named figures, one clear mistake."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli import bench_xccl
from services.cli.app import app
from services.superpod import bench_fabric

runner = CliRunner()


def run(*arguments: str) -> Result:
    return runner.invoke(app, ["bench", *arguments])


def must_not_run() -> dict[str, Any]:
    raise AssertionError("nothing is measured after a mistake")


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_fabric, "run", must_not_run)
    for part in bench_xccl.PARTS:
        monkeypatch.setitem(bench_xccl.PARTS, part, must_not_run)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts that take no time, with every kind of list."""
    p2p = {"p2p_ratio_9mb": 2.6, "by_construction": ["p2p_ratio_9mb"], "grid": [1], "paths": [2]}
    collectives = {"a2e_us": 172.0, "by_construction": ["a2e_us"], "grid": [3]}
    monkeypatch.setitem(bench_xccl.PARTS, "p2p", lambda: p2p)
    monkeypatch.setitem(bench_xccl.PARTS, "collectives", lambda: collectives)


# ---------------------------------------------------------------- parts


@pytest.mark.usefixtures("small")
def test_without_a_part_everything_is_one_report() -> None:
    report = json.loads(run("xccl", "--json").stdout)
    assert report == {
        "p2p_ratio_9mb": 2.6,
        "a2e_us": 172.0,
        "by_construction": ["p2p_ratio_9mb", "a2e_us"],
        "paths": [2],
        "grid": [1, 3],
    }
    table = run("xccl").stdout
    assert "more than 2.5" in table
    assert "3 points" in table


@pytest.mark.usefixtures("small")
def test_a_part_leaves_the_other_out() -> None:
    report = json.loads(run("xccl", "collectives", "--json").stdout)
    assert report["grid"] == [3]
    assert "p2p_ratio_9mb" not in report


@pytest.mark.usefixtures("nothing_runs")
def test_an_unknown_part_is_named() -> None:
    result = run("xccl", "gossip")
    assert result.exit_code == 2
    assert "part is one of p2p, collectives" in result.stderr
    answer = json.loads(run("xccl", "gossip", "--json").stdout)
    assert answer["field"] == "part"


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("command", ["xccl", "fabric"])
@pytest.mark.usefixtures("nothing_runs")
def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(command, "--plot", str(tmp_path))
    assert result.exit_code == 2
    assert 'pip install "xdeepserve[plot]"' in result.stderr


@pytest.mark.usefixtures("nothing_runs")
def test_a_folder_that_cannot_be_one_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for folder in (taken, taken / "below"):
        result = run("fabric", "--plot", str(folder))
        assert result.exit_code == 2
        assert str(folder) in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    answer = json.loads(run("fabric", "--plot", str(taken), "--json").stdout)
    assert answer["field"] == "plot"


def drawn(report: dict[str, Any], folder: Path) -> set[str]:
    """The names of the figures, each there as PNG and SVG."""
    for path in map(Path, report["figures"]):
        assert path.parent == folder
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in content
        assert len(content) > 10_000, "not an empty figure"
    names = [Path(path).stem for path in report["figures"]]
    assert all(names.count(name) == 2 for name in names)
    return set(names)


# ---------------------------------------------------------------- the real thing


def test_fabric_prints_one_document_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.loads(run("fabric", "--json", "--plot", str(tmp_path)).stdout)
    assert report["ub_gb_per_s"] == pytest.approx(196, rel=0.01)
    assert report["frames_per_s"] > 1_000
    assert {row["what"] for row in report["grid"]} == {
        "latency", "uniform", "incast", "fan_out", "in_flight", "load",
    }  # fmt: skip
    assert drawn(report, tmp_path) == {"fabric_latency", "fabric_sharing"}
    monkeypatch.setattr(bench_fabric, "run", lambda: report)
    table = run("fabric").stdout
    for line in ("ub_us_512b", "9,437,184", "load of a link"):
        assert line in table


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_xccl_reproduces_what_is_published_over_the_whole_grids(tmp_path: Path) -> None:
    report = json.loads(run("xccl", "--json", "--plot", str(tmp_path)).stdout)
    assert report["p2p_us_1mib_2aiv"] < 20
    assert report["p2p_ratio_9mb"] >= 2.5
    assert report["p2p_us_max"] <= 140
    assert 16 <= report["crossover_batch"] <= 64
    assert report["a2e_us"] == pytest.approx(172, rel=0.03)
    assert report["e2a_us"] == pytest.approx(193, rel=0.03)
    assert 0.4 < report["trampoline_breakeven_us"] < 0.7
    assert report["trampoline_breakeven_e2a_us"] is None, "fewer peers the way back"
    assert report["same_under_sim_host"]
    assert_fig5([row for row in report["grid"] if row["figure"] == "5"])
    assert_fig6([row for row in report["grid"] if row["figure"] == "6"])
    domains = [row for row in report["grid"] if row["what"] == "domain"]
    assert {(row["attention"], row["experts"]) for row in domains} == {(160, 288)}
    assert drawn(report, tmp_path) == {
        "fig5_p2p", "fig6_dispatch_combine", "a2e_e2a_trampolines",
    }  # fmt: skip


def assert_fig5(rows: list[dict[str, Any]]) -> None:
    """Every point, larger never faster, a further core never slower, as the law to 6 %."""
    sizes = [1024 * kb for kb in (36, 72, 144, 288, 576, 1152, 2304, 4608, 9216)]
    aivs = range(2, 49, 2)
    ns = {(row["bytes"], row["aivs"]): row["ns"] for row in rows}
    assert len(rows) == len(ns) == len(sizes) * len(aivs)
    for count in aivs:
        assert all(ns[small, count] < ns[large, count] for small, large in pairwise(sizes)), count
    for size in sizes:
        assert all(ns[size, more] <= ns[size, few] for few, more in pairwise(aivs)), size
        assert ns[size, 4] < ns[size, 2]
    for row in rows:
        assert row["us"] == pytest.approx(row["law_us"], rel=0.06), row


def assert_fig6(rows: list[dict[str, Any]]) -> None:
    """Both collectives at every batch, within the axis and 1 % of the closed form."""
    even = [row for row in rows if row["routing"] == "even"]
    wanted = {
        (what, n) for what in ("dispatch", "combine") for n in (4, 8, 16, 32, 64, 80, 96, 128)
    }
    assert {(row["what"], row["batch"]) for row in even} == wanted
    assert {row["ep"] for row in rows} == {128}
    assert all(row["us"] <= 140 for row in rows)
    assert all(row["us"] == pytest.approx(row["closed_form_us"], rel=0.01) for row in even)
