from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.runner import Block, parse, render, rerun, run

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_scenario_happens_as_recorded(path: Path, request: pytest.FixtureRequest) -> None:
    now = rerun(path)
    if request.config.getoption("--rewrite"):
        path.write_text(now, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == now


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_scenario_begins_with_a_paragraph_for_its_reader(path: Path) -> None:
    first = parse(path.read_text(encoding="utf-8"))[0]
    assert not first.command
    assert len(" ".join(first.text)) > 100


def test_a_script_survives_being_read_and_written() -> None:
    blocks = [Block(("# Prose,", "# two lines.")), Block(("one", "two"), 'run until="a: b"')]
    assert parse(render(blocks)) == blocks


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("pod", "'pod' is not followed by ----"),
        ("dance\n----\n", "unknown command 'dance'; known are pod, "),
        ("pod\n----\n\nrun fast=1\n----\n", "run needs until=, for= or ended="),
    ],
)
def test_a_mistake_in_a_script_is_named(script: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run(parse(script))
