"""The pod as the gateway knows it: readiness, and the JSON of `/ready` and `/xds/status`."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from libs.wire.control import ClusterView, KvCounts
from services.gateway.core import GatewayCore
from services.gateway.links import LinkBook
from services.gateway.problems import NotReady

#: Links that `/xds/status` shows one by one.
BUSIEST_LINKS_MAX = 8


def require_ready(core: GatewayCore) -> None:
    """Raise `NotReady` until every planned member has been alive at once.

    A member that dies later makes the pod unready, which `/ready` says, but not the gateway deaf:
    what can still be served is decided by those who know where it would run.
    """
    if not core.was_ready:
        raise NotReady(f"the pod is still starting; {_waits_for(core.view)}")


def _waits_for(view: ClusterView) -> str:
    if view.version == 0:
        return "the control plane has not been heard yet"
    return f"waiting for {', '.join(view.missing[:8])}" + ("…" if len(view.missing) > 8 else "")


def ready_document(view: ClusterView) -> dict[str, Any]:
    """`/ready`: who is missing."""
    state = "ready" if view.ready else "starting" if view.version == 0 else "incomplete"
    return {"status": state, "ready": view.ready, "missing": list(view.missing)}


def status_document(core: GatewayCore) -> dict[str, Any]:
    """`/xds/status`: the last view, with KV blocks summed over all pools.

    `kv_blocks_held` counts blocks that are not free, whatever they are held for.
    """
    view = core.view
    pools = [member.kv for member in view.members if member.kv is not None]
    blocks = {
        field.name: sum(getattr(kv, field.name) for kv in pools) for field in fields(KvCounts)
    }
    return {
        "gateway": core.name,
        "open_requests": core.open_requests,
        **ready_document(view),
        "version": view.version,
        "epoch": view.epoch,
        "kv_blocks": blocks,
        "kv_blocks_held": blocks["total"] - blocks["free"],
        "links": _links(core.links),
        "members": [asdict(member) for member in view.members],
    }


def _links(links: LinkBook) -> dict[str, Any]:
    """The busiest links, and how many more carry something."""
    loads = links.loads()
    busiest = loads[:BUSIEST_LINKS_MAX]
    return {
        "busiest": [asdict(load) for load in busiest],
        "others": len(loads) - len(busiest) + links.left_out(),
    }
