"""Arming faults on the fabric of a running pod, for as long as a verification takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from libs.bus.nats import NatsBus, NatsOptions
from libs.errors import BadInput, OperatingError
from libs.fabric.faults.active import FaultRule
from libs.fabric.faults.catalogue import parameters_of
from libs.wire import subjects
from libs.wire.codec import decode_frame, encode_frame
from libs.wire.envelope import Envelope
from libs.wire.fabric import FaultArm, FaultHeal, FaultState
from services.pod.state import PodState

ANSWER_S = 5.0
EMULATOR = "fabric_emulator."


def arm_of(rule: FaultRule) -> FaultArm:
    """The command that arms `rule`, for shards in other processes; they build the same rule."""
    fault, scope = rule.fault, rule.scope
    parameters = tuple((name, int(getattr(fault, name))) for name in parameters_of(fault.KIND))
    return FaultArm(
        rule.fault_id, fault.KIND, rule.probability, rule.seed, parameters, scope.kind,
        scope.numbers, scope.plane, scope.direction, rule.start_ns, rule.duration_ns,
    )  # fmt: skip


@asynccontextmanager
async def armed(state: PodState, arms: Sequence[FaultArm]) -> AsyncIterator[dict[str, Any]]:
    """Arm every fault at every shard, and heal them at the end whatever happened.

    The dictionary that is yielded holds, after the end, what each fault has done.
    """
    done: dict[str, Any] = {}
    if not arms:
        yield done
        return
    bus = await NatsBus.connect(NatsOptions(state.nats_url, "xds"))
    shards = [actor for actor in state.actors if actor.startswith(EMULATOR)]
    try:
        for arm in arms:
            for shard in shards:
                told = await _ask(bus, shard, arm)
                if not told.armed:
                    raise BadInput(told.problem, field="faults")
        yield done
    finally:
        for arm in arms:
            counts = {"seen": 0, "touched": 0}
            for shard in shards:
                told = await _ask(bus, shard, FaultHeal(arm.fault_id))
                counts["seen"] += told.seen
                counts["touched"] += told.touched
            done[arm.fault_id] = counts
        await bus.close()


async def _ask(bus: NatsBus, shard: str, command: FaultArm | FaultHeal) -> FaultState:
    data = encode_frame(Envelope("xds", 1, 1, 0), command)
    answer = await bus.request(subjects.inbox(shard), data, ANSWER_S)
    _, message = decode_frame(answer)
    if not isinstance(message, FaultState):
        raise OperatingError(f"{shard} answered a {type(message).__name__}")
    return message
