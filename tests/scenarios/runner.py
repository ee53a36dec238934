"""Reads and runs scenario scripts: prose, commands, and what was recorded when they ran.

A script is a row of blocks, separated by empty lines. A block that starts with `#` is prose. Any
other block is one command, then `----`, then the lines it printed:

    run until="prefill_te.p0.dp0: pull_kv"
    ----
    1101.104 ms  prefill_te.p0.dp0: pull_kv from distflow.p0.d0

`pytest tests/scenarios --rewrite` runs the commands again and rewrites what stands below the lines;
the difference is then reviewed like any other change.

Commands
    pod [prefill= decode= groups= dies= batch= blocks=]   build and assemble a pod
    request ID answer= [prompt= max= stop= at=]           a client asks (at: ms from now)
    leave ID [at=]                                        the client closes its connection
    silence ACTOR                                         the actor answers nothing from now on
    run until="ACTOR: EVENT" | for=MS | ended=ID          let time pass
    story ID                                              what has happened to a request since
    client ID                                             what its client has seen
    kv                                                    where the blocks are
    status                                                who is missing
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from libs import units
from libs.config.topology import parse_topology
from libs.model.sampling import SamplingParams
from libs.wire.request import OutputOptions, RequestSpec
from libs.wire.tokens import Chunk
from services.gateway.core import ClientGone, ClientSubmit, Failure
from tests.support.pod import Pod, Step, build_pod

RULE = "----"
GATEWAY = "gateway.0"


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph of prose (`command` empty), or a command with what it printed."""

    text: tuple[str, ...]
    command: str = ""

    def __str__(self) -> str:
        return "\n".join((self.command, RULE, *self.text) if self.command else self.text)


def parse(source: str) -> list[Block]:
    """The blocks of a script; raises `ValueError` naming a block without its rule."""
    blocks = []
    for paragraph in source.strip().split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0].startswith("#"):
            blocks.append(Block(tuple(lines)))
            continue
        if len(lines) < 2 or lines[1] != RULE:
            raise ValueError(f"the command {lines[0]!r} is not followed by {RULE}")
        blocks.append(Block(tuple(lines[2:]), lines[0]))
    return blocks


def run(blocks: list[Block]) -> list[Block]:
    """Run every command; the result holds what was printed this time."""
    scenario = Scenario()
    return [
        replace(block, text=tuple(scenario.execute(block.command)) or ("(nothing)",))
        if block.command
        else block
        for block in blocks
    ]


def render(blocks: list[Block]) -> str:
    """The script as it is written to its file."""
    return "\n\n".join(map(str, blocks)) + "\n"


def rerun(path: Path) -> str:
    """The script at `path` with what its commands print now."""
    return render(run(parse(path.read_text(encoding="utf-8"))))


@dataclass(slots=True)
class _Client:
    spec: RequestSpec
    from_step: int
    lines: list[str] = field(default_factory=list)
    ended: bool = False


