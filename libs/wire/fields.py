"""From annotations to encoders: each dataclass is compiled once into a pair of functions.

Field types that travel:

    int            signed 64 bit; never a bool          tuple[X, ...]   any length up to 4,096
    float          never NaN; infinities are legal      tuple[A, B]     exactly these items
    bool, str, bytes                                    np.ndarray, NDArray[np.float32]
    X | None                                            a frozen slotted dataclass, nested

`pack` turns a value into what msgpack can hold and moves tensors aside, leaving their number in
the map; `unpack` does the reverse and checks everything a stranger could get wrong. Tensors are
numbered in declaration order, depth first, so one message has one encoding. A field with a default
may be absent from the map: that is how old frames stay readable.

Errors travel upwards as `FieldError` and collect the path of the field on their way;
`libs.wire.codec` turns them into the blame-typed errors of `libs.errors`.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.errors import LocalProtocolError, OperatingError
from libs.wire import registry, tensors
from libs.wire.scalars import SCALARS, FieldError, wrong

ITEMS_MAX = 4096

Packer = Callable[[Any, list[tensors.Tensor]], Any]
Unpacker = Callable[[Any, "TensorCursor"], Any]


class TensorCursor:
    """The tensors of one received frame, taken one after the other."""

    __slots__ = ("_tensors", "taken")

    def __init__(self, received: list[tensors.Tensor]) -> None:
        self._tensors = received
        self.taken = 0

    def take(self, index: Any) -> tensors.Tensor:
        """The next tensor, if `index` is indeed its number."""
        if type(index) is not int:
            raise wrong("a tensor number", index)
        if index != self.taken or index >= len(self._tensors):
            raise FieldError("bad_tensor", f"tensor number {index}, expected {self.taken}")
        self.taken += 1
        return self._tensors[index]

    def left(self) -> int:
        """How many tensors no field has claimed."""
        return len(self._tensors) - self.taken


@dataclasses.dataclass(frozen=True, slots=True)
class FieldType:
    """One compiled annotation. `hint` is kept for the schema generator."""

    hint: Any
    pack: Packer
    unpack: Unpacker


class StructType:
    """One compiled dataclass: `pack` to a map of field names, `unpack` back to an instance."""

    __slots__ = ("_get", "_names", "_packers", "_plan", "cls", "fields")

    def __init__(self, cls: type[Any], fields: dict[str, FieldType]) -> None:
        self.cls = cls
        self.fields = fields
        self._names = tuple(fields)
        self._packers = tuple(field.pack for field in fields.values())
        self._get = operator.attrgetter(*self._names) if len(fields) > 1 else None
        defaults = {field.name: _default_of(field) for field in dataclasses.fields(cls)}
        self._plan = tuple((name, fields[name].unpack, defaults[name]) for name in fields)

    def pack(self, value: Any, aside: list[tensors.Tensor]) -> dict[str, Any]:
        """The map of `value`'s fields; tensors are appended to `aside`."""
        if type(value) is not self.cls:
            raise wrong(self.cls.__name__, value)
        values = self._get(value) if self._get else [getattr(value, name) for name in self._names]
        packed: dict[str, Any] = {}
        name = ""
        try:
            for name, pack, item in zip(self._names, self._packers, values, strict=True):
                packed[name] = pack(item, aside)
        except FieldError as error:
            error.path.insert(0, name)
            raise
        return packed

    def unpack(self, value: Any, cursor: TensorCursor) -> Any:
        """The instance that the map `value` describes."""
        if type(value) is not dict:
            raise wrong("a map", value)
        arguments: list[Any] = []
        found = 0
        name = ""
        try:
            for name, unpack, default in self._plan:
                if name in value:
                    arguments.append(unpack(value[name], cursor))
                    found += 1
                elif default is None:
                    raise FieldError("missing_field", "is missing")
                else:
                    arguments.append(default())
        except FieldError as error:
            error.path.insert(0, name)
            raise
        if found != len(value):
            unknown = min(str(key) for key in value if key not in self.fields)
            raise FieldError("unknown_field", f"unknown field {unknown[:64]!r}")
        try:
            return self.cls(*arguments)
        except _REFUSALS as error:
            raise FieldError("invalid_value", f"{self.cls.__name__}: {error}") from error


# What a dataclass's own `__post_init__` may raise when its fields contradict each other.
_REFUSALS = (
    ValueError, TypeError, AssertionError, ArithmeticError, LookupError, OperatingError,
)  # fmt: skip


