"""`python -m services.expert_die`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.expert_die.shell import build

main(build)
