from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from libs.errors import LocalProtocolError, RemoteProtocolError
from libs.model.exact import COMBINE_BITS
from libs.model.linear import Rows
from libs.model.moe import Routed
from libs.xccl.agreement import Tell, World
from libs.xccl.collective_types import (
    CollectiveEvent,
    Heard,
    Limits,
    Missing,
    Pull,
    Pulled,
    Wait,
    WaitOver,
    WorldChanged,
    Write,
    Written,
)
from libs.xccl.combine import (
    ColocatedEffect,
    ColocatedRank,
    Combined,
    Dispatched,
    Unusable,
    Wire,
    combined,
    from_bf16,
    outgoing,
    to_bf16,
)

HIDDEN = 4
EXPERTS = 6
GRID = float(1 << COMBINE_BITS)


def partial_of(batch: Routed) -> NDArray[np.float64]:
    """What experts could answer: integers that depend on row, expert and weight."""
    total = np.zeros((len(batch.rows), HIDDEN))
    for column in range(batch.topk_idx.shape[1]):
        expert = batch.topk_idx[:, column : column + 1]
        value = np.rint(batch.rows.data * (expert + 1) * batch.topk_weights[:, column, None] * GRID)
        total += np.where(expert >= 0, value, 0.0)
    return total


def batch_of(rank: int, tokens: int) -> Routed:
    generator = np.random.default_rng(100 + rank)
    order = np.argsort(generator.random((tokens, EXPERTS)), axis=1)[:, :3]
    rows = Rows(generator.integers(-9, 9, (tokens, HIDDEN)).astype(np.float32))
    return Routed(rows, order.astype(np.int32), generator.random((tokens, 3)).astype(np.float32))


class Layer:
    """Ranks that run one MoE layer over a perfect network; `dead` ranks neither act nor answer."""

    def __init__(self, tokens: Mapping[int, int], wire: Wire = Wire.EXACT) -> None:
        world = World(1, tuple(sorted(tokens)))
        limits = Limits(unit=2, asks_max=0)
        self.tokens = tokens
        self.ranks = {rank: ColocatedRank(rank, world, wire, limits) for rank in world.ranks}
        self.dead: set[int] = set()
        self.die_before_combine: set[int] = set()
        self.totals: dict[int, NDArray[np.float64]] = {}
        self._inbox: list[tuple[int, CollectiveEvent]] = []
        self._waits: list[tuple[int, int, int]] = []
        self._now = 0

    def run(self) -> None:
        for rank in self.ranks:
            self._dispatch(rank)
        for _ in range(200):
            while self._inbox:
                rank, event = self._inbox.pop(0)
                if rank not in self.dead:
                    self._carry_out(rank, self.ranks[rank].handle(event))
                    self.ranks[rank].validate()
            if set(self.totals) >= self.ranks.keys() - self.dead:
                return
            # Messages take no time, so the next thing to happen is the earliest deadline.
            self._now, rank, number = heapq.heappop(self._waits)
            self._inbox.append((rank, WaitOver(number)))
        raise AssertionError("the layer does not end")

    def _dispatch(self, rank: int) -> None:
        alive = self.ranks[rank].collective.world.ranks
        owners = np.array([alive[e % len(alive)] for e in range(EXPERTS)], np.int32)
        batch = batch_of(rank, self.tokens[rank])
        self._carry_out(rank, self.ranks[rank].dispatch(batch, owners, fuse_int8=False))

    def _carry_out(self, rank: int, effects: list[ColocatedEffect]) -> None:
        for effect in effects:
            match effect:
                case Write(target=target, field=field):
                    self._inbox.append((target, Written(rank, field)))
                case Pull(source=source, field=field):
                    if source not in self.dead:
                        rows = self.ranks[source].read(rank, field)
                        self._inbox.append((rank, Pulled(source, field, rows)))
                case Dispatched(batches=batches):
                    if rank in self.die_before_combine:
                        self.dead.add(rank)
                        return
                    partials = {source: partial_of(batch) for source, batch in batches.items()}
                    self._carry_out(rank, self.ranks[rank].combine(partials))
                case Combined(total=total):
                    self.totals[rank] = total
                case WorldChanged(resume=resume):
                    assert resume == 0, "dispatch and combine are run again together"
                    self.totals.pop(rank, None)
                    self._dispatch(rank)
                case Wait(number=number, delay_ns=delay):
                    heapq.heappush(self._waits, (self._now + delay, rank, number))
                case Tell(target=target, message=message):
                    self._inbox.append((target, Heard(rank, message)))
                case Missing(ranks=ranks):
                    assert set(ranks) <= self.die_before_combine
                case _:
                    raise AssertionError(f"unexpected {effect!r}")


