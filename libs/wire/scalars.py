"""Scalar fields, checked exactly, and the error that every field check raises.

A message holds what its annotation says, in memory as on the wire: a bool is not an int, a numpy
scalar is not an int either, NaN is never a value. Only two conversions are made, both lossless and
only when packing: an int where a float is declared, and a StrEnum or IntEnum member to its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

INT_MIN, INT_MAX = -(2**63), 2**63 - 1
FLOAT_INT_MAX = 2**53


class FieldError(Exception):
    """A value does not fit its annotation; `path` names the field, outermost first."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.path: list[str] = []

    def __str__(self) -> str:
        """`.parts[0].label: what is wrong`, to be put behind the kind."""
        steps = (step if step.startswith("[") else f".{step}" for step in self.path)
        return f"{''.join(steps)}: {self.detail}"


def wrong(expected: str, value: Any) -> FieldError:
    """The error for a value of another type."""
    got = type(value).__name__
    hint = " (convert it to a plain number first)" if isinstance(value, np.generic) else ""
    return FieldError("wrong_type", f"expected {expected}, got {got}{hint}")


def _pack_int(value: Any, _: Any) -> int:
    if type(value) is not int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong("int", value)
        value = int(value)
    if not INT_MIN <= value <= INT_MAX:
        raise FieldError("out_of_range", f"{value} needs more than 64 bits")
    return int(value)


def _unpack_int(value: Any, _: Any) -> int:
    if type(value) is not int:
        raise wrong("int", value)
    if value > INT_MAX:  # msgpack cannot express less than INT_MIN
        raise FieldError("out_of_range", f"{value} needs more than 64 bits")
    return value


def _pack_float(value: Any, _: Any) -> float:
    if not isinstance(value, float):
        if type(value) is not int:
            raise wrong("float", value)
        if not -FLOAT_INT_MAX <= value <= FLOAT_INT_MAX:
            raise FieldError("out_of_range", f"{value} has no exact float")
    if value != value:
        raise FieldError("not_a_number", "is NaN")
    return float(value)


def _unpack_float(value: Any, _: Any) -> float:
    if type(value) is not float:
        raise wrong("float", value)
    if value != value:
        raise FieldError("not_a_number", "is NaN")
    return value


def _pack_str(value: Any, _: Any) -> str:
    if type(value) is str:
        return value
    if not isinstance(value, str):
        raise wrong("str", value)
    return str.__str__(value)  # a StrEnum member travels as its text


def _exactly(kind: type[Any]) -> Callable[[Any, Any], Any]:
    def check(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise wrong(kind.__name__, value)
        return value

    return check


# annotation -> (pack, unpack); the second argument is the context that compound types need
SCALARS: dict[Any, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    int: (_pack_int, _unpack_int),
    float: (_pack_float, _unpack_float),
    bool: (_exactly(bool), _exactly(bool)),
    str: (_pack_str, _exactly(str)),
    bytes: (_exactly(bytes), _exactly(bytes)),
}
