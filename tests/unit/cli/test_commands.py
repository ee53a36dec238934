"""Commands that need no pod: exit codes, JSON, one sentence per mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.app import app
from services.pod.state import PodState, write_state

runner = CliRunner()


def run(*arguments: str) -> Result:
    return runner.invoke(app, list(arguments))


def as_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_topology_lists_every_actor_and_places_every_expert_once() -> None:
    data = as_json("topology")
    assert len(data["actors"]) == data["processes"]
    experts = [
        expert for dies in data["experts"].values() for ids in dies.values() for expert in ids
    ]
    assert sorted(experts) == list(range(17))
    drawing = run("topology")
    assert drawing.exit_code == 0
    assert "prefill TE p0" in drawing.stdout


def test_a_bad_topology_reports_each_problem_with_its_path(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: X\nprefill_tes: []\ndecode_tes: [{name: d0, dp_group: 2}]\n")
    result = run("topology", "--topology", str(bad))
    assert result.exit_code == 2
    for path in ("name:", "prefill_tes:", "decode_tes.0.dp_group:"):
        assert path in result.stderr
    answer = as_json("up", "--detach", "--topology", str(bad))
    assert answer["ok"] is False


def test_model_info_counts_parameters() -> None:
    info = as_json("model", "info")
    assert info
    assert run("model", "info").exit_code == 0


def test_an_unknown_checkpoint_is_bad_input() -> None:
    result = run("model", "info", "--checkpoint", "nowhere")
    assert result.exit_code == 2
    assert "xds-tiny" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "--host", "moon"),
        ("verify", "--topology", "nowhere"),
        ("up", "--log", "loud"),
        ("up", "--pace", "-1"),
        ("verify", "--requests", "0"),
        ("verify", "--host", "sim", "--carrier", "pigeon"),
        ("verify", "--carrier", "pigeon"),
        ("up", "--carrier", "pigeon"),
    ],
)
def test_bad_options_exit_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_commands_that_need_a_pod_say_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDS_STATE", str(tmp_path))
    for arguments in (("status",), ("chat", "hello"), ("verify", "--host", "pod")):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "xds up" in result.stderr
    assert run("down").exit_code == 0


def test_a_simulation_takes_the_carriers_way_of_stamping() -> None:
    few = ("verify", "--host", "sim", "--requests", "2")
    by_broker, by_memory = as_json(*few), as_json(*few, "--carrier", "shm")
    assert (by_broker["carrier"], by_memory["carrier"]) == ("nats", "shm")
    assert by_broker["timeline_hash"] == by_memory["timeline_hash"]


def test_another_carrier_than_the_running_pods_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDS_STATE", str(tmp_path))
    write_state(PodState(os.getpid(), 1, "nats://nowhere", "mini", 1.0, 0, "nats", {}))
    result = run("verify", "--host", "pod", "--carrier", "shm")
    assert result.exit_code == 2
    assert "the running pod's carrier is nats" in result.stderr


def test_verify_reports_every_count() -> None:
    report = as_json("verify", "--requests", "3", "--seed", "1")
    assert report["ok"] is True
    for key in ("mismatched", "lost", "duplicated"):
        assert report[key] == 0
    assert report["completed"] + report["cancelled"] == 3
