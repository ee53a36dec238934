"""The machine: which dies, chips and servers there are, and what may run where.

    die 0 .. pod_dies-1      the SuperPod: server by server, chip by chip, two dies a chip (910C)
    die pod_dies ..          910B servers beside it: single-die chips, RoCE and VPC only

A full SuperPod has 48 servers of 8 chips and 4 CPUs, 768 dies in all (P024). Every die of it
reaches every other over UB at the same cost (P025), through one switch chip of its server and one
switch of the same sub-plane above; there are seven sub-planes, and seven UB links per die. A
smaller pod is the same machine with fewer servers.

A 910B server is reached over RoCE or VPC. Its dies may prefill; what needs the UB plane in every
layer (decode, experts) is refused there, with the reason (P008, P104).
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.config.plan import PodPlan
from libs.config.topology import DIES_PER_910B_SERVER, DIES_PER_CHIP
from libs.errors import BadInput

#: Vector cores of one die (given: CloudMatrix384, arXiv 2506.12708).
AIV_PER_DIE = 48
#: Kunpeng CPUs of one server (given, same source).
CPUS_PER_SERVER = 4
#: UB links of one die, one into each sub-plane of the switches (given: 7 x 28 GB/s).
UB_SUB_PLANES = 7

#: Roles that exchange data with other dies in every layer, and so need the UB plane.
_NEED_UB = {"decode_te": "decode", "expert_die": "an expert die"}


@dataclass(frozen=True, slots=True)
class SuperPod:
    """A SuperPod of `servers` and the 910B servers beside it; the default is the full machine."""

    servers: int = 48
    chips_per_server: int = 8
    outside_910b_servers: int = 0
    #: What connects the 910B servers: `roce` or `vpc`.
    outside_plane: str = "roce"

    def __post_init__(self) -> None:
        if not (1 <= self.servers <= 48 and 1 <= self.chips_per_server <= 8):
            raise BadInput("a SuperPod has 1 to 48 servers of 1 to 8 chips", field="hardware")
        if self.outside_910b_servers < 0 or self.outside_plane not in ("roce", "vpc"):
            raise BadInput("910B servers are connected by roce or vpc", field="hardware")

    # ------------------------------------------------------------ sizes

    @property
    def dies_per_server(self) -> int:
        """Dies of one server of the SuperPod."""
        return self.chips_per_server * DIES_PER_CHIP

    @property
    def pod_dies(self) -> int:
        """Dies on the UB plane."""
        return self.servers * self.dies_per_server

    @property
    def chips(self) -> int:
        """910C chips, the unit in which throughput is reported."""
        return self.servers * self.chips_per_server

    @property
    def cpus(self) -> int:
        """CPUs of the SuperPod."""
        return self.servers * CPUS_PER_SERVER

    @property
    def num_dies(self) -> int:
        """All dies, those of 910B servers included."""
        return self.pod_dies + self.outside_910b_servers * DIES_PER_910B_SERVER

    @property
    def num_servers(self) -> int:
        """All servers, 910B ones included (numbered behind the SuperPod's)."""
        return self.servers + self.outside_910b_servers

    @property
    def ub_pairs(self) -> int:
        """Unordered pairs of dies on the UB plane: 294,528 in a full SuperPod (P010, P033)."""
        return self.pod_dies * (self.pod_dies - 1) // 2

    # ------------------------------------------------------------ places

    def has_die(self, die: int) -> bool:
        """Whether there is such a die."""
        return 0 <= die < self.num_dies

    def is_outside(self, die: int) -> bool:
        """Whether `die` sits in a 910B server."""
        return die >= self.pod_dies

    def chip_of(self, die: int) -> int:
        """The chip of `die`; a 910B chip is one die."""
        assert self.has_die(die), die
        if self.is_outside(die):
            return self.chips + die - self.pod_dies
        return die // DIES_PER_CHIP

    def server_of(self, die: int) -> int:
        """The server of `die`."""
        assert self.has_die(die), die
        if self.is_outside(die):
            return self.servers + (die - self.pod_dies) // DIES_PER_910B_SERVER
        return die // self.dies_per_server

    def dies_of_server(self, server: int) -> range:
        """The dies of `server`, ascending."""
        assert 0 <= server < self.num_servers, server
        if server < self.servers:
            first = server * self.dies_per_server
            return range(first, first + self.dies_per_server)
        first = self.pod_dies + (server - self.servers) * DIES_PER_910B_SERVER
        return range(first, first + DIES_PER_910B_SERVER)

    def sub_plane_of(self, source: int, target: int) -> int:
        """The UB sub-plane whose switches carry what goes from `source` to `target`.

        One ordered pair keeps to one sub-plane, which preserves its order (assumed: how the
        switches spread traffic is not published). Pairs are spread evenly.
        """
        return (source + target) % UB_SUB_PLANES

    # ------------------------------------------------------------ rules

    def refusal(self, role: str, die: int) -> str | None:
        """Why `role` may not run on `die`, or None when it may."""
        if not self.has_die(die):
            return f"die {die} does not exist: the machine has {self.num_dies}"
        needs = _NEED_UB.get(role)
        if needs is None or not self.is_outside(die):
            return None
        return (
            f"die {die} is in 910B server {self.server_of(die)}, outside the UB plane that"
            f" {needs} needs in every layer; 910B dies may only prefill"
        )

    def require(self, role: str, die: int) -> None:
        """Raise `BadInput` with the reason when `role` may not run on `die`."""
        reason = self.refusal(role, die)
        if reason is not None:
            raise BadInput(f"{role}: {reason}", field="hardware")


WHOLE_SUPERPOD = SuperPod()


def superpod_of(plan: PodPlan) -> SuperPod:
    """The machine under a planned pod; raises `BadInput` when an actor may not be where it is."""
    topology, hardware = plan.topology, plan.topology.hardware
    pod = SuperPod(
        topology.pod_servers,
        hardware.chips_per_server,
        hardware.outside_910b_servers,
        hardware.outside_plane,
    )
    for actor in plan.actors:
        for die in actor.dies:
            pod.require(actor.role, die)
    return pod
