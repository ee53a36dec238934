"""Builds a job executor from the plan."""

from __future__ import annotations

from libs.runtime.build import Built, ServiceContext
from services.job_executor.core import JobExecutorConfig, JobExecutorCore


def build(context: ServiceContext) -> Built:
    """It may choose among all TEs of the topology."""
    topology = context.plan.topology
    config = JobExecutorConfig(
        context.actor.name,
        tuple(te.name for te in topology.prefill_tes),
        tuple(te.name for te in topology.decode_tes),
        jobs_max=topology.limits.requests_in_flight_max * topology.gateways,
    )
    return Built(JobExecutorCore(config))
