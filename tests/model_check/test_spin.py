"""The Promela model of send/receive: exhaustive, and sensitive to each protection.

What is explored without a gap: two dies, a ring of two slots, three chunks through it, one crash
with restart of either die at any point, any write lost, one of them landing twice and late. With
each of the four protections taken away there is a counterexample of the kind that protection is
for. `make model-check` insists on the tools, as CI does (`XDS_REQUIRE_SPIN=1`); elsewhere a machine
that lacks them skips.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "proto/spin/p2p.pml"
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker says."""

    errors: int
    states: int
    complete: bool
    violated: str


@pytest.fixture(autouse=True)
def _tools() -> None:
    if not MISSING:
        return
    reason = f"{' and '.join(MISSING)} not installed (Debian: apt-get install spin gcc)"
    if os.environ.get("XDS_REQUIRE_SPIN") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def check(folder: Path, *flags: str) -> Verdict:
    """Generate, compile and run the checker for one variant of the model."""
    subprocess.run(["spin", *flags, "-a", MODEL], cwd=folder, check=True, capture_output=True)
    build = ["gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    run = ["./pan", "-m2000", "-w24"]
    text = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=110).stdout
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+) states, stored", text)
    assert errors is not None, text
    assert states is not None, text
    cut_short = "Search not completed" in text or "max search depth too small" in text
    violated = re.search(r"assertion violated (.*) \(at depth", text)
    return Verdict(
        int(errors[1]), int(states[1]), not cut_short, "" if violated is None else violated[1]
    )


def test_the_model_is_as_large_as_it_is_said_to_be() -> None:
    text = MODEL.read_text()
    assert len(re.findall(r"^active proctype (Sender|Receiver)\b", text, re.MULTILINE)) == 2
    for bound in (r"#define SLOTS +2\b", r"#define CHUNKS +3\b", r"#define DOUBLES +1\b"):
        assert re.search(bound, text), bound
    crashes = re.findall(r"atomic { crashes == 0 .*?reset_(\w+)", text, re.DOTALL)
    assert crashes == ["sender", "receiver"], "either die may crash, and one of them does so once"


@pytest.mark.slow
def test_no_interleaving_breaks_the_protocol(tmp_path: Path) -> None:
    verdict = check(tmp_path)
    assert verdict.errors == 0, verdict
    assert verdict.complete
    assert verdict.states > 1_000_000, "the model has become smaller than it should be"


@pytest.mark.parametrize(
    ("flag", "violated"),
    [
        ("-DNO_DATA_FENCE", "(got==wanted)"),
        ("-DNO_ACK_FENCE", "payload"),
        ("-DNO_GENERATION", "(got==wanted)"),
        ("-DNO_ATTEMPT", "(got==wanted)"),
    ],
)
def test_each_protection_is_needed(tmp_path: Path, flag: str, violated: str) -> None:
    verdict = check(tmp_path, flag)
    assert verdict.errors == 1, verdict
    assert violated in verdict.violated


def test_transfers_do_end_in_the_model(tmp_path: Path) -> None:
    verdict = check(tmp_path, "-DREACHABLE")
    assert verdict.errors == 1
    assert verdict.violated == "0"
