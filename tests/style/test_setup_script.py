"""Set-up failures are one clear sentence with the remedy; tried with stand-in interpreters."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Answers the version questions as Python 3.11 would, and fails where a bare system does.
STAND_IN = """#!/bin/bash
case "$1" in
  -c) exit {too_old} ;;
  --version) echo "Python 3.11.2" ;;
  -m) {venv} ;;
esac
"""

#: Makes an environment whose pip fails with the given output.
VENV_WITH_FAILING_PIP = """mkdir -p "$3/bin"; printf '#!/bin/bash\\n\
[ "$3" = --version ] && exit 0\\necho "{output}" >&2; exit 1\\n' > "$3/bin/python"; \
chmod +x "$3/bin/python" """


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, with an empty PATH of our own making."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "setup.sh", tmp_path / "deploy")
    (tmp_path / "requirements.lock").write_text("")
    (tmp_path / "bin").mkdir()
    return tmp_path


def run_setup(checkout: Path) -> subprocess.CompletedProcess[str]:
    tools = ("bash", "dirname", "mktemp", "cat", "rm", "tail", "grep", "mkdir", "chmod", "printf")
    for tool in tools:
        found = shutil.which(tool)
        link = checkout / "bin" / tool
        if found and not link.exists():
            link.symlink_to(found)
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(checkout / "deploy" / "setup.sh")],
        env={"PATH": str(checkout / "bin"), "HOME": str(checkout)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def install_python(checkout: Path, *, too_old: int = 0, venv: str = "exit 1") -> None:
    path = checkout / "bin" / "python3"
    path.write_text(STAND_IN.format(too_old=too_old, venv=venv))
    os.chmod(path, 0o755)


def test_no_python(checkout: Path) -> None:
    done = run_setup(checkout)
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr


def test_an_old_python(checkout: Path) -> None:
    install_python(checkout, too_old=1)
    done = run_setup(checkout)
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr


def test_no_venv_module(checkout: Path) -> None:
    install_python(checkout)
    done = run_setup(checkout)
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("error: command 'gcc' failed: No such file or directory", "install gcc"),
        ("Could not fetch URL", "is the package index reachable?"),
    ],
)
def test_pip_fails(checkout: Path, output: str, remedy: str) -> None:
    install_python(checkout, venv=VENV_WITH_FAILING_PIP.format(output=output))
    done = run_setup(checkout)
    assert done.returncode == 1
    assert remedy in done.stderr
