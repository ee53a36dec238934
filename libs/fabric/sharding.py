"""Which shard of the fabric emulator keeps the link at which a frame arrives.

A link is always in one hand, so that no stamp depends on how many shards there are:

    numbered   shard `0`, `1`, ... each a service of its own; dies are dealt out by number
    per die    shard `d7` beside the owner of die 7, in its process: what reaches a die passes
               through that process anyway, so a frame needs no third one on its way
    shared     the VPC cards of servers, which dies of several processes use: always shard `0`
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.config.topology import Topology
from libs.fabric.planes import Plane, is_shared, link_of
from libs.fabric.superpod import SuperPod
from libs.ids import die_shard


@dataclass(frozen=True, slots=True)
class Sharding:
    """How many numbered shards there are, and whether each die has one of its own beside."""

    numbered: int = 1
    per_die: bool = False

    def keeper(self, pod: SuperPod, plane: Plane, target: int) -> str:
        """The shard that keeps the ingress link of `target` on `plane`."""
        if is_shared(plane):
            return "0"
        return die_shard(target) if self.per_die else self.any_keeper(link_of(pod, plane, target))

    def any_keeper(self, number: int) -> str:
        """A shard that every pod has: one of the numbered ones."""
        return str(number % self.numbered)


ONE_SHARD = Sharding()


def sharding_of(topology: Topology) -> Sharding:
    """As the topology says: shared memory leads to the shard beside the die."""
    return Sharding(topology.fabric.shards, per_die=topology.fabric.carrier == "shm")
