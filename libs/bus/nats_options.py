"""How a service reaches the broker, and as whom."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libs.bus.api import POLICIES, Lane, LanePolicy


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """How to reach the broker, and as whom.

    `name` is the actor's name; `policies` says which lanes to open; `detect_s` is how soon a silent
    server counts as dead. `credentials` go to the client's connect as they are (`user`, `password`,
    `token`, `nkeys_seed`, `tls`).
    """

    url: str
    name: str
    policies: Mapping[Lane, LanePolicy] = field(default_factory=lambda: POLICIES)
    connect_s: float = 5.0
    detect_s: float = 6.0
    reconnect_wait_s: float = 0.5
    inbox_prefix: str = "_INBOX"
    credentials: Mapping[str, Any] = field(default_factory=dict)


def reconnect_wait_s(options: NatsOptions, lane: Lane) -> float:
    """Pause between attempts, spread by name so that a pod does not come back in one instant."""
    spread = random.Random(f"{options.name}/{lane}").uniform(0.5, 1.5)
    return options.reconnect_wait_s * spread
