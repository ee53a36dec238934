from __future__ import annotations

import pytest

from libs.model.resources import ModelResources


@pytest.fixture(scope="session")
def model() -> ModelResources:
    """The shipped checkpoint, loaded once."""
    resources = ModelResources("xds-tiny")
    resources.engine()
    return resources
