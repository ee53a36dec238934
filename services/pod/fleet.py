"""Many actors of one plan as forked processes: start them, notice when one ends, stop them all.

One parent imports everything and loads the model, then forks each actor: forty processes in well
under a second, sharing the weights' pages, where forty interpreters would take twenty. It forks
before any event loop or thread exists; a child dies with its parent.

It restarts nothing: a process that dies stays dead, which the control plane sees and `/ready` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from libs.carrier.segment import ShmPlan
from libs.clock.pod_clock import monotonic_s
from libs.config.plan import ActorPlan, PodPlan
from libs.errors import XdsError
from libs.model.resources import ModelResources
from libs.runtime.service import ServiceSettings, run_service
from libs.telemetry.logs import configure_logs
from services.gateway.shell import build as build_gateway
from services.superpod.wiring import SERVICE_BUILDERS

STOP_GRACE_S = 5.0
POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_BUILDERS = {**SERVICE_BUILDERS, "gateway": build_gateway}


class Fleet:
    """The processes of some actors. `logs` is the folder of their log files, None to inherit
    ours; `shm` is the memory that they share.
    """

    def __init__(self, plan: PodPlan, logs: Path | None, shm: ShmPlan | None = None) -> None:
        section = plan.topology.model
        self._plan = plan
        self._shm = shm
        self._model = ModelResources(section.checkpoint, section.engine)
        self._logs = logs
        self._stopping = False
        self._children: dict[int, str] = {}

    @property
    def processes(self) -> dict[str, int]:
        """Process id by actor name, of those that run."""
        own = {name: pid for pid, name in self._children.items()}
        beside = {a.name: own[a.beside] for a in self._plan.actors if a.beside in own}
        return own | beside

    def load(self) -> None:
        """Load what every child will share."""
        self._model.engine()
        _ = self._model.tokenizer, self._model.template

    def start(self, actors: Sequence[ActorPlan], settings: ServiceSettings) -> None:
        """Fork whoever has a process of its own; `settings.actor` is filled in for each."""
        # What is alive now is alive for good: the collector need not touch shared pages again.
        gc.collect()
        gc.freeze()
        for actor in actors:
            if actor.beside:
                continue
            pid = self._fork(actor, replace(settings, actor=actor.name))
            self._children[pid] = actor.name

    def _fork(self, actor: ActorPlan, settings: ServiceSettings) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._become_child(actor.name, parent)
            code = self._child(actor, settings)
        except BaseException as error:  # noqa: BLE001 - a child must never return into the parent
            print(f"{actor.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _become_child(self, name: str, parent: int) -> None:
        """Own session, own log, default signals, and no life after the parent's."""
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._logs is None:
            return
        self._logs.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        log = os.open(self._logs / f"{name}.log", flags, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)

    def _child(self, actor: ActorPlan, settings: ServiceSettings) -> int:
        configure_logs(settings.log)
        try:
            asyncio.run(run_service(_BUILDERS, settings, self._model, self._shm))
        except XdsError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        return 0

    def serve(self, *, until_one_ends: bool = False) -> int:
        """Watch the children until SIGTERM or SIGINT; with `until_one_ends` a lost child ends it
        (1).
        """

        def stop(_signal: int, _frame: object) -> None:
            self._stopping = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        while not self._stopping:
            lost = self._reap()
            if lost and until_one_ends:
                return 1
            time.sleep(POLL_S)
        return 0

    def _reap(self) -> list[str]:
        """Collect children that ended; their names go to the log."""
        lost = []
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                name = self._children.pop(pid)
                lost.append(name)
                code = os.waitstatus_to_exitcode(status)
                if not self._stopping:
                    print(f"{name} (pid {pid}) ended with {code}", file=sys.stderr, flush=True)
        return lost

    def stop(self) -> None:
        """End every child in order, by force after the grace time."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        deadline_s = monotonic_s() + STOP_GRACE_S
        while self._children and monotonic_s() < deadline_s:
            self._reap()
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        for pid in list(self._children):
            os.waitpid(pid, 0)
        self._children.clear()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
