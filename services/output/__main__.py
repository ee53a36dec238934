"""`python -m services.output`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.output.shell import build

main(build)
