"""`xds verify --host sim`: a seeded workload through a simulated pod, against the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from libs import units
from libs.config.topology import Topology
from libs.fabric.faults.active import FaultRule
from libs.model.resources import ModelResources
from libs.runtime.sim_host import SimHost
from libs.wire.control import KvCounts
from libs.wire.request import RequestSpec
from libs.wire.tokens import Chunk
from libs.workload.requests import ClientRequest, make_workload, spec_of
from libs.workload.verdict import Progress, Seen, judge, untold
from services.fabric_emulator.core import FabricEmulatorCore
from services.gateway.core import ClientGone, ClientSubmit, Failure
from services.superpod.wiring import simulate_pod

GATEWAY = "gateway.0"
#: Emulated time for the pod to assemble before the first client, and to let go of everything after
#: the last.
WARM_UP_NS = units.s(1)
SETTLE_NS = units.s(5)


class Client:
    """One client's side of the story; `cached_tokens` is None until the pod has told them."""

    def __init__(self, host: SimHost, request: ClientRequest, spec: RequestSpec) -> None:
        self.host = host
        self.request = request
        self.spec = spec
        self.seen = Seen()
        self.cached_tokens: int | None = None

    @property
    def over(self) -> bool:
        return self.seen.left or self.seen.ended is not None

    def take(self, item: Chunk | Failure, at_ns: int) -> None:
        seen = self.seen
        if seen.left:
            return
        if isinstance(item, Failure):
            seen.ended = f"failed: {item.code}: {item.reason}"
            return
        seen.indices.append(item.index)
        seen.tokens.append(item.token)
        seen.stamps_ns.append(at_ns)
        seen.content += item.content
        seen.reasoning += item.reasoning
        seen.tool_calls += item.tool_calls
        seen.ended = item.finish_reason
        if item.timing is not None:
            self.cached_tokens = item.timing.prefill.cached_tokens
        leaves = self.request.cancel_after
        if leaves is not None and len(seen.tokens) >= leaves and seen.ended is None:
            seen.left = True
            self.host.inject(GATEWAY, ClientGone(self.spec.request_id), at_ns)


@dataclass(frozen=True, slots=True)
class Run:
    """A pod after its last client, and what every client saw, by request id."""

    host: SimHost
    topology: Topology
    seed: int
    clients: dict[str, Client]


def verify_sim(
    topology: Topology,
    model: ModelResources,
    *,
    requests: int,
    seed: int,
    faults: Sequence[FaultRule] = (),
    progress: Progress = untold,
) -> dict[str, Any]:
    """Run and judge the mixed workload; the result is ready for `--json`.

    With `faults` on the fabric every token still has to equal the reference; `faults` in the result
    is what they did, the proof that they were there.
    """
    workload = make_workload(seed, requests)
    run = run_workload(topology, model, workload, seed=seed, faults=faults, progress=progress)
    return report_of(run, model, progress)


def run_workload(
    topology: Topology,
    model: ModelResources,
    workload: list[ClientRequest],
    *,
    seed: int,
    faults: Sequence[FaultRule] = (),
    progress: Progress = untold,
) -> Run:
    """Any workload through a simulated pod, until everybody has left and everything is quiet."""
    host = simulate_pod(topology, model, seed=seed, faults=faults)
    clients = _submit_all(host, model, workload, seed)

    def present(key: str, item: Chunk | Failure, at_ns: int) -> None:
        clients[key].take(item, at_ns)
        if clients[key].over:
            progress("pod", sum(client.over for client in clients.values()), len(clients))

    host.on_present(present)
    host.run(lambda: all(client.over for client in clients.values()))
    end_ns = host.now_ns + SETTLE_NS
    host.run(lambda: host.now_ns >= end_ns)
    return Run(host, topology, seed, clients)


def report_of(run: Run, model: ModelResources, progress: Progress = untold) -> dict[str, Any]:
    """What the clients of a run saw, held against the reference.

    Of the `prompt_tokens` whose prefill was reported, `cached_tokens` were not computed.
    """
    host, clients = run.host, run.clients
    answers = ((name, client.spec, client.seen) for name, client in clients.items())
    verdict = judge(answers, model, progress)
    told = [client for client in clients.values() if client.cached_tokens is not None]
    return {
        "host": "sim",
        "topology": run.topology.name,
        "carrier": run.topology.fabric.carrier,
        "seed": run.seed,
        "ok": verdict.ok and kv_blocks_held(host) == 0,
        **asdict(verdict),
        "prompt_tokens": sum(client.spec.prompt_tokens for client in told),
        "cached_tokens": sum(client.cached_tokens or 0 for client in told),
        "kv_blocks_held": kv_blocks_held(host),
        "faults": faults_done(host),
        "emulated_s": round(units.to_s(host.now_ns - SETTLE_NS), 3),
        "events": host.events,
        "trace_hash": host.trace_hash,
        "timeline_hash": _timeline_hash(clients),
        "tpot_ms_mean": _tpot_ms(clients),
    }


def _submit_all(
    host: SimHost, model: ModelResources, workload: list[ClientRequest], seed: int
) -> dict[str, Client]:
    clients = {}
    for request in workload:
        request_id = f"verify-{seed}-{request.index}"
        at_ns = WARM_UP_NS + request.arrive_ns
        spec = spec_of(request, request_id, at_ns, model)
        clients[request_id] = Client(host, request, spec)
        host.inject(GATEWAY, ClientSubmit(spec), at_ns)
    return clients


def kv_blocks_held(host: SimHost) -> int:
    """Blocks that are not free anywhere in the pod."""
    held = 0
    for core in host.cores():
        counts = getattr(core, "kv_counts", None)
        if counts is not None:
            kv: KvCounts = counts()
            held += kv.total - kv.free
    return held


def faults_done(host: SimHost) -> dict[str, dict[str, int]]:
    """How many frames each armed fault has seen and touched, over all shards."""
    done: dict[str, dict[str, int]] = {}
    for core in host.cores():
        if isinstance(core, FabricEmulatorCore):
            for armed in core.faults.armed():
                counts = done.setdefault(armed.rule.fault_id, {"seen": 0, "touched": 0})
                counts["seen"] += armed.seen
                counts["touched"] += armed.touched
    return done


def _timeline_hash(clients: dict[str, Client]) -> str:
    """Digest of what every client got, and at which nanosecond; not of how it came about."""
    digest = hashlib.blake2b(digest_size=16)
    for name, client in clients.items():
        seen = client.seen
        story = (name, seen.tokens, seen.stamps_ns, seen.ended, seen.left)
        digest.update(repr(story).encode())
    return digest.hexdigest()


def _tpot_ms(clients: dict[str, Client]) -> float:
    gaps = [
        units.to_ms(later - earlier)
        for client in clients.values()
        for earlier, later in zip(client.seen.stamps_ns, client.seen.stamps_ns[1:], strict=False)
    ]
    return round(sum(gaps) / len(gaps), 3) if gaps else 0.0
