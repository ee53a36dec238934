from __future__ import annotations

from libs.xccl.agreement import Agreement, Prepare, Promise, Propose, Tell, Verdict, World


def test_two_quorums_always_meet() -> None:
    for size in range(1, 7):
        world = World(1, tuple(range(size)))
        subsets = [{rank for rank in world.ranks if mask >> rank & 1} for mask in range(1 << size)]
        quorums = [subset for subset in subsets if world.is_quorum(subset)]
        assert quorums
        assert all(one & other for one in quorums for other in quorums)


def test_a_verdict_once_accepted_is_the_one_that_is_proposed_again() -> None:
    """The coordinator that comes second learns of the first one's verdict and keeps it."""
    old = Verdict((2,), 3)
    second = Agreement(1, World(4, (0, 1, 2)))
    second.accuse((0,), 5)
    promise = Promise(4, (1, 1), (), 5, ((0, 0), old))
    tells = second.hear(promise, 2, 5)
    assert tells == []
    second.overdue()
    proposals = [tell.message for tell in second.overdue() if isinstance(tell.message, Propose)]
    proposals += [tell.message for tell in second.overdue() if isinstance(tell.message, Propose)]
    assert proposals
    assert {proposal.verdict for proposal in proposals} == {old}


def test_an_acceptor_keeps_its_promise_to_ignore_lower_ballots() -> None:
    acceptor = Agreement(1, World(1, (0, 1, 2)))
    acceptor.hear(Prepare(1, (5, 2)), 2, 0)
    assert acceptor.hear(Prepare(1, (4, 0)), 0, 0) == []
    assert acceptor.hear(Propose(1, (1, 0), Verdict((2,), 0)), 0, 0) == []
    (promise,) = acceptor.hear(Prepare(1, (6, 2)), 2, 0)
    assert promise.message == Promise(1, (6, 2), (), 0, None)


def test_a_broken_path_costs_one_rank_and_not_two() -> None:
    world = World(1, (0, 1, 2, 3))
    coordinator = Agreement(0, world)
    coordinator.accuse((), 2)
    tells: list[Tell] = []
    for rank, suspects in ((1, (2,)), (2, (1,)), (3, ())):
        tells = coordinator.hear(Promise(1, (1, 0), suspects, 2, None), rank, 2)
    assert {tell.message.verdict for tell in tells if isinstance(tell.message, Propose)} == {
        Verdict((2,), 3)
    }
