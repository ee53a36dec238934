from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.style.sources import ROOT, sources

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT_IMPORTS, "--cache-dir", cache], cwd=folder, capture_output=True, text=True
    )


def test_imports_keep_to_the_contracts(tmp_path: Path) -> None:
    done = lint(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


def test_every_core_is_under_the_sans_io_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    patterns = [
        pattern
        for contract in contracts["contracts"]
        if {"asyncio", "time", "random"} <= set(contract.get("forbidden_modules", ()))
        for pattern in contract["source_modules"]
    ]
    assert "services.*.core" in patterns
    cores = [source for source in sources() if source.path.name == "core.py"]
    assert len(cores) >= 10


@pytest.mark.parametrize(
    ("importer", "line", "contract"),
    [
        ("services/one/core.py", "import asyncio", "sans-IO"),
        ("libs/errors.py", "import services.one.core", "libs never import services"),
    ],
)
def test_a_breach_is_noticed(tmp_path: Path, importer: str, line: str, contract: str) -> None:
    """The contracts bite: a copy of the layout with one bad import is refused."""
    settings = """
[tool.importlinter]
root_packages = ["libs", "services"]
include_external_packages = true

[[tool.importlinter.contracts]]
name = "libs never import services"
type = "layers"
layers = ["services", "libs"]

[[tool.importlinter.contracts]]
name = "sans-IO"
type = "forbidden"
source_modules = ["services.*.core"]
forbidden_modules = ["asyncio"]
allow_indirect_imports = true
"""
    for name in ("libs/__init__.py", "libs/errors.py", "services/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "services/one").mkdir()
    (tmp_path / "services/one/__init__.py").touch()
    (tmp_path / "services/one/core.py").touch()
    (tmp_path / importer).write_text(f"{line}\n")
    (tmp_path / "pyproject.toml").write_text(settings)
    done = lint(tmp_path, tmp_path / "cache")
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout
