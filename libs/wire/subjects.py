"""Every subject of the pod, in one table: who listens, who speaks.

    xds.act.<actor>        the actor's inbox for control messages        anyone -> the actor
    xds.je.submit          queue group of all job executors              gateway -> a random JE
    (P096)
    xds.ub.<die>           fabric frames delivered to a die              fabric emulator -> its
    owner
    xds.fabric.<shard>     fabric frames handed to the emulator:         any die -> the shard
                           `0`, `1`, ..., or `d7` beside the owner of die 7
    xds.view               membership and loads, published periodically  control plane -> everyone
    xds.load               load of one TE, on change and periodically    TE-shell -> job executors
    xds.links              what the links of one shard carried           fabric emulator ->
                                                                         gateways
    xds.cp.query           status questions                              CLI, gateway -> control
    plane

`proto/subjects.md` repeats this table for readers who do not read Python; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.ids import role_of

SUBMIT = "xds.je.submit"
SUBMIT_QUEUE = "je"
VIEW = "xds.view"
LOAD = "xds.load"
LINKS = "xds.links"
QUERY = "xds.cp.query"


@dataclass(frozen=True, slots=True)
class SubjectRow:
    """One row of the table."""

    pattern: str
    listener: str
    speaker: str
    lane: str
    purpose: str


TABLE: tuple[SubjectRow, ...] = (
    SubjectRow("xds.act.*.>", "the actor", "any actor", "control", "inbox of one actor"),
    SubjectRow(SUBMIT, "job_executor (queue group je)", "gateway", "control", "new requests"),
    SubjectRow("xds.ub.*", "owner of the die", "fabric_emulator", "bulk", "delivered UB frames"),
    SubjectRow("xds.fabric.*", "fabric_emulator", "any die", "bulk", "UB frames to be stamped"),
    SubjectRow(
        VIEW, "gateway, job_executor", "control_plane", "control", "membership and readiness"
    ),
    SubjectRow(LOAD, "job_executor", "te_shell", "control", "load of one TE"),
    SubjectRow(LINKS, "gateway", "fabric_emulator", "control", "what the links of a shard carried"),
    SubjectRow(QUERY, "control_plane", "gateway, command line", "control", "status questions"),
)


def inbox(actor: str) -> str:
    """The control inbox of `actor` (its dots become tokens: `xds.act.decode_te.d0.dp1`)."""
    return f"xds.act.{actor}"


def ub(die: int) -> str:
    """Where the fabric delivers frames for `die`."""
    return f"xds.ub.{die}"


def fabric(shard: str) -> str:
    """Where shard `shard` of the emulator takes frames (`0`, or `d7` beside the owner of die 7)."""
    return f"xds.fabric.{shard}"


def subscriptions(actor: str, dies: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    """The `(pattern, queue group)` pairs that `actor` listens on."""
    own: list[tuple[str, str]] = [(inbox(actor), "")]
    own += [(ub(die), "") for die in dies[:1]]
    match role_of(actor):
        case "job_executor":
            own += [(SUBMIT, SUBMIT_QUEUE), (VIEW, ""), (LOAD, "")]
        case "gateway":
            own += [(VIEW, ""), (LINKS, "")]
        case "control_plane":
            own += [(QUERY, "")]
        case "fabric_emulator":
            own += [(fabric(actor.rsplit(".", 1)[1]), "")]
        case _:
            pass
    return tuple(own)
