"""Decode routing compared: the real TE-shell sends the same requests to DP groups by each policy.

    workload --AssignDecode--> TeShellCore --to a DP group--> batches that iterate in lockstep
                                   ^                                   |
                                   +---------RequestFinished-----------+

Nothing of a request is computed: a DP group here is its batch, its queue and its KV rows, charged
by the profile of DeepSeek-R1 (`libs.fabric.profiles`). At each of the 58 MoE layers the fastest
group waits for the slowest one's attention (P057); that wait and the spread of KV behind it are
what the choice of a group decides (P059).

Lengths follow the published production workload (input 0-64K, mean 13K, output mean 2.1K, P127);
the shape of the distribution is assumed, a clipped log-normal. Arrivals are Poisson.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libs import units
from libs.actor import Received, Send, TimerFired
from libs.fabric import profiles
from libs.fabric.profiles import DEEPSEEK_R1
from libs.model.sampling import SamplingParams
from libs.scheduling.routing import DpPolicy
from libs.wire.control import HeartbeatReply, MemberState
from libs.wire.request import (
    AssignDecode,
    FirstToken,
    LegFailed,
    OutputOptions,
    PrefillTiming,
    RequestFinished,
    RequestSpec,
    TransferManifest,
)
from services.te_shell.core import BEAT_TIMER, TeShellConfig, TeShellCore

#: One decode TE as P124 has it: so many requests per die at most; KV memory in blocks (assumed:
#: 32 GB of HBM for KV at 39,040 bytes a token).
BATCH_MAX = 60
QUEUE_MAX = 256
BLOCK_SIZE = 128
KV_BLOCKS = 6_400
LAYERS = DEEPSEEK_R1.moe_layers
#: Mean and bounds of the published workload (P127); the spread is assumed.
INPUT_MEAN, INPUT_MAX = 13_000, 64_000
OUTPUT_MEAN, OUTPUT_MAX = 2_100, 16_000
SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run: `groups` DP groups, `requests` in all, arriving at `load` of what they can hold."""

    groups: int = 32
    requests: int = 4_000
    load: float = 0.85
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One request as a decode group sees it."""

    request_id: str
    arrive_ns: int
    prompt: int
    output: int

    @property
    def blocks(self) -> int:
        """Reserved for the prompt and the longest output it may ask for."""
        return -(-(self.prompt + self.max_tokens) // BLOCK_SIZE)

    @property
    def max_tokens(self) -> int:
        """What the client allows: assumed, twice what comes of it."""
        return 2 * self.output


def workload(case: Case) -> list[Job]:
    """Requests in order of arrival."""
    rng = np.random.default_rng(case.seed)
    prompts = _lengths(rng, case.requests, INPUT_MEAN, INPUT_MAX)
    outputs = _lengths(rng, case.requests, OUTPUT_MEAN, OUTPUT_MAX)
    # So many are there at once when batches or KV are full, and each stays for its output.
    per_group = min(BATCH_MAX, KV_BLOCKS * BLOCK_SIZE / (prompts.mean() + 2 * outputs.mean()))
    iteration_s = 0.05  # about what an iteration takes; only the rate depends on it
    rate_per_s = case.load * case.groups * per_group / (outputs.mean() * iteration_s)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, case.requests))
    return [
        Job(f"r{i}", units.s(float(at_s)), int(prompt), int(output))
        for i, (at_s, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]


def _lengths(rng: np.random.Generator, count: int, mean: int, most: int) -> np.ndarray:
    """Clipped log-normal lengths whose mean is `mean` before they are clipped."""
    drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(drawn, 1, most).astype(np.int64)


@dataclass(slots=True)
class _Group:
    """One DP group: what runs ends at an iteration known beforehand."""

    waiting: deque[Job] = field(default_factory=deque)
    running: int = 0
    reserved: int = 0


class DecodeTe:
    """The groups of one TE in lockstep, and their shell."""

    def __init__(self, case: Case, policy: DpPolicy) -> None:
        names = tuple(f"decode_te.d0.dp{i}" for i in range(case.groups))
        config = TeShellConfig(
            "te_shell.d0", "d0", "decode", names, names, BATCH_MAX, QUEUE_MAX, KV_BLOCKS,
            BLOCK_SIZE, policy,
        )  # fmt: skip
        self.shell = TeShellCore(config)
        self.groups = {name: _Group() for name in names}
        self.index = {f"xds.act.{name}": name for name in names}
        self.places = {name: place for place, name in enumerate(names)}
        self.refused = 0
        self.wait_ns: list[int] = []  # from arrival to the batch
        self._kv = np.zeros(case.groups, np.int64)
        self._batch = np.zeros(case.groups, np.int64)
        self._ends: list[tuple[int, int, str, Job]] = []
        self._iteration = 0
        self.shell.handle(TimerFired(0, BEAT_TIMER), 0)
        for name in names:
            state = MemberState(name, "decode_te", 1, 1, True, "idle", 0, 0, 0)
            self._tell(HeartbeatReply(1, state), name, 0)

    def _tell(self, message: Any, sender: str, now_ns: int) -> list[Any]:
        return self.shell.handle(Received(now_ns, message, sender, 1, 1), now_ns)

    def submit(self, job: Job, now_ns: int) -> None:
        """A prefilled request comes to the shell."""
        for effect in self._tell(_assign(job), "job_executor.0", now_ns):
            if isinstance(effect, Send) and isinstance(effect.message, AssignDecode):
                self.groups[self.index[effect.subject]].waiting.append(job)
            elif isinstance(effect, Send) and isinstance(effect.message, LegFailed):
                self.refused += 1

    def iterate(self, now_ns: int) -> tuple[int, np.ndarray, np.ndarray]:
        """One iteration: its end, each group's attention time per layer in us, and KV rows."""
        self._iteration += 1
        for name, group in self.groups.items():
            self._admit(name, group, now_ns)
        attention = _attention_us(self._batch, self._kv)
        rows = int(self._batch.sum()) * 8 // max(1, len(self.groups))
        expert = units.to_us(profiles.expert_ns(DEEPSEEK_R1, 1, rows, 1))
        layers_us = LAYERS * (float(attention.max()) + expert)
        fixed = profiles.gap_ns(DEEPSEEK_R1) + profiles.finish_ns(DEEPSEEK_R1)
        end_ns = now_ns + units.us(layers_us) + fixed
        kv = self._kv.copy()
        self._kv += self._batch
        self._finish(end_ns)
        return end_ns, attention, kv

    def _admit(self, name: str, group: _Group, now_ns: int) -> None:
        place = self.places[name]
        while group.waiting and group.running < BATCH_MAX:
            job = group.waiting[0]
            if group.reserved + job.blocks > KV_BLOCKS:
                break  # first come, first served
            group.waiting.popleft()
            group.running += 1
            group.reserved += job.blocks
            self._batch[place] += 1
            self._kv[place] += job.prompt
            self.wait_ns.append(now_ns - job.arrive_ns)
            end = self._iteration + job.output - 1
            heapq.heappush(self._ends, (end, int(job.request_id[1:]), name, job))

    def _finish(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= self._iteration:
            _, _, name, job = heapq.heappop(self._ends)
            group, place = self.groups[name], self.places[name]
            group.running -= 1
            group.reserved -= job.blocks
            self._batch[place] -= 1
            self._kv[place] -= job.prompt + job.output
            self._tell(RequestFinished(job.request_id, name, "stop", job.output), name, now_ns)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._ends) or any(group.waiting for group in self.groups.values())


