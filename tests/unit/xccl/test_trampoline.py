from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import Backpressure, LocalProtocolError
from libs.xccl.trampoline import RESENDS_MAX, WINDOW, AttentionNode, TrampolineNode
from libs.xccl.trampoline_table import Scheme, TrampolineTable, make_table
from libs.xccl.trampoline_types import (
    A2EFrame,
    E2AFrame,
    Ignored,
    Part,
    Put,
    SourceEffect,
    Unanswered,
)
from tests.support.trampoline_pod import Pod

schemes = st.sampled_from(list(Scheme))


def table_of(attention: int, experts: int, scheme: Scheme) -> TrampolineTable:
    everybody = tuple(range(attention + experts))
    return make_table(everybody[:attention], everybody[attention:], scheme)


# ---------------------------------------------------------------- the table


def test_the_paper_s_domain_is_balanced_and_keeps_few_peers() -> None:
    """160 attention dies, 288 expert dies, 3 rows per pair: 864 rows at every trampoline."""
    table = table_of(160, 288, Scheme.GROUPED)
    arriving: Counter[int] = Counter()
    peers: dict[int, set[int]] = {}
    forwarded: dict[int, set[int]] = {}
    for source in table.attention:
        for die in table.experts:
            hop = table.first_hop(source, die)
            arriving[hop] += 3
            peers.setdefault(source, set()).add(hop)
            if hop != die:
                forwarded.setdefault(hop, set()).add(die)
    assert len(set(table.trampolines)) == 160
    assert set(arriving) == set(table.trampolines)
    assert set(arriving.values()) == {864}
    assert {len(dies) for dies in peers.values()} == {160}
    assert max(len(dies) for dies in forwarded.values()) == 2


def test_the_other_schemes_have_one_peer_or_all() -> None:
    for scheme, expected in ((Scheme.PAIRED, 1), (Scheme.STRAIGHT, 288)):
        table = table_of(160, 288, scheme)
        assert len({table.first_hop(7, die) for die in table.experts}) == expected
    paired = table_of(160, 288, Scheme.PAIRED)
    assert len({paired.first_hop(source, 200) for source in paired.attention}) == 160


@given(st.integers(1, 9), st.integers(1, 12), schemes, st.data())
def test_a_replacement_is_a_newer_table_without_the_dead(
    attention: int, experts: int, scheme: Scheme, data: st.DataObject
) -> None:
    table = table_of(attention, experts, scheme)
    while len(table.experts) > 1:
        dead = data.draw(st.sampled_from(table.experts))
        newer = table.replace(dead)
        assert newer == table.replace(dead), "the same everywhere"
        assert newer.version == table.version + 1
        assert dead not in newer.experts
        hops = {newer.first_hop(s, die) for s in newer.attention for die in newer.experts}
        assert hops <= set(newer.experts)
        moved = [a for a, b in zip(table.trampolines, newer.trampolines, strict=True) if a != b]
        assert set(moved) <= {dead}, "only the dead one's duties move"
        table = newer
    with pytest.raises(LocalProtocolError, match="last"):
        table.replace(table.experts[0])


def test_a_spare_die_takes_over_while_there_is_one() -> None:
    table = table_of(2, 3, Scheme.PAIRED)
    assert table.trampolines == (2, 3)
    assert table.replace(2).trampolines == (4, 3)
    assert table.replace(2).replace(4).trampolines == (3, 3)
    assert table.replace(4).trampolines == (2, 3)


@pytest.mark.parametrize(
    ("attention", "experts", "trampolines"),
    [((), (1,), ()), ((0,), (), ()), ((0,), (0,), (0,)), ((0,), (1,), (9,)), ((0,), (1,), (1, 1))],
)
def test_a_table_that_makes_no_sense_is_refused(
    attention: tuple[int, ...], experts: tuple[int, ...], trampolines: tuple[int, ...]
) -> None:
    with pytest.raises(LocalProtocolError):
        TrampolineTable(1, attention, experts, trampolines, Scheme.PAIRED)


# ---------------------------------------------------------------- rows there and back


works = st.lists(
    st.tuples(st.integers(0, 4), st.sets(st.integers(0, 7), min_size=1)), min_size=1, max_size=6
)


def submit(pod: Pod, wanted: list[tuple[int, set[int]]]) -> dict[tuple[int, int], list[int]]:
    asked = {}
    for source, indices in wanted:
        die = pod.table.attention[source % len(pod.table.attention)]
        dies = sorted({pod.table.experts[i % len(pod.table.experts)] for i in indices})
        asked[die, pod.send(die, dies)] = dies
    return asked


