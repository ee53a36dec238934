"""From a topology to a pod: which actors exist, on which dies, and which expert lives where.

Pure and deterministic: every process derives the same plan from the same topology, so nothing about
the layout travels at run time. Dies are numbered prefill first, then decode, then experts; those of
TEs on 910B servers follow behind the last die of the SuperPod, so that a die's number says where it
is (`libs.fabric.superpod`).
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.config.topology import PREFILL_TP as PREFILL_TP
from libs.config.topology import Topology
from libs.ids import die_shard


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One actor: its name, role and place.

    `te` is the TE it belongs to ("" for pod-wide services); `dies` are the dies it owns, the
    first of which receives its fabric frames. `beside` names the actor in whose process it lives
    ("" for a process of its own).
    """

    name: str
    role: str
    te: str = ""
    dies: tuple[int, ...] = ()
    beside: str = ""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where each expert of a decode TE lives: `die_of[expert]`, the shared expert last."""

    version: int
    dies: tuple[int, ...]
    die_of: tuple[int, ...]

    def experts_on(self, die: int) -> tuple[int, ...]:
        """The logical experts whose replica sits on `die`, ascending."""
        return tuple(expert for expert, home in enumerate(self.die_of) if home == die)


@dataclass(frozen=True, slots=True)
class PodPlan:
    """Every actor of the pod, in start order."""

    topology: Topology
    actors: tuple[ActorPlan, ...]

    def of_role(self, role: str) -> tuple[ActorPlan, ...]:
        """The actors of one role, in order."""
        return tuple(actor for actor in self.actors if actor.role == role)

    def of_te(self, te: str, role: str | None = None) -> tuple[ActorPlan, ...]:
        """The actors of one TE, optionally of one role."""
        return tuple(a for a in self.actors if a.te == te and role in (None, a.role))

    def actor(self, name: str) -> ActorPlan:
        """The actor called `name`."""
        for actor in self.actors:
            if actor.name == name:
                return actor
        raise KeyError(name)

    @property
    def processes(self) -> tuple[ActorPlan, ...]:
        """The actors that have a process of their own."""
        return tuple(actor for actor in self.actors if not actor.beside)

    def beside(self, name: str) -> tuple[ActorPlan, ...]:
        """The actors that live in the process of `name`."""
        return tuple(actor for actor in self.actors if actor.beside == name)

    def owner_of_die(self, die: int) -> ActorPlan:
        """The actor that owns `die`."""
        for actor in self.actors:
            if die in actor.dies:
                return actor
        raise KeyError(die)

    @property
    def num_dies(self) -> int:
        """Dies in use."""
        return sum(len(actor.dies) for actor in self.actors)


def expert_placement(plan: PodPlan, te: str, num_routed_experts: int) -> ExpertPlacement:
    """Spread the routed experts round-robin over the TE's expert dies; the shared one on the last.

    Round-robin keeps neighbours of one routing group on different dies, so that a token whose two
    groups win does not load one die with all its experts.
    """
    dies = tuple(actor.dies[0] for actor in plan.of_te(te, "expert_die"))
    assert dies, f"decode TE {te} has no expert dies"
    routed = tuple(dies[expert % len(dies)] for expert in range(num_routed_experts))
    return ExpertPlacement(version=1, dies=dies, die_of=(*routed, dies[-1]))


def plan_pod(topology: Topology) -> PodPlan:
    """Lay the topology out."""
    actors: list[ActorPlan] = [ActorPlan("control_plane.0", "control_plane")]
    actors += [
        ActorPlan(f"fabric_emulator.{shard}", "fabric_emulator")
        for shard in range(topology.fabric.shards)
    ]
    next_die = 0
    next_outside = topology.pod_servers * topology.dies_per_server
    for prefill in topology.prefill_tes:
        actors.append(ActorPlan(f"te_shell.{prefill.name}", "te_shell", prefill.name))
        outside = prefill.name in topology.hardware.on_910b
        for dp in range(prefill.dp_groups):
            first = next_outside if outside else next_die
            dies = tuple(range(first, first + PREFILL_TP))
            if outside:
                next_outside += PREFILL_TP
            else:
                next_die += PREFILL_TP
            actors += _dp_group("prefill_te", prefill.name, dp, dies)
    for decode in topology.decode_tes:
        actors.append(ActorPlan(f"te_shell.{decode.name}", "te_shell", decode.name))
        for dp in range(decode.dp_groups):
            actors += _dp_group("decode_te", decode.name, dp, (next_die,))
            next_die += 1
        for index in range(decode.expert_dies):
            name = f"expert_die.{decode.name}.e{index}"
            actors.append(ActorPlan(name, "expert_die", decode.name, (next_die,)))
            next_die += 1
    actors += [
        ActorPlan(f"distflow.{prefill.name}.{decode.name}", "distflow")
        for prefill in topology.prefill_tes
        for decode in topology.decode_tes
    ]
    actors += [
        ActorPlan(f"job_executor.{i}", "job_executor") for i in range(topology.job_executors)
    ]
    actors += [ActorPlan(f"gateway.{i}", "gateway") for i in range(topology.gateways)]
    if topology.fabric.carrier == "shm":
        actors += [_shard_beside(actor) for actor in actors if actor.dies]
    names = [actor.name for actor in actors]
    assert len(names) == len(set(names)), "actor names must be unique"
    return PodPlan(topology, tuple(actors))


def _dp_group(role: str, te: str, dp: int, dies: tuple[int, ...]) -> list[ActorPlan]:
    """A DP group is a full stack: its master and the output process that streams for it (P056)."""
    return [
        ActorPlan(f"{role}.{te}.dp{dp}", role, te, dies),
        ActorPlan(f"output.{te}.dp{dp}", "output", te),
    ]


def _shard_beside(actor: ActorPlan) -> ActorPlan:
    """The shard of the fabric that stamps what reaches the die of `actor`."""
    name = f"fabric_emulator.{die_shard(actor.dies[0])}"
    return ActorPlan(name, "fabric_emulator", beside=actor.name)


def output_of(dp_actor: str) -> str:
    """The output process of a DP group master: `decode_te.d0.dp1` -> `output.d0.dp1`."""
    return "output." + dp_actor.split(".", 1)[1]
