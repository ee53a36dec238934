"""All cores together: whatever happens to whom, every request ends and every block comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs import units
from libs.actor import Event, Received
from libs.config.topology import parse_topology
from libs.model.sampling import SamplingParams
from libs.wire.control import ClusterView, Heartbeat, HeartbeatReply, Hello, TeLoad
from libs.wire.tokens import Chunk
from services.decode_te.core import DecodeCore
from services.gateway.core import ClientGone, ClientSubmit, GatewayCore
from services.job_executor.core import JobExecutorCore
from services.prefill_te.core import PrefillCore
from services.te_shell.core import TeShellCore
from tests.support.pod import Pod, build_pod
from tests.support.requests import END_TOKEN, make_spec

TOPOLOGY = """
name: together
job_executors: 2
prefill_tes: [{name: p0}, {name: p1}]
decode_tes:
  - {name: d0, dp_groups: 2, batch_max: 2, queue_max: 2, expert_dies: 2}
  - {name: d1, dp_groups: 1, batch_max: 1, queue_max: 1, expert_dies: 2}
kv: {block_size: 16, prefill_blocks: 8, decode_blocks: 8}
limits: {context_max_tokens: 128, prompt_max_tokens: 100}
# Minutes pass in these histories; a beat every half second would be most of the work.
health: {control_period_s: 20, te_period_s: 20}
"""
BUDGET_NS = units.s(60)
#: Longer than any deadline in the pod.
SETTLE_NS = units.s(200)

#: Actors whose silence the rest must survive.
MORTAL = (
    "prefill_te.p0.dp0",
    "decode_te.d0.dp0",
    "expert_die.d0.e1",
    "output.d0.dp0",
    "output.p0.dp0",
    "distflow.p0.d0",
    "job_executor.0",
    "te_shell.p0",
    "te_shell.d0",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One client: when it asks (ms), how much, and when it leaves (ms after asking), if it does."""

    at_ms: int
    prompt: int
    answer: int
    leaves_ms: int | None


class Client:
    """What one client has seen."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.tokens: list[int] = []
        self.ends: list[str] = []
        self.left = False

    def see(self, item: object) -> None:
        assert not self.ends, "something was shown after the end"
        if isinstance(item, Chunk):
            assert item.index == len(self.tokens), "a gap or a repetition"
            self.tokens.append(item.token)
            if item.finish_reason is not None:
                self.ends.append(item.finish_reason)
        else:
            self.ends.append("failed")


ASKS = st.lists(
    st.builds(
        Ask,
        st.integers(0, 400),
        st.integers(1, 60),
        st.integers(1, 8),
        st.one_of(st.none(), st.integers(0, 400)),
    ),
    min_size=1,
    max_size=8,
)


class LostMessages:
    """Loses the messages with these numbers; upkeep (beats, loads, views) is not counted."""

    UPKEEP = (Heartbeat, HeartbeatReply, Hello, ClusterView, TeLoad)

    def __init__(self, numbers: frozenset[int]) -> None:
        self._numbers = numbers
        self._count = 0

    def __call__(self, event: Event) -> bool:
        if not isinstance(event, Received) or event.sender == "outside":
            return False
        if isinstance(event.message, self.UPKEEP):
            return False
        self._count += 1
        return self._count in self._numbers


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong: an actor that falls silent, messages that are lost."""

    seed: int = 0
    silent: str = ""
    silent_ms: int = 0
    lost: frozenset[int] = frozenset()


def play(asks: list[Ask], trouble: Trouble) -> tuple[Pod, list[Client]]:
    """Run everything to its end and settle."""
    pod = build_pod(parse_topology(TOPOLOGY, source="together"), seed=trouble.seed)
    pod.loses = LostMessages(trouble.lost)
    pod.run_for(units.s(1))
    start_ns = pod.host.now_ns
    clients: dict[str, Client] = {}
    pod.host.on_present(lambda key, item, _at_ns: clients[key].see(item))
    for number, ask in enumerate(asks):
        name, at_ns = f"r{number}", start_ns + units.ms(ask.at_ms)
        prompt_ids = np.arange(number * 100, number * 100 + ask.prompt, dtype=np.int32)
        answer = [*range(40, 40 + ask.answer), END_TOKEN]
        pod.answers.learn(prompt_ids, answer)
        clients[name] = Client(answer)
        spec = make_spec(
            name,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(temperature=0.0, seed=0, stop_token_ids=(END_TOKEN,)),
            max_tokens=16,
            submitted_at_ns=at_ns,
            budget_ns=BUDGET_NS,
        )
        pod.host.inject("gateway.0", ClientSubmit(spec), at_ns)
        if ask.leaves_ms is not None:
            clients[name].left = True
            pod.host.inject("gateway.0", ClientGone(name), at_ns + units.ms(ask.leaves_ms))
    if trouble.silent:
        pod.run_for(units.ms(trouble.silent_ms))
        pod.silence(trouble.silent)
    end_ns = start_ns + units.ms(400) + BUDGET_NS + SETTLE_NS
    pod.host.run(lambda: pod.host.now_ns >= end_ns, events_max=500_000)
    return pod, list(clients.values())


def check_ends(clients: list[Client]) -> None:
    for client in clients:
        assert client.tokens == client.answer[: len(client.tokens)], "another answer, or garbled KV"
        assert client.left or len(client.ends) == 1, "every request reaches one end"
        if client.ends in (["stop"], ["length"]):
            assert client.tokens == client.answer


def check_nothing_is_left(pod: Pod, dead: str = "") -> None:
    for name, counts in pod.kv().items():
        assert name == dead or counts.free == counts.total, f"{name} keeps blocks: {counts}"
    for name, watched in pod.watched.items():
        core: Any = watched.core
        if name == dead:
            continue
        if isinstance(core, JobExecutorCore):
            assert not core._jobs
        if isinstance(core, TeShellCore):
            assert not core._assigned
        if isinstance(core, GatewayCore):
            assert core.open_requests == 0
        if isinstance(core, PrefillCore):
            assert core.group.sender.kv.arena.taken_bytes == 0, "memory of a message that is over"
        if isinstance(core, DecodeCore):
            assert core.group.receiver.kv.arena.taken_bytes == 0


@given(ASKS, st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_requests_that_share_a_crowded_pod_all_end_with_their_own_answer(
    asks: list[Ask], seed: int
) -> None:
    pod, clients = play(asks, Trouble(seed))
    check_ends(clients)
    check_nothing_is_left(pod)


@pytest.mark.parametrize("silent", MORTAL)
@given(asks=ASKS, silent_ms=st.integers(0, 300))
@settings(max_examples=3, deadline=None)
def test_when_one_actor_falls_silent_every_request_still_ends_and_the_rest_is_clean(
    silent: str, asks: list[Ask], silent_ms: int
) -> None:
    pod, clients = play(asks, Trouble(silent=silent, silent_ms=silent_ms))
    check_ends(clients)
    check_nothing_is_left(pod, dead=silent)


@given(ASKS, st.frozensets(st.integers(1, 400), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_when_messages_are_lost_every_request_still_ends_and_nothing_is_kept(
    asks: list[Ask], lost: frozenset[int]
) -> None:
    pod, clients = play(asks, Trouble(lost=lost))
    check_ends(clients)
    check_nothing_is_left(pod)
