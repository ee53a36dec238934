"""`python -m services.distflow`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.distflow.shell import build

main(build)
