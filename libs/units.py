"""Units: integer nanoseconds and bytes inside, floats only where a person reads them.

This is the only place that divides by powers of ten.
"""

from __future__ import annotations

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def us(value: float) -> int:
    """Microseconds to nanoseconds, rounded to the nearest."""
    return round(value * NS_PER_US)


def ms(value: float) -> int:
    """Milliseconds to nanoseconds, rounded to the nearest."""
    return round(value * NS_PER_MS)


def s(value: float) -> int:
    """Seconds to nanoseconds, rounded to the nearest."""
    return round(value * NS_PER_S)


def to_us(ns: int) -> float:
    """Nanoseconds to microseconds."""
    return ns / NS_PER_US


def to_ms(ns: int) -> float:
    """Nanoseconds to milliseconds."""
    return ns / NS_PER_MS


def to_s(ns: int) -> float:
    """Nanoseconds to seconds."""
    return ns / NS_PER_S


def transfer_ns(nbytes: int, bytes_per_s: int) -> int:
    """Time that `nbytes` occupy a link of `bytes_per_s`, rounded up so that nothing is ever too
    fast.
    """
    assert nbytes >= 0, nbytes
    assert bytes_per_s > 0, bytes_per_s
    return -(-nbytes * NS_PER_S // bytes_per_s)
