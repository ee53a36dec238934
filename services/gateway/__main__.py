"""`python -m services.gateway`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.gateway.shell import build

main(build)
