"""A whole simulated pod without a model: the real cores, scripted executors.

Answers are scripts (`libs.model.tokenizer` text), so a test can say what the model will say. Every
step of every core is written into one `journal`, in the order in which things happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from libs import units
from libs.actor import Core, Effect, Event, Executor
from libs.config.plan import ActorPlan, PodPlan, expert_placement, output_of, plan_pod
from libs.config.topology import Topology
from libs.fabric.profiles import PROFILES, layer_repeats
from libs.fabric.sharding import sharding_of
from libs.model.resources import checkpoint_dir
from libs.model.tokenizer import Tokenizer
from libs.runtime.sim_host import SimHost, SimOptions
from libs.runtime.story import ids_of, summary_of
from libs.wire.control import KvCounts
from services.control_plane.core import ControlPlaneConfig, ControlPlaneCore
from services.decode_te.core import DecodeConfig, DecodeCore
from services.distflow.core import DistFlowCore
from services.expert_die.core import ExpertDieConfig, ExpertDieCore
from services.fabric_emulator.core import FabricEmulatorCore
from services.gateway.core import GatewayConfig, GatewayCore
from services.job_executor.core import JobExecutorConfig, JobExecutorCore
from services.output.core import OutputCore
from services.prefill_te.core import PrefillConfig, PrefillCore
from services.te_shell.core import TeShellConfig, TeShellCore
from tests.support.executors import (
    NUM_DENSE,
    NUM_LAYERS,
    ScriptedDecode,
    ScriptedExpert,
    ScriptedPrefill,
    block_bytes,
)

NUM_EXPERTS = 4


class Answers:
    """The script of all requests, by prompt."""

    def __init__(self) -> None:
        self._by_prompt: dict[bytes, tuple[int, ...]] = {}

    def learn(self, prompt_ids: np.ndarray, tokens: Sequence[int]) -> None:
        """From now on `prompt_ids` is answered with `tokens`."""
        self._by_prompt[prompt_ids.tobytes()] = tuple(tokens)

    def __call__(self, prompt_ids: np.ndarray) -> Sequence[int]:
        return self._by_prompt[np.ascontiguousarray(prompt_ids, np.int32).tobytes()]


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the journal."""

    at_ns: int
    actor: str
    event: str
    effects: tuple[str, ...]
    ids: frozenset[str]


class _Watched:
    """A core whose steps are written down; once `silent` it takes events and does nothing."""

    def __init__(self, core: Core, pod: Pod) -> None:
        self.core = core
        self.name = core.name
        self.silent = False
        self._pod = pod

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        if self.silent or self._pod.loses(event):
            return []
        effects = self.core.handle(event, now_ns)
        ids = ids_of(event).union(*map(ids_of, effects))
        summaries = tuple(map(summary_of, effects))
        step = Step(now_ns, self.name, summary_of(event), summaries, frozenset(ids))
        self._pod.journal.append(step)
        return effects

    def validate(self) -> None:
        self.core.validate()


@dataclass(slots=True)
class Pod:
    """The simulation and everything a test wants to know of it."""

    host: SimHost
    plan: PodPlan
    tokenizer: Tokenizer
    answers: Answers
    journal: list[Step] = field(default_factory=list)
    watched: dict[str, _Watched] = field(default_factory=dict)
    #: Says of each event whether it is lost on its way.
    loses: Callable[[Event], bool] = lambda _event: False

    def silence(self, actor: str) -> None:
        """From now on `actor` takes everything and answers nothing."""
        self.watched[actor].silent = True

    def run_until(self, happened: Callable[[Step], bool]) -> Step:
        """Run until a step matches; returns it."""
        start = len(self.journal)

        def found() -> bool:
            return any(happened(step) for step in self.journal[start:])

        self.host.run(found, events_max=200_000)
        return next(step for step in self.journal[start:] if happened(step))

    def run_for(self, duration_ns: int) -> None:
        """Run for a stretch of emulated time."""
        end_ns = self.host.now_ns + duration_ns
        self.host.run(lambda: self.host.now_ns >= end_ns, events_max=200_000)

    def kv(self) -> dict[str, KvCounts]:
        """The block counts of every DP group."""
        counts = {}
        for name, watched in self.watched.items():
            if isinstance(watched.core, PrefillCore | DecodeCore):
                counts[name] = watched.core.kv_counts()
        return counts


