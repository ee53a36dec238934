"""The interconnect's envelope, put on and taken off: the same for every host.

Transmit --reserve the egress--> UbFrame, and to which shard it goes and when
bytes    --unwrap UbDelivery---> what was sent, with the stamp at which it arrives
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libs.actor import Transmit
from libs.fabric.link import Dispatch, SenderPort
from libs.wire.codec import decode_frame
from libs.wire.envelope import Envelope
from libs.wire.fabric import UbDelivery, UbFrame


def departing(
    port: SenderPort, effect: Transmit, depart_ns: int, payload: np.ndarray
) -> tuple[UbFrame, Dispatch]:
    """The frame of `effect`, ready at `depart_ns`, and its way; `payload` is `[nbytes]` uint8."""
    source, target, nbytes = effect.source, effect.target, effect.charge_bytes
    way = port.dispatch(source, target, depart_ns, nbytes)
    return UbFrame(source, target, depart_ns, nbytes, effect.repeat, payload, way.begin_ns), way


def arrived(data: bytes) -> tuple[int, Envelope, Any]:
    """Stamp, envelope and message of a frame, whichever way it came.

    Raises `RemoteProtocolError` when it, or what it carries, was damaged.
    """
    envelope, message = decode_frame(data)
    if not isinstance(message, UbDelivery):
        return envelope.at_ns, envelope, message
    return unwrapped(message)


def unwrapped(delivery: UbDelivery) -> tuple[int, Envelope, Any]:
    """What was sent, with its stamp; raises `RemoteProtocolError` when it was damaged."""
    envelope, message = decode_frame(delivery.payload.data)
    return delivery.deliver_ns, envelope, message
