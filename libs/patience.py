"""How long to wait before asking again: a little longer each time.

A fault with a period (a loose contact, a neighbour's burst) would meet every repetition of an even
rhythm. The first wait is spread as well: a deadline is a round number, so what was lost in one
period would be sent again in the same part of another. Whoever repeats asks through this: rows to
experts, messages of XCCL.
"""

from __future__ import annotations

from libs import units

#: Assumed; the sums 1, 3, 6, 10, ... times this fall on different phases of any common period.
SPREAD_NS = units.us(3_700)


def wait_ns(first_ns: int, repetitions: int) -> int:
    """The wait after so many repetitions; a little more than `first_ns` before the first one."""
    assert first_ns > 0, first_ns
    assert repetitions >= 0, repetitions
    return first_ns + (repetitions + 1) * SPREAD_NS
