"""Builds the output process of a DP group from the plan."""

from __future__ import annotations

from libs.runtime.build import Built, ServiceContext
from services.output.core import OutputCore


def build(context: ServiceContext) -> Built:
    """It needs the tokenizer and nothing else of the model."""
    actor = context.actor
    return Built(OutputCore(actor.name, actor.te, context.model.tokenizer))