def _default_of(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default is not dataclasses.MISSING:
        value = field.default
        return lambda: value
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return None


_COMPILED: dict[type[Any], StructType] = {}


def struct_type(cls: type[Any]) -> StructType:
    """Compile `cls`; `LocalProtocolError` names the field whose annotation cannot travel."""
    struct = _COMPILED.get(cls)
    if struct is None:
        struct = _COMPILED[cls] = _compile_struct(cls, ())
    return struct


def _compile_struct(cls: type[Any], outer: tuple[type[Any], ...]) -> StructType:
    registry.require_frozen_slotted(cls)
    if cls in outer:
        raise LocalProtocolError(f"{cls.__name__} contains itself")
    hints = typing.get_type_hints(cls)
    compiled: dict[str, FieldType] = {}
    for field in dataclasses.fields(cls):
        if not field.init or field.kw_only:
            raise LocalProtocolError(f"{cls.__name__}.{field.name} must be a positional field")
        try:
            compiled[field.name] = _compile(hints[field.name], (*outer, cls))
        except TypeError as error:
            raise LocalProtocolError(f"{cls.__name__}.{field.name}: {error}") from error
    return StructType(cls, compiled)


def _compile(hint: Any, outer: tuple[type[Any], ...]) -> FieldType:
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    scalar = SCALARS.get(hint)
    if scalar is not None:
        return FieldType(hint, *scalar)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_array(hint):
        return _tensor(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional(hint, arguments, outer)
    if origin is tuple and arguments:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return _sequence(hint, _compile(arguments[0], outer))
        return _fixed(hint, tuple(_compile(argument, outer) for argument in arguments))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        struct = _compile_struct(hint, outer)
        return FieldType(hint, struct.pack, struct.unpack)
    raise TypeError(f"type {hint!r} does not travel")


# ---------------------------------------------------------------- compounds


def _tensor(hint: Any) -> FieldType:
    scalar = scalar_of(hint)
    concrete = (
        isinstance(scalar, type) and scalar.__module__ == "numpy" and scalar.__itemsize__ == 0
    )
    dtype = np.dtype(scalar) if concrete and scalar not in _ABSTRACT else None

    def check(value: tensors.Tensor) -> tensors.Tensor:
        if dtype is not None and value.dtype != dtype:
            raise FieldError("bad_tensor", f"expected dtype {dtype}, got {value.dtype}")
        return value

    def pack(value: Any, aside: list[tensors.Tensor]) -> int:
        try:
            sendable = tensors.check_sendable(value)
        except LocalProtocolError as error:
            raise FieldError("bad_tensor", str(error)) from error
        if len(aside) >= tensors.TENSORS_MAX:
            raise FieldError("bad_tensor", f"more than {tensors.TENSORS_MAX} tensors")
        aside.append(check(sendable))
        return len(aside) - 1

    return FieldType(hint, pack, lambda value, cursor: check(cursor.take(value)))


_ABSTRACT = {np.generic, np.number, np.integer, np.floating, np.signedinteger, np.unsignedinteger}


def _optional(hint: Any, arguments: tuple[Any, ...], outer: tuple[type[Any], ...]) -> FieldType:
    inner = [argument for argument in arguments if argument is not type(None)]
    if len(inner) != 1 or len(arguments) != 2:
        raise TypeError(f"union {hint!r} does not travel; only X | None does")
    item = _compile(inner[0], outer)

    def pack(value: Any, aside: list[tensors.Tensor]) -> Any:
        return None if value is None else item.pack(value, aside)

    def unpack(value: Any, cursor: TensorCursor) -> Any:
        return None if value is None else item.unpack(value, cursor)

    return FieldType(hint, pack, unpack)


def _sequence(hint: Any, item: FieldType) -> FieldType:
    def pack(value: Any, aside: list[tensors.Tensor]) -> list[Any]:
        if type(value) is not tuple:
            raise wrong("tuple", value)
        if len(value) > ITEMS_MAX:
            raise FieldError("out_of_range", f"{len(value)} items, at most {ITEMS_MAX}")
        return _each(itertools.repeat(item.pack), value, aside)

    def unpack(value: Any, cursor: TensorCursor) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong("an array", value)
        return tuple(_each(itertools.repeat(item.unpack), value, cursor))

    return FieldType(hint, pack, unpack)


def _fixed(hint: Any, items: tuple[FieldType, ...]) -> FieldType:
    packers = tuple(item.pack for item in items)
    unpackers = tuple(item.unpack for item in items)

    def pack(value: Any, aside: list[tensors.Tensor]) -> list[Any]:
        if type(value) is not tuple or len(value) != len(items):
            raise wrong(f"a tuple of {len(items)}", value)
        return _each(packers, value, aside)

    def unpack(value: Any, cursor: TensorCursor) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(items):
            raise wrong(f"an array of {len(items)}", value)
        return tuple(_each(unpackers, value, cursor))

    return FieldType(hint, pack, unpack)


def _each(converters: Iterable[Callable[[Any, Any], Any]], values: Any, context: Any) -> list[Any]:
    done: list[Any] = []
    try:
        for value, convert in zip(values, converters, strict=False):  # converters may be endless
            done.append(convert(value, context))
    except FieldError as error:
        error.path.insert(0, f"[{len(done)}]")
        raise
    return done


def is_array(hint: Any) -> bool:
    """`np.ndarray`, `np.ndarray[...]` or `NDArray[...]`, which newer numpy makes a type alias."""
    origin = typing.get_origin(hint)
    return np.ndarray in (hint, origin) or origin is NDArray or hint is NDArray


def scalar_of(hint: Any) -> Any:
    """The element type of an array hint, None when it does not say."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is NDArray:
        return arguments[0]
    return typing.get_args(arguments[1])[0] if len(arguments) == 2 else None
