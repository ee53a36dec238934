"""`python -m services.prefill_te`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.prefill_te.shell import build

main(build)
