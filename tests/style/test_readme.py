"""The README may not point at code that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

_FILE = re.compile(r"`((?:libs|services|deploy|tests|proto)/[\w./-]+)(?:: ([\w.]+))?`")
_LIFE = README.split("## The life of a request")[1].split("\n## ")[0]


def definitions(path: Path) -> set[str]:
    """`Class`, `Class.method` and `function` names of one module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


@pytest.mark.parametrize(("path", "name"), sorted(set(_FILE.findall(README))))
def test_every_file_and_function_it_names_exists(path: str, name: str) -> None:
    target = ROOT / path
    assert target.exists(), path
    if name:
        assert name in definitions(target), f"{path} has no {name}"


def test_the_life_of_a_request_names_a_function_in_every_step() -> None:
    steps = re.split(r"^\d+\. ", _LIFE, flags=re.MULTILINE)[1:]
    assert len(steps) >= 10
    for step in steps:
        assert re.search(r"`services/[\w/]+\.py(: [\w.]+)?`", step), step


def test_every_service_is_in_the_table() -> None:
    composers = {"cli", "pod", "superpod"}
    services = {path.parent.name for path in (ROOT / "services").glob("*/core.py")}
    rows = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    assert services - composers == rows


def test_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