def build_pod(topology: Topology, *, seed: int = 0) -> Pod:
    """Every actor of `topology`, with scripted executors and every invariant checked."""
    plan = plan_pod(topology)
    host = SimHost(SimOptions(seed=seed, sharding=sharding_of(topology), stall_ns=units.s(3_600)))
    tokenizer = Tokenizer.load(checkpoint_dir("xds-tiny"))
    pod = Pod(host, plan, tokenizer, Answers())
    for actor in plan.actors:
        core, executor = _build(pod, actor)
        watched = _Watched(core, pod)
        pod.watched[actor.name] = watched
        host.add(watched, dies=actor.dies, executor=executor)
    return pod


def _build(pod: Pod, actor: ActorPlan) -> tuple[Core, Executor | None]:
    plan, topology = pod.plan, pod.plan.topology
    match actor.role:
        case "control_plane":
            names = tuple(a.name for a in plan.actors if a.role != "control_plane")
            direct = tuple(n for n in names if plan.actor(n).te == "" or "te_shell" in n)
            period_ns = units.s(topology.health.control_period_s)
            return ControlPlaneCore(ControlPlaneConfig(actor.name, direct, names, period_ns)), None
        case "fabric_emulator":
            return FabricEmulatorCore(actor.name, plan.num_dies), None
        case "te_shell":
            return TeShellCore(_shell_config(plan, actor)), None
        case "prefill_te":
            return _prefill(pod, actor)
        case "decode_te":
            return _decode(pod, actor)
        case "output":
            return OutputCore(actor.name, actor.te, pod.tokenizer), None
        case "expert_die":
            placement = expert_placement(plan, actor.te, NUM_EXPERTS)
            profile = PROFILES[topology.profile]
            config = ExpertDieConfig(actor.dies[0], actor.te, placement, profile)
            return ExpertDieCore(actor.name, config), ScriptedExpert()
        case "distflow":
            return DistFlowCore(actor.name), None
        case "job_executor":
            prefill = tuple(te.name for te in topology.prefill_tes)
            decode = tuple(te.name for te in topology.decode_tes)
            return JobExecutorCore(JobExecutorConfig(actor.name, prefill, decode)), None
        case "gateway":
            limit = topology.limits.requests_in_flight_max
            return GatewayCore(GatewayConfig(actor.name, limit)), None
        case _:
            raise AssertionError(f"no core for role {actor.role}")


def _shell_config(plan: PodPlan, actor: ActorPlan) -> TeShellConfig:
    topology = plan.topology
    decode = {te.name: te for te in topology.decode_tes}.get(actor.te)
    leg, role = ("prefill", "prefill_te") if decode is None else ("decode", "decode_te")
    kv = topology.kv
    return TeShellConfig(
        name=actor.name,
        te=actor.te,
        leg=leg,
        dp_groups=tuple(a.name for a in plan.of_te(actor.te, role)),
        members=tuple(a.name for a in plan.of_te(actor.te) if a.role != "te_shell"),
        batch_max=1 if decode is None else decode.batch_max,
        queue_max=256 if decode is None else decode.queue_max,
        kv_blocks=kv.prefill_blocks if decode is None else kv.decode_blocks,
        block_size=kv.block_size,
        period_ns=units.s(topology.health.te_period_s),
    )


def _prefill(pod: Pod, actor: ActorPlan) -> tuple[Core, Executor]:
    topology = pod.plan.topology
    config = PrefillConfig(
        name=actor.name,
        te=actor.te,
        die=actor.dies[0],
        profile=PROFILES[topology.profile],
        num_layers=NUM_LAYERS,
        num_blocks=topology.kv.prefill_blocks,
        block_size=topology.kv.block_size,
        block_bytes=block_bytes(topology.kv.block_size),
        queue_max=256,
    )
    return PrefillCore(config), ScriptedPrefill(pod.answers, config.block_size)


def _decode(pod: Pod, actor: ActorPlan) -> tuple[Core, Executor]:
    topology = pod.plan.topology
    section = next(te for te in topology.decode_tes if te.name == actor.te)
    profile = PROFILES[topology.profile]
    config = DecodeConfig(
        name=actor.name,
        te=actor.te,
        die=actor.dies[0],
        placement=expert_placement(pod.plan, actor.te, NUM_EXPERTS),
        profile=profile,
        repeats=layer_repeats(profile, NUM_DENSE, NUM_LAYERS),
        num_dense=NUM_DENSE,
        num_blocks=topology.kv.decode_blocks,
        block_size=topology.kv.block_size,
        block_bytes=block_bytes(topology.kv.block_size),
        batch_max=section.batch_max,
        queue_max=section.queue_max,
        distflows=tuple(flow.name for flow in pod.plan.of_role("distflow")),
    )
    assert output_of(actor.name) in {a.name for a in pod.plan.actors}
    return DecodeCore(config), ScriptedDecode(pod.answers, config.block_size)
