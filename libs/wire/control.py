"""Membership, heartbeats, loads and status (P115).

Two levels with independent periods: the control plane beats the TE-shells and the pod-wide
services, each TE-shell beats the members of its TE. The reply is an effect of the same queue that
does the work, so a stuck core falls silent by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.wire.registry import message


@message("hello")
@dataclass(frozen=True, slots=True)
class Hello:
    """An actor introduces itself to the control plane, repeated until it has been beaten once."""

    actor: str
    role: str
    pid: int


@message("heartbeat")
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Are you making progress?"""

    sequence: int


@dataclass(frozen=True, slots=True)
class KvCounts:
    """Where the blocks of one pool are; they always sum to `total` (checked by the owner)."""

    total: int
    free: int
    held: int
    leased: int
    in_transfer: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class MemberState:
    """What one actor says of itself in a heartbeat reply."""

    actor: str
    role: str
    incarnation: int
    epoch: int
    alive: bool
    phase: str
    iteration: int
    running: int
    waiting: int
    kv: KvCounts | None = None


@message("heartbeat_reply")
@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """One actor's state; a TE-shell adds the members of its TE."""

    sequence: int
    state: MemberState
    members: tuple[MemberState, ...] = ()


@message("te_load")
@dataclass(frozen=True, slots=True)
class TeLoad:
    """The load of one TE, as its shell sees it; `version` grows with every report of one
    incarnation.
    """

    te: str
    version: int
    running: int
    waiting: int
    slots_free: int
    kv_free_blocks: int


@message("cluster_view")
@dataclass(frozen=True, slots=True)
class ClusterView:
    """The control plane's view of the pod; `missing` names planned actors that are not alive."""

    version: int
    epoch: int
    ready: bool
    members: tuple[MemberState, ...]
    missing: tuple[str, ...]


@message("status_query")
@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Ask the control plane for its view."""

    fresh: bool = False


@message("refused")
@dataclass(frozen=True, slots=True)
class Refused:
    """The typed error reply to a message that cannot be taken."""

    kind: str
    code: str
    reason: str
    definite: bool
