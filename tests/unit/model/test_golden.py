"""Golden logits hold on this machine, on other BLAS kernels and without numpy's own SIMD.

Each check is a process of its own, since kernels are chosen when numpy is imported. The kernels
really differ: ordinary float32 gives another hash on each.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from libs.model.golden import GOLDEN, differences
from libs.model.weights import load_checkpoint, read_json

ROOT = Path(__file__).parents[3]
NEEDS = {
    "Haswell": {"AVX2", "FMA3"},
    "SkylakeX": {"AVX512F", "AVX512BW", "AVX512VL"},
    "Sandybridge": {"AVX"},
    "Nehalem": {"SSE42"},
}
FLOAT_HASH = """
from libs.model.reference import Reference, logit_hash
from libs.model.weights import load_checkpoint
print(logit_hash(Reference(load_checkpoint(), "f32").prefill(list(range(20, 60)))))
"""
FEATURES = """
from numpy._core._multiarray_umath import __cpu_features__ as features
print(*[name for name, present in features.items() if present])
"""


def cpu_features() -> set[str]:
    """What this CPU can do, in numpy's names."""
    found = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    return {name for name, present in found.items() if present}


def run(arguments: list[str], **environment: str) -> tuple[int, str]:
    """Exit code and all output of a Python process in this repository."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def check(*arguments: str, **environment: str) -> tuple[int, str]:
    return run(["-m", "libs.model.golden", "--check", *arguments], **environment)


def need(family: str) -> None:
    missing = NEEDS[family] - cpu_features()
    if missing:
        pytest.skip(f"this CPU cannot run the {family} kernels: no {', '.join(sorted(missing))}")


def test_golden_holds_here() -> None:
    assert list(differences(read_json(GOLDEN), load_checkpoint(), ("int8",))) == []


@pytest.mark.parametrize("family", ["Haswell", "SkylakeX"])
def test_golden_holds_on_other_blas_kernels(family: str) -> None:
    need(family)
    assert check(OPENBLAS_CORETYPE=family) == (0, "")


def test_those_kernels_differ_in_ordinary_float32() -> None:
    need("SkylakeX")
    hashes = {
        run(["-c", FLOAT_HASH], OPENBLAS_CORETYPE=family) for family in ("Haswell", "SkylakeX")
    }
    assert len(hashes) == 2, "OPENBLAS_CORETYPE has no effect: the checks above prove nothing"
    assert all(code == 0 for code, _ in hashes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Sandybridge", "Nehalem"])
def test_golden_holds_on_old_blas_kernels(family: str) -> None:
    need(family)
    assert check(OPENBLAS_CORETYPE=family) == (0, "")


@pytest.mark.slow
def test_golden_holds_without_numpy_simd() -> None:
    dispatched = importlib.import_module("numpy._core._multiarray_umath").__cpu_dispatch__
    wanted = sorted(set(dispatched) & cpu_features())
    if not wanted:
        pytest.skip("this CPU has no SIMD beyond numpy's baseline")
    disabled = {"NPY_DISABLE_CPU_FEATURES": " ".join(wanted)}
    code, left = run(["-c", FEATURES], **disabled)
    assert code == 0
    assert not set(wanted) & set(left.split())
    assert check(**disabled) == (0, "")


@pytest.mark.slow
def test_golden_holds_with_two_blas_threads() -> None:
    assert check(OPENBLAS_NUM_THREADS="2") == (0, "")


def test_the_check_fails_on_one_changed_digit(tmp_path: Path) -> None:
    golden = read_json(GOLDEN)
    case = golden["cases"]["novel"]["modes"]["int8"]
    case["logits_sha256"] = case["logits_sha256"][:-1] + "x"
    changed = tmp_path / "golden.json"
    changed.write_text(json.dumps(golden))
    assert check("--mode", "int8", str(changed)) == (1, "novel, int8: logits_sha256 differ\n")


def test_the_check_refuses_another_checkpoint() -> None:
    golden = read_json(GOLDEN) | {"files": {"model.safetensors": "0"}}
    assert "not those" in "".join(differences(golden, load_checkpoint()))
