"""Dies that send to each other over the worst fabric there is, one step at a time.

    world = World(dies=2)
    world.transfer(0, 1, nbytes=300)
    world.deliver(3); world.lose(0); world.duplicate(2); world.answer(1); world.wait(0)
    world.settle()

Writes lie in a bag. Any may land next, unless an earlier fence of its lane forbids it; any may be
lost; any may land again, long afterwards. Local copies happen when they are answered, so a slot
may change up to that moment. What the world watches over is stated in `_complete` and `check`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from libs.errors import RemoteProtocolError
from libs.xccl import p2p
from libs.xccl.endpoint import Endpoint
from libs.xccl.frames import pack_write, unpack_write
from libs.xccl.memory import DieMemory, Quota
from libs.xccl.p2p import Complete, Failed, Flow, Limits, Receive, Role, Send
from libs.xccl.paths import Path
from libs.xccl.ring import RingShape

SHAPE = RingShape(slots=2, payload_bytes=64, lanes=3)
LIMITS = Limits(wait_ns=1_000, retransmits_max=3, receive_waits_max=8)
APPLICATION_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Packet:
    """A write under way. Between `section`s of one `stream` lies a fence; late copies ignore it."""

    source: int
    target: int
    frame: bytes
    stream: tuple[int, int, Flow, int]
    section: int
    late: bool = False


@dataclass(slots=True)
class Transfer:
    """One message as a bystander sees it."""

    event: int
    source: int
    target: int
    source_offset: int
    offset: int
    content: bytes
    sent: Complete | Failed | None = None
    received: Complete | Failed | None = None
    #: The destination when its receiver was told the end; it must not change afterwards.
    left: bytes = b""


@dataclass(slots=True)
class _Die:
    life: int
    endpoint: Endpoint
    buffer: bytearray
    answers: list[p2p.Load | p2p.Fence | p2p.LocalCopy] = field(default_factory=list)
    waits: list[p2p.Wait] = field(default_factory=list)
    used: int = 0


class World:
    """`fenced` False is a fabric that reorders in spite of fences."""

    def __init__(
        self, dies: int = 2, *, fenced: bool = True, shape: RingShape = SHAPE,
        limits: Limits = LIMITS, quota: Quota | None = None,
    ) -> None:  # fmt: skip
        self.fenced = fenced
        self.shape = shape
        self.limits = limits
        self.quota = quota
        self.dies = [self._new_die(die, 1) for die in range(dies)]
        self.bag: list[Packet] = []
        self.transfers: dict[int, Transfer] = {}
        self.unposted: list[tuple[int, Receive]] = []
        self.landed = 0
        self._waits = 0
        self._began: dict[tuple[int, Flow], int] = {}
        self._sections: defaultdict[tuple[int, int, Flow, int], int] = defaultdict(int)

    def _new_die(self, die: int, life: int) -> _Die:
        buffer = bytearray(APPLICATION_BYTES)
        memory = DieMemory(buffer, self.quota)
        return _Die(life, Endpoint(die, life, memory, self.shape, self.limits), buffer)

    def endpoint(self, die: int) -> Endpoint:
        return self.dies[die].endpoint

    # ------------------------------------------------------------ orders

    def transfer(
        self, source: int, target: int, nbytes: int, *, aivs: int = 2, direct: bool = False,
        path: Path = Path.MTE, later: bool = False,
    ) -> Transfer:  # fmt: skip
        """Post a send and its receive, or leave the receive for `post`."""
        event = p2p.event_id(7, len(self.transfers) + 1)
        content = bytes((event * 37 + index * 11) % 251 for index in range(nbytes))
        begin, goal = self._space(source, nbytes), self._space(target, nbytes)
        self.dies[source].buffer[begin : begin + nbytes] = content
        made = Transfer(event, source, target, begin, goal, content)
        self.transfers[event] = made
        memory = self.endpoint(target).memory
        into = memory.register(goal, nbytes) if direct else None
        receive = Receive(event, source, goal, nbytes, aivs, into)
        send = Send(event, target, begin, nbytes, aivs, path, into)
        self.unposted.append((target, receive))
        if not later:
            self.post(-1)
        self._carry_out(source, self.endpoint(source).send(send))
        return made

    def post(self, index: int) -> None:
        """Post one of the receives that were left for later."""
        if self.unposted:
            at = index if index < 0 else index % len(self.unposted)
            target, receive = self.unposted.pop(at)
            if self.transfers[receive.event].received is None:  # its die did not restart
                self._carry_out(target, self.endpoint(target).receive(receive))

    def cancel(self, index: int, role: Role) -> None:
        """One end gives a message up."""
        if self.transfers:
            transfer = list(self.transfers.values())[index % len(self.transfers)]
            sends = role is Role.SEND
            die, peer = transfer.source, transfer.target
            die, peer = (die, peer) if sends else (peer, die)
            effects = self.endpoint(die).cancel(Flow(peer, role), transfer.event, "cancelled")
            self._carry_out(die, effects)

    def _space(self, die: int, nbytes: int) -> int:
        begin = self.dies[die].used
        self.dies[die].used += nbytes
        assert self.dies[die].used <= APPLICATION_BYTES
        return begin

    # ------------------------------------------------------------ steps

    def movable(self) -> list[Packet]:
        """Packets that may land next."""
        if not self.fenced:
            return list(self.bag)
        first: dict[tuple[int, int, Flow, int], int] = {}
        for packet in self.bag:
            if not packet.late:
                known = first.get(packet.stream, packet.section)
                first[packet.stream] = min(known, packet.section)
        return [x for x in self.bag if x.late or x.section == first[x.stream]]

    def deliver(self, index: int, *, damage: int | None = None) -> None:
        """Let a packet land, as it is or with one byte flipped."""
        movable = self.movable()
        if movable:
            packet = movable[index % len(movable)]
            self.bag.remove(packet)
            self._land(packet, damage)

    def _land(self, packet: Packet, damage: int | None = None) -> None:
        frame = bytearray(packet.frame)
        if damage is not None:
            frame[damage % len(frame)] ^= 0x55
        try:
            landing = unpack_write(bytes(frame))
        except RemoteProtocolError:
            return
        self.landed += 1
        endpoint = self.endpoint(packet.target)
        self._carry_out(packet.target, endpoint.land(packet.source, landing))

    def lose(self, index: int) -> None:
        """A packet is lost."""
        if self.bag:
            self.bag.pop(index % len(self.bag))

    def duplicate(self, index: int) -> None:
        """A packet will land once more, at any time."""
        if self.bag:
            packet = self.bag[index % len(self.bag)]
            copy = Packet(
                packet.source, packet.target, packet.frame, packet.stream, packet.section, True
            )
            self.bag.append(copy)

    def answer(self, index: int) -> None:
        """A die's engine finishes something; copies of one lane end in order."""
        ready: list[tuple[int, int]] = []
        for die, state in enumerate(self.dies):
            seen: set[tuple[Flow, int]] = set()
            for place, asked in enumerate(state.answers):
                if isinstance(asked, p2p.LocalCopy):
                    lane = asked.flow, asked.lane
                    if lane in seen:
                        continue
                    seen.add(lane)
                ready.append((die, place))
        if ready:
            die, place = ready[index % len(ready)]
            self._answer(die, self.dies[die].answers.pop(place))

    def _answer(self, die: int, asked: p2p.Load | p2p.Fence | p2p.LocalCopy) -> None:
        endpoint = self.endpoint(die)
        match asked:
            case p2p.Load():
                event: p2p.Event = p2p.Loaded(asked.flow, asked.lane, asked.number)
            case p2p.Fence():
                self._sections[self._stream(die, asked.flow, asked.lane)] += 1
                event = p2p.Fenced(asked.flow, asked.lane, asked.number)
            case p2p.LocalCopy():
                event = endpoint.copy(asked)
            case _:
                raise AssertionError(asked)
        self._carry_out(die, endpoint.handle(event))

    def wait(self, index: int) -> None:
        """A wait ends, be it early or late."""
        waits = [(die, asked) for die, state in enumerate(self.dies) for asked in state.waits]
        if waits:
            self._wait_over(*waits[index % len(waits)])

    def wait_oldest(self) -> None:
        """All waits are equally long, so the one that began first ends first."""
        waits = [(die, asked) for die, state in enumerate(self.dies) for asked in state.waits]
        if waits:
            self._wait_over(*min(waits, key=lambda x: self._began[x[0], x[1].flow]))

    def _wait_over(self, die: int, asked: p2p.Wait) -> None:
        self.dies[die].waits.remove(asked)
        event = p2p.WaitOver(asked.flow, asked.number)
        self._carry_out(die, self.endpoint(die).handle(event))

    def rot(self, die: int, index: int) -> None:
        """A byte changes in a slot of a die's managed memory."""
        memory = self.endpoint(die).memory
        rings = [memory.lane(*key) for key in memory.open_rings()]
        if rings:
            ring = rings[index % len(rings)]
            assert ring is not None
            ring[index * 31 % len(ring)] ^= 0x55

    def restart(self, die: int, *, told: bool = True) -> None:
        """A die loses its memory and comes back in its next life; peers are told, or not yet."""
        old = self.dies[die]
        self.dies[die] = self._new_die(die, old.life + 1)
        self.dies[die].used = old.used
        for other, state in enumerate(self.dies):
            if other != die:
                effects = self.dies[die].endpoint.peer_restarted(other, state.life)
                self._carry_out(die, effects)
        for transfer in self.transfers.values():
            gone = Failed(Flow(die, Role.SEND), transfer.event, p2p.Step.OPEN, "restarted", False)
            if transfer.source == die and transfer.sent is None:
                transfer.sent = gone
            if transfer.target == die:
                transfer.received = transfer.received or gone
                transfer.left = bytes(len(transfer.content))
        if told:
            self.tell(die)

    def tell(self, die: int) -> None:
        """Everybody learns of the life in which `die` is."""
        for other in range(len(self.dies)):
            if other != die:
                effects = self.endpoint(other).peer_restarted(die, self.dies[die].life)
                self._carry_out(other, effects)

    # ------------------------------------------------------------ effects

    def _stream(self, die: int, flow: Flow, lane: int) -> tuple[int, int, Flow, int]:
        return die, self.dies[die].life, flow, lane

    def _carry_out(self, die: int, effects: list[p2p.Effect]) -> None:
        state = self.dies[die]
        for effect in effects:
            match effect:
                case p2p.RemoteWrite():
                    stream = self._stream(die, effect.flow, effect.tag.lane)
                    section = self._sections[stream]
                    frame = pack_write(effect)
                    self.bag.append(Packet(die, effect.target, frame, stream, section))
                case p2p.Load() | p2p.Fence() | p2p.LocalCopy():
                    state.answers.append(effect)
                case p2p.Wait():
                    state.waits = [x for x in state.waits if x.flow != effect.flow]
                    state.waits.append(effect)
                    self._began[die, effect.flow] = self._waits = self._waits + 1
                case Complete() | Failed():
                    self._ended(die, effect)
                case _:
                    raise AssertionError(effect)
        state.endpoint.validate()

    def _ended(self, die: int, outcome: Complete | Failed) -> None:
        transfer = self.transfers[outcome.event]
        if outcome.flow.role is Role.SEND:
            assert transfer.sent is None, "two ends of one send"
            transfer.sent = outcome
            if isinstance(outcome, Complete):
                assert isinstance(transfer.received, Complete), "complete, and not received"
            # The owner may use its source for something else at once.
            begin = transfer.source_offset
            self.dies[die].buffer[begin : begin + len(transfer.content)] = b"\xee" * len(
                transfer.content
            )
            return
        assert transfer.received is None, "two ends of one receive"
        transfer.received = outcome
        transfer.left = self.destination(transfer)
        if isinstance(outcome, Complete):
            assert transfer.left == transfer.content, "complete, and not what was sent"

    def destination(self, transfer: Transfer) -> bytes:
        """What lies at the destination now."""
        begin = transfer.offset
        return bytes(self.dies[transfer.target].buffer[begin : begin + len(transfer.content)])

    # ------------------------------------------------------------ the end

    def settle(self, *, steps_max: int = 200_000) -> None:
        """From here on the fabric behaves; everything must come to its end."""
        for die in range(len(self.dies)):
            self.tell(die)
        while self.unposted:
            self.post(0)
        for _ in range(steps_max):
            if any(state.answers for state in self.dies):
                self.answer(0)
            elif self.bag:
                self.deliver(0)
            elif self.running():
                self.wait_oldest()
            else:
                break
        self.check()
        assert not self.running(), "somebody waits for ever"

    def running(self) -> list[Transfer]:
        """Transfers that have not ended on both sides."""
        return [x for x in self.transfers.values() if x.sent is None or x.received is None]

    def check(self) -> None:
        """Nothing has touched a destination since its receiver was told the end."""
        for transfer in self.transfers.values():
            if transfer.received is not None:
                assert self.destination(transfer) == transfer.left, "written after the end"
