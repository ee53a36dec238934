"""The Python sources of the product, parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Source:
    """One module."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT))

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, nested ones included."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]


@cache
def sources() -> tuple[Source, ...]:
    """Every module under `libs/` and `services/`."""
    paths = sorted(path for top in ("libs", "services") for path in (ROOT / top).rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return tuple(
        Source(path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)
    )
