"""Every exception of the project, in one tree.

    XdsError
      OperatingError         expected and handled; reported to the peer that asked
        BadInput             the asker's mistake; names the field
        ModelNotFound        the asker named a model that this pod does not serve
        Backpressure         nothing fits now; `retry_after_s` says when to ask again
        CapacityExceeded     it will never fit
        DeadlineExceeded     a wait ended before its answer
        PeerLost             the peer is gone or never was
        StaleEpoch           the message belongs to an earlier life of the cluster or the peer
        TransferFailed       KV did not arrive whole
        Cancelled            the client left
      ProtocolError
        LocalProtocolError   we broke the contract
        RemoteProtocolError  the peer broke it
      InvariantError         our bug: carries the core's name, the event and the story; never caught
                             below the host

An operating error says whether the thing may have happened: `definite=True` means it surely did
not, so a retry is safe; `definite=False` means that it may have.
"""

from __future__ import annotations

from typing import ClassVar


class XdsError(Exception):
    """Base of every error raised on purpose."""


class OperatingError(XdsError):
    """An expected failure; `code` is the stable name that travels in replies."""

    code: ClassVar[str] = "operating"
    definite_default: ClassVar[bool] = True

    def __init__(self, message: str, *, definite: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.definite = self.definite_default if definite is None else definite


class BadInput(OperatingError):
    """The request is malformed; `field` is the path of what is wrong."""

    code = "bad_input"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, definite=True)
        self.field = field


class ModelNotFound(OperatingError):
    """The named model is not served here."""

    code = "model_not_found"


class Backpressure(OperatingError):
    """Nothing fits at the moment; ask again after `retry_after_s`."""

    code = "backpressure"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, definite=True)
        self.retry_after_s = retry_after_s


class CapacityExceeded(OperatingError):
    """The request can never fit, however long it waits."""

    code = "capacity_exceeded"


class DeadlineExceeded(OperatingError):
    """A wait ended before its answer; the thing may still have happened."""

    code = "deadline_exceeded"
    definite_default = False


class PeerLost(OperatingError):
    """The peer is gone; what it was asked may have happened."""

    code = "peer_lost"
    definite_default = False


class StaleEpoch(OperatingError):
    """The message is from an earlier epoch or incarnation and was ignored."""

    code = "stale_epoch"


class TransferFailed(OperatingError):
    """KV did not arrive whole; it is never decoded from."""

    code = "transfer_failed"


class Cancelled(OperatingError):
    """The client left or asked to stop."""

    code = "cancelled"
    definite_default = False


class ProtocolError(XdsError):
    """Bytes or messages that break the contract of `proto/`."""


class LocalProtocolError(ProtocolError):
    """We tried to send something the contract forbids."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something the contract forbids; counted and answered, never fatal."""

    def __init__(self, message: str, *, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class InvariantError(XdsError):
    """A core contradicted itself; the message carries the story of what led there."""


_BY_CODE: dict[str, type[OperatingError]] = {
    kind.code: kind
    for kind in (
        BadInput, ModelNotFound, Backpressure, CapacityExceeded, DeadlineExceeded,
        PeerLost, StaleEpoch, TransferFailed, Cancelled,
    )
}  # fmt: skip


def error_from_code(code: str, message: str, *, definite: bool) -> OperatingError:
    """Rebuild the error that a peer reported; an unknown code stays an `OperatingError`."""
    kind = _BY_CODE.get(code)
    if kind is None:
        return OperatingError(f"{code}: {message}", definite=definite)
    error = kind(message)
    error.definite = definite
    return error
