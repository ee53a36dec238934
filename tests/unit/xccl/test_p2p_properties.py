"""Any interleaving, loss, double, delay, damage and restart: equal bytes, or a failure, never less.

What is watched over stands in `tests.support.p2p_world`: a receive completes only with what was
sent; a send completes only if its receive has; after the end nothing touches the destination, and
every ring's accounts are checked after every step.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.xccl.p2p import Complete, Role
from libs.xccl.paths import Path
from tests.support.p2p_world import World

INDEX = st.integers(0, 999)
NBYTES = st.sampled_from([0, 1, 64, 65, 130, 300, 700])
TRANSFERS_MAX = 6


class AnyFabric(RuleBasedStateMachine):
    """Two dies; the rules are what the world may do to them."""

    world: World

    @initialize(fenced=st.booleans())
    def begin(self, fenced: bool) -> None:
        self.world = World(fenced=fenced)

    @precondition(lambda self: len(self.world.transfers) < TRANSFERS_MAX)
    @rule(
        back=st.booleans(), nbytes=NBYTES, aivs=st.integers(1, 4), direct=st.booleans(),
        path=st.sampled_from(Path), later=st.booleans(),
    )  # fmt: skip
    def transfer(
        self, back: bool, nbytes: int, aivs: int, direct: bool, path: Path, later: bool
    ) -> None:
        source, target = (1, 0) if back else (0, 1)
        self.world.transfer(
            source, target, nbytes, aivs=aivs, direct=direct, path=path, later=later
        )

    @rule(index=INDEX)
    def post(self, index: int) -> None:
        self.world.post(index)

    @rule(index=INDEX, role=st.sampled_from(Role))
    def cancel(self, index: int, role: Role) -> None:
        self.world.cancel(index, role)

    @rule(index=INDEX, times=st.integers(1, 8))
    def deliver(self, index: int, times: int) -> None:
        for _ in range(times):
            self.world.deliver(index)

    @rule(index=INDEX, times=st.integers(1, 8))
    def answer(self, index: int, times: int) -> None:
        for _ in range(times):
            self.world.answer(index)

    @rule(index=INDEX)
    def lose(self, index: int) -> None:
        self.world.lose(index)

    @rule(index=INDEX)
    def duplicate(self, index: int) -> None:
        self.world.duplicate(index)

    @rule(index=INDEX, place=INDEX)
    def damage(self, index: int, place: int) -> None:
        self.world.deliver(index, damage=place)

    @rule(index=INDEX)
    def wait(self, index: int) -> None:
        self.world.wait(index)

    @rule(die=st.integers(0, 1), told=st.booleans())
    def restart(self, die: int, told: bool) -> None:
        self.world.restart(die, told=told)

    @rule(die=st.integers(0, 1), index=INDEX)
    def rot(self, die: int, index: int) -> None:
        self.world.rot(die, index)

    @rule(die=st.integers(0, 1))
    def tell(self, die: int) -> None:
        self.world.tell(die)

    @rule(seed=st.integers(0, 1 << 32), trouble=st.sampled_from([0.0, 0.02, 0.1, 0.3]))
    def storm(self, seed: int, trouble: float) -> None:
        """A hundred steps at once, so that a few rules reach deep into a message."""
        draw = random.Random(seed)
        for _ in range(100):
            index, luck = draw.randrange(1000), draw.random()
            if luck < trouble:
                self.lose(index)
            elif luck < 2 * trouble:
                self.duplicate(index)
            elif luck < 2.1 * trouble:
                self.wait(index)
            elif luck < 2.2 * trouble:
                self.damage(index, index)
            elif luck < 2.25 * trouble:
                self.rot(index % 2, index)
            elif luck < 0.7:
                self.world.answer(index)
            else:
                self.world.deliver(index)

    @invariant()
    def nothing_is_written_after_the_end(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


class QuietFabric(AnyFabric):
    """A fabric that doubles and delays, and does nothing worse: everything must complete."""

    @rule(index=INDEX)
    def lose(self, index: int) -> None:
        """Nothing is lost here."""

    @rule(index=INDEX, place=INDEX)
    def damage(self, index: int, place: int) -> None:
        """Nothing is damaged here."""

    @rule(die=st.integers(0, 1), index=INDEX)
    def rot(self, die: int, index: int) -> None:
        """Memory keeps what it is given."""

    @rule(index=INDEX)
    def wait(self, index: int) -> None:
        """Waits end when nothing else is left."""

    @rule(die=st.integers(0, 1), told=st.booleans())
    def restart(self, die: int, told: bool) -> None:
        """Nobody restarts here."""

    @rule(index=INDEX, role=st.sampled_from(Role))
    def cancel(self, index: int, role: Role) -> None:
        """Nobody changes their mind here."""

    def teardown(self) -> None:
        super().teardown()
        for transfer in self.world.transfers.values():
            assert isinstance(transfer.sent, Complete), transfer
            assert isinstance(transfer.received, Complete), transfer


AnyFabric.TestCase.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
QuietFabric.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAnyFabric = AnyFabric.TestCase
TestQuietFabric = QuietFabric.TestCase
