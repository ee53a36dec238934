"""What is known about the embedded pod of this folder: one JSON file, written by its supervisor.

The file lives in the state directory (`.xds`, or `XDS_STATE`), beside one log file per process.
Whoever reads it checks that the supervisor is alive; a stale file is as good as none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PodState:
    """A running pod: where it listens, what it runs, and the process of every actor."""

    supervisor_pid: int
    http_port: int
    nats_url: str
    topology: str
    pace: float
    epoch_ns: int
    carrier: str
    actors: dict[str, int]

    @property
    def num_processes(self) -> int:
        """Processes of actors; some hold two."""
        return len(set(self.actors.values()))

    @property
    def base_url(self) -> str:
        """Root of the HTTP API."""
        return f"http://127.0.0.1:{self.http_port}"


def state_dir() -> Path:
    """The state directory of this folder."""
    return Path(os.environ.get("XDS_STATE", ".xds")).absolute()


def log_path(actor: str) -> Path:
    """The log file of one actor (or of `supervisor`)."""
    return state_dir() / "logs" / f"{actor}.log"


def write_state(state: PodState) -> None:
    """Publish the state atomically."""
    path = state_dir() / "pod.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    draft.replace(path)


def clear_state() -> None:
    """The pod is gone."""
    (state_dir() / "pod.json").unlink(missing_ok=True)


def read_state() -> PodState | None:
    """The running pod of this folder, or None."""
    try:
        raw = json.loads((state_dir() / "pod.json").read_text(encoding="utf-8"))
        state = PodState(**raw)
    except (OSError, ValueError, TypeError):
        return None
    return state if is_alive(state.supervisor_pid) else None


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
