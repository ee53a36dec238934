"""How every script of this folder starts and reports: one console, one exit code for bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.console import Console

from libs.errors import OperatingError

BAD_INPUT_EXIT = 2

console = Console(highlight=False, soft_wrap=True)


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs `main` on the command line; an operating error becomes one line and exit code 2."""
    try:
        sys.exit(main(sys.argv[1:]))
    except OperatingError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(BAD_INPUT_EXIT)
