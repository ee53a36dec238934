"""Builds one DistFlow instance from the plan."""

from __future__ import annotations

from libs.runtime.build import Built, ServiceContext
from services.distflow.core import DistFlowCore


def build(context: ServiceContext) -> Built:
    """One instance per (prefill TE, decode TE) pair."""
    return Built(DistFlowCore(context.actor.name))
