"""The executor of an expert die: the experts that live there, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from libs.errors import BadInput
from libs.model.any_engine import AnyEngine
from libs.model.linear import Rows
from services.expert_die.core import ExpertJob


class ExpertExecutor:
    """Runs `ExpertJob`s."""

    def __init__(self, engine: AnyEngine) -> None:
        self.engine = engine

    def run(self, job: Any) -> np.ndarray:
        """Partial sums `[tokens, hidden]` of one work item."""
        assert isinstance(job, ExpertJob), job
        if not self.engine.is_moe(job.layer) or job.rows.shape[1] != self.engine.args.hidden_size:
            raise BadInput(f"no experts for layer {job.layer} and rows {job.rows.shape}")
        rows = Rows(job.rows, job.scale if job.scale.shape[0] else None)
        return self.engine.expert_partial(
            job.layer, rows, job.topk_idx, job.topk_weights, job.experts
        )
