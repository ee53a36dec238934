"""Structured logs: one JSON object per line on standard error, event names as past-tense
snake_case.

Records of cores become log lines here. Prompts and texts are never part of a record, so they cannot
reach a log. High-rate facts (one per token or iteration) are counted by metrics and logged at
debug.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from libs import units
from libs.actor import Record

#: Facts that happen per token or per iteration.
HIGH_RATE = frozenset({"token", "first_token", "iteration_committed", "prompt_prefilled"})


def configure_logs(level: str) -> None:
    """Set structlog up for this process; `level` is a standard level name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


class LogSink:
    """Writes every record as one log line, stamped with its emulated time."""

    def __init__(self, actor: str, incarnation: int) -> None:
        self._log: Any = structlog.get_logger().bind(svc=actor, inst=incarnation)

    def record(self, actor: str, at_ns: int, record: Record) -> None:
        """One line."""
        write = self._log.debug if record.name in HIGH_RATE else self._log.info
        write(record.name, emulated_ms=round(units.to_ms(at_ns), 3), **record.fields)

    def note(self, event: str, **fields: Any) -> None:
        """A fact of the process itself: started, stopping, failed."""
        self._log.info(event, **fields)
