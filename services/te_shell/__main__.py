"""`python -m services.te_shell`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.te_shell.shell import build

main(build)