@pytest.mark.parametrize("tokens", [{0: 5, 1: 3, 2: 4}, {0: 6, 1: 0, 2: 1}, {0: 0, 1: 0}, {0: 7}])
def test_a_layer_equals_all_experts_in_one_place(tokens: dict[int, int]) -> None:
    layer = Layer(tokens)
    layer.run()
    for rank, number in tokens.items():
        assert layer.totals[rank].tolist() == partial_of(batch_of(rank, number)).tolist()


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_a_death_between_dispatch_and_combine_runs_the_layer_again_without_it(dead: int) -> None:
    layer = Layer({0: 5, 1: 3, 2: 4, 3: 2})
    layer.die_before_combine = {dead}
    layer.run()
    survivors = [rank for rank in layer.ranks if rank != dead]
    assert {layer.ranks[r].collective.world for r in survivors} == {World(2, tuple(survivors))}
    for rank in survivors:
        assert (
            layer.totals[rank].tolist() == partial_of(batch_of(rank, layer.tokens[rank])).tolist()
        )


@pytest.mark.parametrize("wire", [Wire.BF16, Wire.INT8])
def test_narrow_wires_err_no_more_than_they_say(wire: Wire) -> None:
    tokens = {0: 9, 1: 7}
    layer, exact = Layer(tokens, wire), Layer(tokens)
    layer.run()
    exact.run()
    for rank, number in tokens.items():
        batch = batch_of(rank, number)
        # Two ranks answer, so each element has at most two partials.
        bound = np.zeros((number, HIDDEN))
        for owner in (0, 1):
            here = np.where(batch.topk_idx % 2 == owner, batch.topk_idx, np.int32(-1))
            part = partial_of(Routed(batch.rows, here, batch.topk_weights))
            peak = np.abs(part).max(axis=1, keepdims=True)
            bound += np.abs(part) / 256 if wire is Wire.BF16 else peak / 254
        error = np.abs(layer.totals[rank] - exact.totals[rank])
        assert (error <= bound * (1 + 1e-4) + 1e-6 * GRID).all()
        assert error.any(), "the wire is really narrow"


@settings(max_examples=60)
@given(st.permutations(range(5)), st.integers(0, 2**16))
def test_exact_sums_do_not_depend_on_the_order(order: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    partials = {r: generator.integers(-(2**48), 2**48, (3, HIDDEN)).astype(float) for r in range(5)}
    tokens = {rank: np.arange(3) for rank in partials}
    arrived = outgoing({rank: partials[rank] for rank in order})
    assert (
        combined(arrived, tokens, (3, HIDDEN)).tolist()
        == np.sum(list(partials.values()), axis=0).tolist()
    )


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**100))
def test_bf16_is_the_nearest_and_stable(x: float) -> None:
    value = np.array([x], np.float32)
    there = to_bf16(value)
    back = from_bf16(there)
    if np.isfinite(back).all() and abs(x) > 2.0**-120:
        assert abs(float(back[0]) - float(value[0])) <= abs(float(value[0])) / 256
        assert to_bf16(back).tolist() == there.tolist()


def test_ties_of_bf16_go_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    assert from_bf16(to_bf16(ties)).tolist() == [1.0, 1 + 2**-6]


def test_answers_that_do_not_fit_are_refused() -> None:
    tokens = {1: np.arange(2)}
    good = np.zeros((2, HIDDEN))
    for arrived in (
        {},
        {1: (good,), 2: (good,)},
        {1: (good[:1],)},
        {1: (good.astype(np.float32),)},
        {1: (good, good)},
    ):
        with pytest.raises(RemoteProtocolError):
            combined(arrived, tokens, (2, HIDDEN))


def test_halves_alternate() -> None:
    rank = ColocatedRank(0, World(1, (0,)))
    with pytest.raises(LocalProtocolError, match="dispatch comes before"):
        rank.combine({})
    rank.dispatch(batch_of(0, 2), np.zeros(EXPERTS, np.int32))
    with pytest.raises(LocalProtocolError, match="combine comes before"):
        rank.dispatch(batch_of(0, 2), np.zeros(EXPERTS, np.int32))
    with pytest.raises(LocalProtocolError, match="unit"):
        ColocatedRank(0, World(1, (0,)), limits=Limits(unit=1))


def test_what_is_no_answer_is_told_and_not_raised() -> None:
    """The only rank answers its own two rows with one."""
    rank = ColocatedRank(0, World(1, (0,)))
    rank.dispatch(batch_of(0, 2), np.zeros(EXPERTS, np.int32))
    effects = rank.combine({0: np.zeros((1, HIDDEN))})
    assert [type(effect) for effect in effects if not isinstance(effect, Wait)] == [Unusable]
