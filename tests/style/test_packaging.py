from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from tests.style.sources import ROOT, sources


@pytest.mark.parametrize("package", ["libs", "services"])
def test_packages_come_from_this_repository(package: str) -> None:
    """Nothing that is installed beside us may take our names."""
    found = importlib.import_module(package).__file__
    assert found is not None
    assert Path(found).resolve().parent == ROOT / package


def test_the_wheel_ships_both_packages_and_nothing_else() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["libs", "services"]


def test_every_command_points_at_a_function_that_exists() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for target in settings["project"]["scripts"].values():
        module, function = target.split(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        source = next(source for source in sources() if source.path == path)
        defined = {node.name for node in source.functions()}
        imported = {
            alias.asname or alias.name
            for node in source.tree.body
            if node.__class__.__name__ == "ImportFrom"
            for alias in node.names  # type: ignore[attr-defined]
        }
        assert function in defined | imported


def test_every_service_can_be_run_and_composed() -> None:
    """Each service with a core has a `build` for its process and for the simulation."""
    for source in sources():
        if source.path.name != "core.py" or source.path.parts[-3] != "services":
            continue
        names = {path.name for path in source.path.parent.glob("*.py")}
        assert {"__main__.py", "shell.py"} <= names, source.name
