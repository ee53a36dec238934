"""How `xds` speaks: people get rich text, programs get one JSON document, errors one clear
sentence.

Exit codes: 0 ok, 1 failed, 2 bad input. Nothing but the result goes to standard output with
`--json`; progress and errors go to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from libs.errors import BadInput, XdsError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=1, sort_keys=False) + "\n")
    sys.stdout.flush()


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turn the project's errors into one sentence (or a JSON object) and an exit code."""
    try:
        yield
    except BadInput as error:
        _report(as_json, error.message, field=error.field, code=2)
    except XdsError as error:
        _report(as_json, str(error), field=None, code=1)


def _report(as_json: bool, message: str, *, field: str | None, code: int) -> None:
    if as_json:
        print_json({"ok": False, "error": message, "field": field})
    else:
        err.print(f"[bold red]error[/]: {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


class Bars:
    """Progress bars on standard error, one per kind of work, only where a person watches."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """Show `done` of `total` for the work called `what`."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
