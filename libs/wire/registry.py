"""Which dataclasses may travel: each has a kind (its name on the wire) and a size limit.

    @message("cancel", limit=Limit.CONTROL)
    @dataclass(frozen=True, slots=True)
    class Cancel: ...

The decorator stands above `@dataclass`, so it sees the final class (a slotted dataclass is a new
class object) and may set `KIND` and `LIMIT` on it as plain class attributes. Field types are
compiled later, at first use, because annotations may name classes defined further down
(`libs.wire.fields`). Importing `libs.wire.messages` fills the registry.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from libs.errors import LocalProtocolError

MessageType = TypeVar("MessageType")

_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CLASSES: dict[str, type[Any]] = {}


class Limit(IntEnum):
    """The longest frame of a class of messages, in bytes, envelope and tensors included."""

    CONTROL = 64 * 1024
    TOKEN = 1024 * 1024
    BULK = 32 * 1024 * 1024


def message(
    kind: str, *, limit: Limit = Limit.CONTROL
) -> Callable[[type[MessageType]], type[MessageType]]:
    """Register a frozen slotted dataclass as the message `kind`.

    Raises `LocalProtocolError` for a malformed or taken kind, or a class that is not such a
    dataclass.
    """

    def register(cls: type[MessageType]) -> type[MessageType]:
        if _KIND.fullmatch(kind) is None:
            raise LocalProtocolError(f"message kind {kind!r}: use lower_snake_case")
        if kind in _CLASSES:
            raise LocalProtocolError(f"message kind {kind!r} is taken by {_CLASSES[kind].__name__}")
        require_frozen_slotted(cls)
        attributes: Any = cls
        attributes.KIND = kind
        attributes.LIMIT = limit
        _CLASSES[kind] = cls
        return cls

    return register


def require_frozen_slotted(cls: type[Any]) -> None:
    """Raise `LocalProtocolError` unless `cls` is a frozen dataclass with slots."""
    if not dataclasses.is_dataclass(cls):
        raise LocalProtocolError(
            f"{cls.__name__} is not a dataclass; put @message above @dataclass"
        )
    if not getattr(cls, "__dataclass_params__").frozen:  # noqa: B009 - invisible to type checkers
        raise LocalProtocolError(f"{cls.__name__} must be frozen")
    if "__slots__" not in cls.__dict__:
        raise LocalProtocolError(f"{cls.__name__} must have slots")


def class_of(kind: str) -> type[Any] | None:
    """The message class of `kind`, or None when nobody registered it."""
    return _CLASSES.get(kind)


def kind_of(cls: type[Any]) -> str:
    """The kind under which `cls` was registered; `LocalProtocolError` when it was not."""
    kind = getattr(cls, "KIND", None)
    if not isinstance(kind, str) or _CLASSES.get(kind) is not cls:
        raise LocalProtocolError(f"{cls.__name__} is not a registered message")
    return kind


def limit_of(cls: type[Any]) -> Limit:
    """The size limit of a registered message class."""
    kind_of(cls)
    limit = getattr(cls, "LIMIT")  # noqa: B009 - set by the decorator, invisible to type checkers
    assert isinstance(limit, Limit), limit
    return limit


def registered() -> tuple[type[Any], ...]:
    """Every registered class, sorted by kind."""
    return tuple(_CLASSES[kind] for kind in sorted(_CLASSES))
