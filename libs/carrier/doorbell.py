"""Wakes the event loop of another process: one eventfd per die, made before the processes fork.

An eventfd is a counter in the kernel. Ringing adds to it and never blocks; the loop of the listener
sees it readable, and one read takes all rings at once. Both are system calls, so whatever a process
stored before it rang is visible to the one that was woken.

Spinning on a word would save five microseconds on idle cores and cost whole scheduler slices, four
milliseconds each, as soon as there are more busy processes than cores.
"""

from __future__ import annotations

import os


def make_doorbell() -> int:
    """A new doorbell; forked children inherit the descriptor, programs that they start do not."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def ring(doorbell: int) -> None:
    """Wake whoever listens; the one before it not having been answered yet is fine."""
    try:
        os.eventfd_write(doorbell, 1)
    except BlockingIOError:  # 2^64 - 2 unanswered rings: it is awake
        return


def answer(doorbell: int) -> None:
    """Take all rings so far; look at the rings of memory after this, never before."""
    try:
        os.eventfd_read(doorbell)
    except BlockingIOError:  # somebody else who listens was faster
        return
