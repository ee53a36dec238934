"""The files of the shared memory, who owns them, and who removes them.

    <root>/xds-shm-<random>/        one directory per pod, made and removed by the supervisor
      lock                          held by supervisor and children for as long as one of them lives
      pod                           one page: the epoch
      die-<n>                       directory page of die n: its life, and per source the generation
                                    of the ring that the source opened towards it
      ring-<source>-<target>-<0|1>  opened by the source with its first frame; even, odd generations

`multiprocessing.shared_memory` is not used: before Python 3.13 each process that attaches registers
the segment with a resource tracker, which unlinks it when that process dies. Here processes are
killed on purpose. Plain files in a tmpfs directory have one owner, and a name to look at.

Each word has exactly one writer: the epoch the supervisor's, a life the die's own process, a
generation word the source's. So no word needs an atomic update, which Python does not have.

A supervisor that is killed cannot remove its directory; the next one does, when nobody holds the
lock any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from libs.carrier import doorbell
from libs.carrier.ring import PAGE, WORD, RingLayout
from libs.errors import BadInput, CapacityExceeded, LocalProtocolError

DEFAULT_ROOT = Path("/dev/shm")
#: 256 KiB slots copied piece by piece beat one large slot for 9 MB frames (measured, 1.6 ms against
#: 2.2); 64 of them take any frame up to 16 MiB (assumed: twice the broker's payload limit).
DEFAULT_LAYOUT = RingLayout(slots=64, slot_bytes=256 * 1024)
_PREFIX = "xds-shm-"
_EPOCH_WORD = 0
_LIFE_WORD = 0
_FIRST_GENERATION = 8  # on a line of its own: the life is written by somebody else


class Segment:
    """One mapped file; `words` and `data` are two views of it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._map = mmap.mmap(descriptor, 0)
        self.data = memoryview(self._map)
        self.words = self.data.cast("Q")

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map an existing file; raises `FileNotFoundError`."""
        with _opened(path, os.O_RDWR) as descriptor:
            return cls(path, descriptor)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.data.nbytes

    def close(self) -> None:
        """Unmap, as soon as nobody holds a view any more."""
        with contextlib.suppress(BufferError):
            self.words.release()
            self.data.release()
            self._map.close()


@dataclass(frozen=True, slots=True)
class ShmPlan:
    """What the processes of a host share, made by `make_segments` before they fork.

    `doorbells` are descriptors that children inherit. Only the process that made the plan changes
    the epoch and removes the directory.
    """

    directory: Path
    doorbells: Mapping[int, int]
    layout: RingLayout
    checksum: bool
    owner: int
    lock: int

    def __contains__(self, die: object) -> bool:
        return die in self.doorbells

    @property
    def epoch(self) -> int:
        """The present epoch."""
        with _mapped(self.directory / "pod") as pod:
            return pod.words[_EPOCH_WORD]

    def bump_epoch(self) -> int:
        """Begin a new epoch: both ends of every ring drop what is older. Returns the new one."""
        self._owners_only()
        with _mapped(self.directory / "pod") as pod:
            epoch = pod.words[_EPOCH_WORD] + 1
            pod.words[_EPOCH_WORD] = epoch
        for bell in self.doorbells.values():
            doorbell.ring(bell)
        return epoch

    def remove(self) -> None:
        """Remove everything; processes that still run keep what they have mapped.

        A forked child that inherited the plan does nothing: the files are its parent's.
        """
        if os.getpid() != self.owner:
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        for descriptor in (self.lock, *self.doorbells.values()):
            with contextlib.suppress(OSError):  # removed before
                os.close(descriptor)

    def _owners_only(self) -> None:
        if os.getpid() != self.owner:
            raise LocalProtocolError("only the process that made the shared memory may do this")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def make_segments(
    dies: Iterable[int],
    *,
    root: Path = DEFAULT_ROOT,
    layout: RingLayout = DEFAULT_LAYOUT,
    checksum: bool = False,
) -> ShmPlan:
    """Prepare shared memory for `dies`; called by the supervisor before it forks.

    Also removes what a killed supervisor left in `root`. Raises `BadInput` when `root` cannot be
    used and `CapacityExceeded` when it is full. `checksum` adds a CRC-32 to each piece.
    """
    if not root.is_dir() or not os.access(root, os.W_OK):
        raise BadInput(f"{root} is not a writable directory (a tmpfs is needed)", field="shm.root")
    numbers = sorted(set(dies))
    with _locked(root):  # until our directory has its own lock: before that it looks abandoned
        _sweep(root)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    bells = {die: doorbell.make_doorbell() for die in numbers}
    plan = ShmPlan(directory, bells, layout, checksum, os.getpid(), lock)
    try:
        create(directory / "pod", PAGE)
        size = (_FIRST_GENERATION + max(numbers, default=0) + 1) * WORD
        for die in numbers:
            create(directory / f"die-{die}", -(-size // PAGE) * PAGE)
        plan.bump_epoch()
    except BaseException:
        plan.remove()
        raise
    return plan


def remove_abandoned(root: Path) -> list[Path]:
    """Remove the directories whose supervisor and children are all dead; returns them."""
    with _locked(root):
        return _sweep(root)


def _sweep(root: Path) -> list[Path]:
    removed = []
    for directory in sorted(root.glob(f"{_PREFIX}*")):
        # A lock that is missing is made: its supervisor died before it made it, or in the middle
        # of removing. If it is alive and removing, both remove, and neither minds the other.
        with (
            contextlib.suppress(OSError),
            _opened(directory / "lock", os.O_RDWR | os.O_CREAT) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One at a time begins or sweeps in `root`."""
    with _opened(root, os.O_RDONLY) as everybody:
        fcntl.flock(everybody, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- pages


class PodPage:
    """The page that all processes read."""

    def __init__(self, plan: ShmPlan) -> None:
        self._segment = Segment.open(plan.directory / "pod")

    @property
    def epoch(self) -> int:
        """The present epoch; frames of an older one are dropped."""
        return self._segment.words[_EPOCH_WORD]

    def close(self) -> None:
        self._segment.close()


class DiePage:
    """The directory page of one die."""

    def __init__(self, plan: ShmPlan, die: int) -> None:
        self._segment = Segment.open(plan.directory / f"die-{die}")

    @property
    def life(self) -> int:
        """How many processes have served this die so far, the present one included.

        1 before the first, so that its mail can wait for it.
        """
        return max(1, self._segment.words[_LIFE_WORD])

    def begin_life(self) -> int:
        """Count one more process; called by that process."""
        self._segment.words[_LIFE_WORD] += 1
        return self._segment.words[_LIFE_WORD]

    def generation(self, source: int) -> int:
        """Generation of the ring that `source` opened towards this die, 0 before the first."""
        return self._segment.words[_FIRST_GENERATION + source]

    def announce(self, source: int, generation: int) -> None:
        """The ring of `source` is ready; called by its process."""
        self._segment.words[_FIRST_GENERATION + source] = generation

    def generations(self) -> bytes:
        """A copy of all generation words, to see quickly whether one has changed."""
        return bytes(self._segment.data[_FIRST_GENERATION * WORD :])

    def close(self) -> None:
        self._segment.close()


def ring_path(plan: ShmPlan, source: int, target: int, generation: int) -> Path:
    """Where a ring lives; two names in turn, so that a pair never leaves more than two files."""
    return plan.directory / f"ring-{source}-{target}-{generation % 2}"


# ---------------------------------------------------------------- files


def create(path: Path, nbytes: int, allocated: int | None = None) -> None:
    """A new file of `nbytes` zeros, the first `allocated` of them (default: all) with memory."""
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
        os.ftruncate(descriptor, nbytes)
        allocate(descriptor, 0, nbytes if allocated is None else allocated)


def allocate(descriptor: int, at: int, nbytes: int) -> None:
    """Make sure that memory stands behind a part of the file.

    Raises `CapacityExceeded` when there is none left: a store into a page that a full tmpfs cannot
    give would kill the process (SIGBUS).
    """
    try:
        os.posix_fallocate(descriptor, at, nbytes)
    except OSError as error:
        text = f"no shared memory for {nbytes} more bytes ({error.strerror})"
        raise CapacityExceeded(f"{text}; enlarge the tmpfs") from error


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Segment]:
    segment = Segment.open(path)
    try:
        yield segment
    finally:
        segment.close()
