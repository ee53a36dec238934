"""A busy little history for determinism checks: many requests, two JEs, one client that leaves."""

from __future__ import annotations

import numpy as np

from libs import units
from libs.config.topology import parse_topology
from services.gateway.core import ClientGone, ClientSubmit
from tests.support.pod import build_pod
from tests.support.requests import END_TOKEN, make_spec

TOPOLOGY = """
name: history
job_executors: 2
prefill_tes: [{name: p0}, {name: p1}]
decode_tes: [{name: d0, dp_groups: 2, expert_dies: 2}]
fabric: {shards: 2}
"""
REQUESTS = 6


def trace_of(seed: int) -> str:
    """The digest of the whole history with `seed`."""
    pod = build_pod(parse_topology(TOPOLOGY, source="history"), seed=seed)
    pod.run_for(units.s(1))
    ended = 0

    def present(_key: str, item: object, _at_ns: int) -> None:
        nonlocal ended
        ended += getattr(item, "finish_reason", "failed") is not None

    pod.host.on_present(present)
    for number in range(REQUESTS):
        prompt_ids = np.arange(number * 100, number * 100 + 10 + 7 * number, dtype=np.int32)
        pod.answers.learn(prompt_ids, [*range(40, 44 + number), END_TOKEN])
        at_ns = pod.host.now_ns + units.ms(3) * number
        spec = make_spec(f"r{number}", prompt_ids=prompt_ids, submitted_at_ns=at_ns, max_tokens=64)
        pod.host.inject("gateway.0", ClientSubmit(spec), at_ns)
    pod.host.inject("gateway.0", ClientGone("r5"), pod.host.now_ns + units.ms(150))
    pod.host.run(lambda: ended >= REQUESTS - 1, events_max=200_000)
    pod.run_for(units.s(1))
    assert all(counts.free == counts.total for counts in pod.kv().values()), "a block was kept"
    return pod.host.trace_hash
