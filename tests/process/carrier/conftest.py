from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.carrier.segment import DEFAULT_ROOT, ShmPlan, make_segments
from tests.process.carrier.dies import DIES, LAYOUT, Children, Host


@pytest.fixture
def root() -> Iterator[Path]:
    """A place of our own in the real shared memory, where nothing may be left at the end."""
    with tempfile.TemporaryDirectory(prefix="xds-test-", dir=DEFAULT_ROOT) as place:
        yield Path(place)
        assert os.listdir(place) == []


@pytest.fixture
def plan(root: Path, request: pytest.FixtureRequest) -> Iterator[ShmPlan]:
    """The parameter, if any: whether the carrier adds checksums; frames have their own."""
    checksum = getattr(request, "param", False)
    with make_segments(DIES, root=root, layout=LAYOUT, checksum=checksum) as made:
        yield made


@pytest.fixture
def host(plan: ShmPlan) -> Iterator[Host]:
    made = Host(plan)
    yield made
    made.close()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.kill_all()
