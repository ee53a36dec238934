"""A seeded workload of conversations: prompts that begin alike, which a prefix cache is for.

    system prompt, question, answer, question, answer, question     each turn repeats all before it

Several conversations are under way at once, all behind one system prompt. They follow a few
scripts, so that conversations meet again, also those of different tenants: these ask the very same
under different salts, and may not find each other's KV. What an assistant "answered" in earlier
turns is scripted, so that a prompt is known before the pod has said a word.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from libs import units
from libs.workload.prompts import chat_question, passage
from libs.workload.requests import ClientRequest, draw_sampling

TENANTS = ("", "acme", "globex")
SCRIPTS = 6
TURNS_MAX = 5
#: Conversations under way at once, each with the tenant it belongs to.
OPEN_CHATS = 9
SYSTEM_WORDS = 60


@dataclass(slots=True)
class _Chat:
    """One conversation: whose, along which script, and how many turns are over."""

    tenant: str
    script: int
    turns: int = 0


def make_chats(seed: int, requests: int, *, rate_per_s: float = 8.0) -> list[ClientRequest]:
    """`requests` turns of conversations, arriving as a Poisson process of `rate_per_s`."""
    assert requests >= 0, requests
    rng = random.Random(seed)
    system = passage(rng, SYSTEM_WORDS)
    scripts = [
        [(chat_question(rng), passage(rng, rng.choice((5, 12, 30)))) for _ in range(TURNS_MAX)]
        for _ in range(SCRIPTS)
    ]
    chats = [_Chat(TENANTS[i % len(TENANTS)], rng.randrange(SCRIPTS)) for i in range(OPEN_CHATS)]
    arrive_ns = 0
    made = []
    for index in range(requests):
        arrive_ns += units.s(rng.expovariate(rate_per_s))
        chat = rng.choice(chats)
        script = scripts[chat.script]
        earlier = [("system", system)]
        for question, answer in script[: chat.turns]:
            earlier += [("user", question), ("assistant", answer)]
        turn = script[chat.turns][0], tuple(earlier)
        made.append(_one_turn(rng, index, arrive_ns, turn, chat.tenant))
        chat.turns += 1
        if chat.turns == TURNS_MAX or rng.random() < 0.15:
            chat.script, chat.turns = rng.randrange(SCRIPTS), 0
    return made


def _one_turn(
    rng: random.Random,
    index: int,
    arrive_ns: int,
    turn: tuple[str, tuple[tuple[str, str], ...]],
    tenant: str,
) -> ClientRequest:
    text, earlier = turn
    leaves = rng.random() < 0.05
    return ClientRequest(
        index=index,
        chat=True,
        text=text,
        # Thinking or not is said at the end of a prompt, so it does not part what begins alike.
        thinking=rng.random() < 0.5,
        sampling=draw_sampling(rng),
        max_tokens=rng.choice((2, 4, 8)),
        stops=(),
        arrive_ns=arrive_ns,
        stream=True,
        cancel_after=1 if leaves else None,
        earlier=earlier,
        cache_salt=tenant,
    )
