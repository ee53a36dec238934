"""One embedded pod for the session: real processes, a real broker, ten times real speed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from libs.model.resources import ModelResources
from services.cli.lifecycle import free_port, start_pod, stop_pod
from services.pod.options import UpOptions
from services.pod.state import PodState


@pytest.fixture(scope="session")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodState]:
    """A ready pod of the mini topology, validating every core after every event."""
    folder = tmp_path_factory.mktemp("pod")
    before = os.environ.get("XDS_STATE")
    os.environ["XDS_STATE"] = str(folder)
    options = UpOptions("mini", pace=0.1, http_port=free_port(), log="warning", validate=True)
    state = start_pod(options)
    try:
        yield state
    finally:
        stop_pod(state)
        if before is None:
            del os.environ["XDS_STATE"]
        else:
            os.environ["XDS_STATE"] = before


@pytest.fixture(scope="session")
def model() -> ModelResources:
    """The model the pod serves, for the reference."""
    return ModelResources("xds-tiny")