def _attention_us(batch: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    """One layer's attention of every group, in us; the formula is the profile's."""
    idle = profiles.attention_us(DEEPSEEK_R1, 0, 0)
    per_token = profiles.attention_us(DEEPSEEK_R1, 1, 0) - idle
    many = 1_000_000
    per_row = (profiles.attention_us(DEEPSEEK_R1, 0, many) - idle) / many
    return idle + per_token * batch + per_row * kv_rows


def _assign(job: Job) -> AssignDecode:
    """The message as the job executor sends it; a prompt of so many tokens that takes no memory."""
    prompt = np.broadcast_to(np.int32(0), (job.prompt,))
    spec = RequestSpec(
        job.request_id, 0, prompt, SamplingParams(seed=1), job.max_tokens,
        OutputOptions(raw=True, reasoning_open=False), "gateway.0", job.arrive_ns, units.s(3_600),
    )  # fmt: skip
    manifest = TransferManifest(
        f"kv-{job.request_id}", "", "", 0, job.prompt, -(-job.prompt // BLOCK_SIZE), LAYERS
    )
    timing = PrefillTiming("p0", "prefill_te.p0.dp0", job.arrive_ns, job.arrive_ns)
    return AssignDecode(spec, "job_executor.0", manifest, FirstToken(0, 0.0), timing)


def run_policy(case: Case, policy: DpPolicy) -> dict[str, Any]:
    """The whole workload under one policy; the first third of the iterations is warm-up."""
    te, jobs = DecodeTe(case, policy), deque(workload(case))
    now_ns = jobs[0].arrive_ns
    waits, spreads, steps = [], [], []
    while jobs:
        while jobs and jobs[0].arrive_ns <= now_ns:
            te.submit(jobs.popleft(), now_ns)
        end_ns, attention, kv = te.iterate(now_ns)
        waits.append(float(attention.max() - attention.mean()))
        spreads.append(float(kv.std()))
        steps.append(end_ns - now_ns)
        now_ns = max(end_ns, jobs[0].arrive_ns) if jobs and not te.busy else end_ns
    begin = len(steps) // 3
    queued = np.asarray(te.wait_ns[len(te.wait_ns) // 3 :])
    return {
        "policy": str(policy),
        "kv_stdev_tokens": round(float(np.mean(spreads[begin:]))),
        "dispatch_wait_us": round(float(np.mean(waits[begin:])), 2),
        "dispatch_wait_us_p99": round(float(np.percentile(waits[begin:], 99)), 2),
        "tpot_ms": round(float(np.mean(steps[begin:])) / 1e6, 2),
        "queue_ms_mean": round(float(queued.mean()) / 1e6, 1),
        "queue_ms_p99": round(float(np.percentile(queued, 99)) / 1e6, 1),
        "refused": te.refused,
    }


def run(case: Case | None = None) -> dict[str, Any]:
    """Every policy on the same workload."""
    case = case or Case()
    rows = [run_policy(case, policy) for policy in DpPolicy]
    return {"groups": case.groups, "requests": case.requests, "load": case.load, "decode": rows}
