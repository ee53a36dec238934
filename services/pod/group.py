"""`python -m services.pod.group PREFIX...`: some actors of the plan in one container.

The broker is somebody else's (`XDS_NATS`), as are the other groups; all of them read the same
topology. A prefix selects every actor whose name begins with it (`decode_te.d0`, `expert_die.d0`,
`gateway`). When one actor ends, the group ends, so that the container's restart policy can do its
work.
"""

from __future__ import annotations

import os
import sys

from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.errors import BadInput
from libs.runtime.service import settings_from_env
from services.pod.fleet import Fleet
from services.pod.memory import shared_memory


def main(prefixes: list[str]) -> int:
    """Run the group until SIGTERM; 0 stopped, 1 an actor was lost, 2 bad input."""
    try:
        settings = settings_from_env({**os.environ, "XDS_ACTOR": ""})
        plan = plan_pod(load_topology(settings.topology, settings.carrier))
        actors = [a for a in plan.processes if any(a.name.startswith(p) for p in prefixes)]
        if not actors:
            known = ", ".join(actor.name for actor in plan.processes)
            raise BadInput(f"no actor begins with {prefixes}; there are {known}", field="PREFIX")
    except BadInput as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    with shared_memory(plan, actors) as shm:
        fleet = Fleet(plan, None, shm)
        fleet.load()
        fleet.start(actors, settings)
        try:
            return fleet.serve(until_one_ends=True)
        finally:
            fleet.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