class Scenario:
    """One pod and its clients."""

    def __init__(self) -> None:
        self._pod: Pod | None = None
        self._clients: dict[str, _Client] = {}

    @property
    def pod(self) -> Pod:
        """The pod; the first command must be `pod`."""
        assert self._pod is not None, "the first command must be `pod`"
        return self._pod

    def execute(self, command: str) -> list[str]:
        """Run one command; returns the lines it prints."""
        verb, *words = shlex.split(command)
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        verbs: dict[str, Callable[..., list[str]]] = {
            "pod": self._build,
            "request": self._request,
            "leave": self._leave,
            "silence": self._silence,
            "run": self._run,
            "story": self._story,
            "client": self._client,
            "kv": self._kv,
            "status": self._status,
        }
        if verb not in verbs:
            raise ValueError(f"unknown command {verb!r}; known are {', '.join(verbs)}")
        return verbs[verb](*names, **options)

    # ------------------------------------------------------------ acting

    def _build(self, **options: str) -> list[str]:
        sizes = {"prefill": 1, "decode": 1, "groups": 1, "dies": 2, "batch": 4, "blocks": 8}
        sizes |= {name: int(value) for name, value in options.items()}
        prefill = ", ".join(f"{{name: p{i}}}" for i in range(sizes["prefill"]))
        section = f"dp_groups: {sizes['groups']}, batch_max: {sizes['batch']}, queue_max: 8"
        section += f", expert_dies: {sizes['dies']}"
        decode = ", ".join(f"{{name: d{i}, {section}}}" for i in range(sizes["decode"]))
        blocks = sizes["blocks"]
        topology = parse_topology(
            f"name: scenario\njob_executors: 1\nprefill_tes: [{prefill}]\ndecode_tes: [{decode}]\n"
            f"kv: {{block_size: 16, prefill_blocks: {max(8, blocks)}, decode_blocks: {blocks}}}\n"
            f"limits: {{context_max_tokens: 128, prompt_max_tokens: 100}}\n",
            source="scenario",
        )
        self._pod = build_pod(topology)
        self.pod.host.on_present(self._present)
        self.pod.run_for(units.s(1))
        return [f"{len(self.pod.plan.actors)} actors, {self.pod.plan.num_dies} dies"]

    def _request(
        self,
        name: str,
        *,
        answer: str,
        prompt: str = "20",
        max: str = "16",
        stop: str = "",
        at: str = "0",
    ) -> list[str]:
        pod, number = self.pod, len(self._clients)
        length = int(prompt)
        prompt_ids = np.arange(1_000 * number, 1_000 * number + length, dtype=np.int32)
        end = pod.tokenizer.control.eos
        tokens = [*pod.tokenizer.encode(answer), end]
        pod.answers.learn(prompt_ids, tokens)
        at_ns = pod.host.now_ns + units.ms(float(at))
        spec = RequestSpec(
            request_id=name,
            choice=0,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(temperature=0.0, seed=0, stop_token_ids=(end,)),
            max_tokens=int(max),
            output=OutputOptions(True, False, (stop,) if stop else ()),
            gateway=GATEWAY,
            submitted_at_ns=at_ns,
            budget_ns=units.s(60),
        )
        self._clients[name] = _Client(spec, len(pod.journal))
        pod.host.inject(GATEWAY, ClientSubmit(spec), at_ns)
        return [f"prompt of {length} tokens, answer of {len(tokens)} with its end token"]

    def _leave(self, name: str, *, at: str = "0") -> list[str]:
        at_ns = self.pod.host.now_ns + units.ms(float(at))
        self.pod.host.inject(GATEWAY, ClientGone(name), at_ns)
        self._clients[name].ended = True
        return [f"{name} closes its connection at {_ms(at_ns)}"]

    def _silence(self, actor: str) -> list[str]:
        self.pod.silence(actor)
        return [f"{actor} falls silent at {_ms(self.pod.host.now_ns)}"]

    def _run(self, **options: str) -> list[str]:
        pod = self.pod
        match options:
            case {"until": wanted}:
                actor, event = wanted.split(": ", 1)
                step = pod.run_until(lambda s: s.actor == actor and s.event.startswith(event))
                return [f"{_ms(step.at_ns)}  {step.actor}: {step.event}"]
            case {"ended": name}:
                pod.host.run(lambda: self._clients[name].ended, events_max=200_000)
            case {"for": duration_ms}:
                pod.run_for(units.ms(float(duration_ms)))
            case _:
                raise ValueError("run needs until=, for= or ended=")
        return [_ms(pod.host.now_ns)]

    def _present(self, key: str, item: Any, at_ns: int) -> None:
        client = self._clients[key]
        since = _ms(at_ns - client.spec.submitted_at_ns)
        if isinstance(item, Chunk):
            end = f"  end: {item.finish_reason}" if item.finish_reason else ""
            client.lines.append(f"{since}  {item.index}: {item.content!r}{end}")
            client.ended = item.finish_reason is not None
        else:
            assert isinstance(item, Failure)
            surely = "surely not done" if item.definite else "may have happened"
            client.lines.append(f"{since}  failed: {item.code}: {item.reason} ({surely})")
            client.ended = True

    # ------------------------------------------------------------ telling

    def _story(self, name: str) -> list[str]:
        client = self._clients[name]
        steps = self.pod.journal[client.from_step :]
        client.from_step = len(self.pod.journal)
        return [_tell(step) for step in steps if {name, f"kv-{name}"} & step.ids]

    def _client(self, name: str) -> list[str]:
        return self._clients[name].lines

    def _kv(self) -> list[str]:
        lines = []
        for name, counts in self.pod.kv().items():
            states = {"held": counts.held, "leased": counts.leased, "moving": counts.in_transfer}
            used = ", ".join(f"{count} {state}" for state, count in states.items() if count)
            lines.append(
                f"{name}: {counts.free} of {counts.total} free{f', {used}' if used else ''}"
            )
        return lines

    def _status(self) -> list[str]:
        gateway: Any = self.pod.watched[GATEWAY].core
        view = gateway.view
        return [f"ready: {str(view.ready).lower()}", *(f"missing: {name}" for name in view.missing)]


def _ms(at_ns: int) -> str:
    return f"{units.to_ms(at_ns):9.3f} ms"


def _tell(step: Step) -> str:
    """One step, without the upkeep of timers."""
    shown = [text for text in step.effects if not text.startswith(("arm ", "CancelTimer"))]
    told = ", ".join(shown) or "-"
    return f"{_ms(step.at_ns)}  {step.actor}: {step.event} -> {told}"
