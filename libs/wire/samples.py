"""One deterministic instance of any message class, built from its annotations alone.

Golden frames are encodings of these samples, so every field carries a value of its own that a
swapped or dropped field would betray. A class whose `__post_init__` refuses such values gets its
defaults.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import numpy as np

from libs.errors import LocalProtocolError, OperatingError
from libs.wire.fields import is_array, scalar_of

_REFUSALS = (ValueError, TypeError, AssertionError, OperatingError)


def sample_of(cls: type[Any]) -> Any:
    """The sample instance of a message class or of any frozen dataclass that travels."""
    return _Sampler().struct(cls)


def same(left: Any, right: Any) -> bool:
    """Whether two messages are equal in type and value, tensors compared bit for bit."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    return bool(left == right)


class _Sampler:
    def __init__(self) -> None:
        self._count = 0

    def struct(self, cls: type[Any]) -> Any:
        hints = typing.get_type_hints(cls)
        fields = dataclasses.fields(cls)
        values = {field.name: self.value(hints[field.name], field.name) for field in fields}
        try:
            return cls(**values)
        except _REFUSALS:
            required = {field.name: values[field.name] for field in fields if _is_required(field)}
        try:
            return cls(**required)
        except _REFUSALS as error:
            text = f"{cls.__name__} refuses both sample and default values: {error}"
            raise LocalProtocolError(text) from error

    def value(self, hint: Any, name: str) -> Any:
        self._count += 1
        while isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if is_array(hint):
            scalar = scalar_of(hint) or np.float32
            first = self._count
            return np.arange(first, first + 6).astype(scalar).reshape(2, 3)
        if origin in (typing.Union, types.UnionType):
            return self.value(next(item for item in arguments if item is not types.NoneType), name)
        if origin is tuple:
            items = (arguments[0],) * 2 if arguments[-1] is Ellipsis else arguments
            return tuple(self.value(item, name) for item in items)
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            return self.struct(hint)
        return self._scalar(hint, name)

    def _scalar(self, hint: Any, name: str) -> Any:
        if hint is bool:
            return self._count % 2 == 0
        if hint is int:
            return self._count
        if hint is float:
            return self._count + 0.5
        if hint is bytes:
            return bytes((self._count % 256, 0, 255))
        if hint is str:
            return f"{name}-{self._count}"
        raise LocalProtocolError(f"{name}: type {hint!r} does not travel")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing
