"""What may become a message class."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from libs.errors import LocalProtocolError
from libs.wire import registry
from libs.wire.codec import decode_frame, encode_frame
from libs.wire.envelope import Envelope
from libs.wire.fields import struct_type
from libs.wire.registry import Limit, message
from tests.unit.wire.kinds import Bulk, Control, control


def test_registration_sets_kind_and_limit_on_the_class() -> None:
    assert registry.class_of("test_control") is Control
    assert (registry.kind_of(Control), registry.limit_of(Control)) == (
        "test_control",
        Limit.CONTROL,
    )
    assert registry.limit_of(Bulk) is Limit.BULK
    assert vars(Control)["KIND"] == "test_control"


def test_a_kind_is_taken_once() -> None:
    with pytest.raises(LocalProtocolError, match="is taken by Control"):
        message("test_control")(Control)


@pytest.mark.parametrize("kind", ["", "Upper", "with-dash", "9lives", "x" * 65])
def test_kinds_are_lower_snake_case(kind: str) -> None:
    with pytest.raises(LocalProtocolError, match=re.escape(repr(kind))):
        message(kind)(Control)


def test_only_frozen_slotted_dataclasses_register() -> None:
    @dataclass(slots=True)
    class Mutable:
        x: int

    @dataclass(frozen=True)
    class Unslotted:
        x: int

    class Plain:
        pass

    for cls, text in ((Mutable, "frozen"), (Unslotted, "slots"), (Plain, "not a dataclass")):
        with pytest.raises(LocalProtocolError, match=text):
            message("test_never")(cls)


def test_a_subclass_does_not_inherit_the_kind() -> None:
    @dataclass(frozen=True, slots=True)
    class Special(Control):
        pass

    with pytest.raises(LocalProtocolError, match="Special is not a registered message"):
        encode_frame(Envelope("a", 1, 1, 0), Special(1, 1.0, True, "", b""))


@pytest.mark.parametrize(
    "hint", [dict[str, int], list[int], int | str, Any, object, tuple[()], set[int]]
)
def test_an_annotation_that_cannot_travel_names_the_field(hint: Any) -> None:
    @dataclass(frozen=True, slots=True)
    class Wrong:
        field: int

    Wrong.__annotations__["field"] = hint
    with pytest.raises(LocalProtocolError, match=r"Wrong\.field"):
        struct_type(Wrong)


def test_an_enum_member_arrives_as_its_value() -> None:
    class Phase(StrEnum):
        IDLE = "idle"

    sent = control(name=Phase.IDLE, count=Limit.CONTROL)
    received = decode_frame(encode_frame(Envelope("a", 1, 1, 0), sent))[1]
    assert (type(received.name), received.name) == (str, "idle")
    assert (type(received.count), received.count) == (int, 65536)