def check(pod: Pod, asked: dict[tuple[int, int], list[int]]) -> None:
    """Each row was computed at its die once, and came back once, or is known to be unplaced."""
    assert set(pod.answers) == set(asked)
    for (source, sequence), dies in asked.items():
        unplaced = [p.die for s, q, p in pod.unplaced if (s, q) == (source, sequence)]
        parts = pod.answers[source, sequence]
        assert sorted([*unplaced, *(part.die for part in parts)]) == dies
        for part in parts:
            assert part.payload == f"{source}/{sequence}>{part.die} done"
            assert pod.runs[source, sequence, part.die] == 1


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), schemes, works, st.integers(0, 2**32))
def test_each_row_is_computed_once_and_answered_once(
    attention: int,
    experts: int,
    scheme: Scheme,
    wanted: list[tuple[int, set[int]]],
    seed: int,
) -> None:
    pod = Pod(table_of(attention, experts, scheme), seed)
    asked = submit(pod, wanted)
    while pod.step():
        pass
    check(pod, asked)
    assert sum(pod.runs.values()) == sum(len(dies) for dies in asked.values())


@settings(max_examples=120, deadline=None)
@given(
    scheme=schemes,
    wanted=works,
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.2]),
    deaths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=2),
)
def test_replacing_a_dead_die_loses_and_repeats_nothing(
    scheme: Scheme,
    wanted: list[tuple[int, set[int]]],
    seed: int,
    loss: float,
    deaths: list[tuple[int, int]],
) -> None:
    pod = Pod(table_of(4, 8, scheme), seed, loss)
    asked = submit(pod, wanted)
    for index, steps in deaths:
        for _ in range(steps):
            pod.step()
        pod.kill(pod.table.experts[index % len(pod.table.experts)])
    pod.settle()
    check(pod, asked)
    assert all(count == 1 for count in pod.runs.values())
    assert all(part.die in pod.dead for _, _, part in pod.unplaced)


def test_answers_of_a_first_sending_come_in_one_frame_per_trampoline() -> None:
    pod = Pod(table_of(1, 4, Scheme.PAIRED), seed=1)
    pod.send(0, [1, 2, 3, 4])
    before = pod.frames
    assert before == 1, "one message on the first hop"
    while pod.step():
        pass
    assert len(pod.answers[0, 0]) == 4
    # 1 in, 3 forwarded, 4 computed, 3 answers to the trampoline, 1 to the source.
    assert pod.frames == 1 + 3 + 4 + 3 + 1


# ---------------------------------------------------------------- bounds and bad input


def test_the_window_is_bounded_on_both_sides() -> None:
    table = table_of(1, 2, Scheme.STRAIGHT)
    source = AttentionNode(0, table)
    for _ in range(WINDOW):
        source.send([Part(1, 1, None)])
    with pytest.raises(Backpressure, match="work 0"):
        source.send([Part(1, 1, None)])
    node = TrampolineNode(1, table)
    for sequence in (0, 5, 3 * WINDOW):
        node.handle(A2EFrame(0, sequence, False, None, (Part(1, 1, None),)))
        node.validate()
    (ignored,) = node.handle(A2EFrame(0, 2 * WINDOW, False, None, (Part(1, 1, None),)))
    assert isinstance(ignored, Ignored)
    assert ignored.reason == "stale"
    assert node.computed(0, 5, Part(1, 1, None)) == [], "given up by its source long ago"


def test_frames_that_mean_nothing_are_ignored_with_a_reason() -> None:
    node = TrampolineNode(1, table_of(1, 2, Scheme.PAIRED))
    (stranger,) = node.handle(A2EFrame(9, 0, False, None, (Part(1, 1, None),)))
    (loop,) = node.handle(A2EFrame(0, 0, False, 2, (Part(2, 1, None),)))
    assert isinstance(stranger, Ignored)
    assert isinstance(loop, Ignored)
    assert (stranger.reason, loop.reason) == ("unknown source", "a third hop")


def test_silent_dies_are_named_in_the_end() -> None:
    source = AttentionNode(0, table_of(1, 3, Scheme.STRAIGHT))
    sequence, _ = source.send([Part(1, 1, None), Part(3, 1, None)])
    source.handle(E2AFrame(0, sequence, (Part(1, 1, None),)))
    effects: list[SourceEffect] = []
    for _ in range(RESENDS_MAX + 1):
        effects = source.overdue(sequence)
    assert effects == [Unanswered(sequence, (3,))]
    assert source.overdue(sequence) == []


def test_a_source_sends_only_to_expert_dies_and_once_each() -> None:
    source = AttentionNode(0, table_of(1, 2, Scheme.GROUPED))
    with pytest.raises(LocalProtocolError):
        source.send([Part(7, 1, None)])
    with pytest.raises(LocalProtocolError):
        source.send([Part(1, 1, None), Part(1, 1, None)])


def test_an_answer_does_not_wait_for_a_dead_trampoline() -> None:
    """The die that computed knows the next table first, and answers the source itself."""
    table = table_of(1, 2, Scheme.PAIRED)
    node = TrampolineNode(2, table)
    node.handle(A2EFrame(0, 0, False, 1, (Part(2, 1, None),)))
    node.adopt(table.replace(1))
    (put,) = node.computed(0, 0, Part(2, 1, "done"))
    assert isinstance(put, Put)
    assert put.target == 0


def test_an_older_table_changes_nothing() -> None:
    old = table_of(2, 3, Scheme.PAIRED)
    new = old.replace(2)
    source, node = AttentionNode(0, new), TrampolineNode(3, new)
    assert source.adopt(old) == []
    node.adopt(old)
    assert source.table is node.table is new
