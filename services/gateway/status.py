"""The pod as the gateway knows it: readiness, and the JSON of `/ready` and `/xds/status`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from libs.wire.control import ClusterView, KvCounts
from services.gateway.problems import NotReady


class Readiness:
    """Whether requests are taken: from the moment every planned member has been alive at once.

    A member that dies later makes the pod unready, which `/ready` says, but not the gateway deaf:
    what can still be served is decided by those who know where it would run.
    """

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view
        self._was_ready = False

    def look(self) -> bool:
        """Whether the pod has ever been ready, by the newest view."""
        self._was_ready = self._was_ready or self._view().ready
        return self._was_ready

    def require(self) -> None:
        """Raise `NotReady` until the pod has been ready once."""
        if not self.look():
            raise NotReady(f"the pod is still starting; {_waits_for(self._view())}")


def _waits_for(view: ClusterView) -> str:
    if view.version == 0:
        return "the control plane has not been heard yet"
    return f"waiting for {', '.join(view.missing[:8])}" + ("…" if len(view.missing) > 8 else "")


def ready_document(view: ClusterView) -> dict[str, Any]:
    """`/ready`: who is missing."""
    state = "ready" if view.ready else "starting" if view.version == 0 else "incomplete"
    return {"status": state, "ready": view.ready, "missing": list(view.missing)}


def status_document(view: ClusterView, gateway: str, open_requests: int) -> dict[str, Any]:
    """`/xds/status`: the last view, with KV blocks summed over all pools.

    `kv_blocks_held` counts blocks that are not free, whatever they are held for.
    """
    pools = [member.kv for member in view.members if member.kv is not None]
    blocks = {
        field.name: sum(getattr(kv, field.name) for kv in pools) for field in fields(KvCounts)
    }
    return {
        "gateway": gateway,
        "open_requests": open_requests,
        **ready_document(view),
        "version": view.version,
        "epoch": view.epoch,
        "kv_blocks": blocks,
        "kv_blocks_held": blocks["total"] - blocks["free"],
        "members": [asdict(member) for member in view.members],
    }
