"""Names of things, and the rules by which they are made.

An actor name is `role.instance` (`decode_te.d0.dp1`), unique in the pod; a die is a number; a
request id is made by us and never taken from the client, so that two clients cannot collide (a
client's own id travels beside it).
"""

from __future__ import annotations

import secrets
from typing import NewType

ActorName = NewType("ActorName", str)
DieId = NewType("DieId", int)
RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)
Epoch = NewType("Epoch", int)
Incarnation = NewType("Incarnation", int)


def new_request_id(prefix: str) -> RequestId:
    """A fresh request id such as `chatcmpl-5f1c…`; cores get ids as input."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")


def choice_id(request_id: str, choice: int) -> RequestId:
    """The id of choice `choice` of a request with `n > 1`; choice 0 keeps the request's own id."""
    assert choice >= 0, choice
    return RequestId(request_id if choice == 0 else f"{request_id}.{choice}")


def die_shard(die: int) -> str:
    """The shard of the fabric emulator that lives beside the owner of `die`."""
    return f"d{die}"


def role_of(actor: str) -> str:
    """The role part of an actor name: `decode_te.d0.dp1` is a `decode_te`."""
    return actor.split(".", 1)[0]
