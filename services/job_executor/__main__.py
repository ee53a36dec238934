"""`python -m services.job_executor`: one process of this service, placed by its environment."""

from __future__ import annotations

from libs.runtime.service import main
from services.job_executor.shell import build

main(build)
