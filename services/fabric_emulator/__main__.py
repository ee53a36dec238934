"""`python -m services.fabric_emulator`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.fabric_emulator.shell import build

main(build)
