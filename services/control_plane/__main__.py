"""`python -m services.control_plane`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.control_plane.shell import build

main(build)
