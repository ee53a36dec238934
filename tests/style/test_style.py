from __future__ import annotations

import ast
import re

from tests.style.sources import ROOT, sources

FILE_LINES_MAX = 350
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6
#: What `services.cli.options` declares for several commands.
SHARED_OPTIONS = ("CarrierOption", "Json", "TopologyOption")


def test_every_module_says_what_it_is() -> None:
    silent = [source.name for source in sources() if not ast.get_docstring(source.tree)]
    assert not silent


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {source.path.parent for source in sources()}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {source.name: len(source.text.splitlines()) for source in sources()}
    assert {name: n for name, n in lengths.items() if n > FILE_LINES_MAX} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{source.name}:{function.lineno} {function.name}"
        for source in sources()
        for function in source.functions()
        if (function.end_lineno or 0) - function.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long


def test_more_than_six_parameters_are_a_dataclass() -> None:
    wide = []
    for source in sources():
        for function in source.functions():
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            named = [a for a in every if a.arg not in ("self", "cls") and not is_option(a)]
            if len(named) > PARAMETERS_MAX:
                wide.append(f"{source.name}:{function.lineno} {function.name}")
    assert not wide


def is_option(argument: ast.arg) -> bool:
    """An option of a command: a line of a form that a person fills in, named at every use."""
    annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
    return "typer.Option(" in annotation or annotation in SHARED_OPTIONS


def test_a_match_over_kinds_ends_by_raising_or_by_an_answer() -> None:
    """A `match` without a last `case _` silently does nothing for a kind it forgot."""
    open_ended = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Match)
        and not (
            isinstance(node.cases[-1].pattern, ast.MatchAs)
            and node.cases[-1].pattern.pattern is None
            and node.cases[-1].guard is None
        )
    ]
    assert not open_ended


def test_nothing_is_left_for_later() -> None:
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b")
    found = [source.name for source in sources() if unfinished.search(source.text)]
    assert not found


def test_numbers_of_seconds_live_in_units() -> None:
    """Powers of ten of time are written once; elsewhere `libs.units` converts."""
    by_hand = re.compile(r"\b(1_000_000_000|1_000_000|1e9|10\*\*9)\b.*_(ns|ms|us|s)\b")
    allowed = {"libs/units.py"}
    found = [
        f"{source.name}: {line.strip()}"
        for source in sources()
        for line in source.text.splitlines()
        if source.name not in allowed and by_hand.search(line)
    ]
    assert not found


def test_the_contract_holds_no_importable_code() -> None:
    assert not list((ROOT / "proto").rglob("*.py"))
