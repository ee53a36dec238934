"""Identity and place of one service process, and where its facts go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from libs.actor import Record
from libs.fabric.params import UB, FabricParams
from libs.fabric.sharding import ONE_SHARD, Sharding
from libs.fabric.superpod import WHOLE_SUPERPOD, SuperPod


class RecordSink(Protocol):
    """Where domain facts go: logs, metrics, traces."""

    def record(self, actor: str, at_ns: int, record: Record) -> None:
        """Take one fact."""
        ...


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Identity and place of the process.

    With `inline` jobs run in the loop itself: right only where a job takes about a millisecond, so
    that handing it to a thread and back would cost as much as running it.
    """

    dies: tuple[int, ...] = ()
    incarnation: int = 1
    epoch: int = 1
    sharding: Sharding = ONE_SHARD
    pod: SuperPod = WHOLE_SUPERPOD
    validate: bool = False
    inline: bool = False
    params: FabricParams = UB
