"""Generates the language-neutral contract in `proto/` from the message classes.

    python -m libs.wire.schema --write     bring proto/ up to date
    python -m libs.wire.schema --check     exit 1 and list what differs

- `proto/schema/<kind>.json`: JSON Schema (2020-12) of the message's field map.
- `proto/golden/<kind>.hex`: one frame per line, the newest last. Earlier lines were written by
  earlier versions and must stay readable; `--write` appends a line when the encoding changes and
  refuses when that breaks an old line. `--forget` drops the old lines: a deliberate break.
- `proto/subjects.md`: the table between its two markers.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from libs.errors import LocalProtocolError, RemoteProtocolError
from libs.wire import registry
from libs.wire.codec import decode_frame, encode_frame
from libs.wire.envelope import Envelope
from libs.wire.fields import ITEMS_MAX, is_array
from libs.wire.samples import sample_of
from libs.wire.scalars import INT_MAX, INT_MIN

PROTO = Path(__file__).resolve().parents[2] / "proto"
GOLDEN_ENVELOPE = Envelope("decode_te.d0.dp1", 3, 7, 1_000_000_007, 2_000_000_007, "", "reply.1")
_TABLE_BEGIN, _TABLE_END = "<!-- table -->\n", "<!-- end of table -->\n"


def messages() -> tuple[type[Any], ...]:
    """Every message class of the product, sorted by kind."""
    importlib.import_module("libs.wire.messages")
    return tuple(cls for cls in registry.registered() if cls.__module__.startswith("libs.wire."))


def schema_of(cls: type[Any]) -> dict[str, Any]:
    """JSON Schema of the field map of a registered class; tensors appear as their number."""
    nested: dict[str, Any] = {}
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": registry.kind_of(cls),
        "x-frame-bytes-max": int(registry.limit_of(cls)),
        **_object(cls, nested),
    }
    if nested:
        schema["$defs"] = {name: nested[name] for name in sorted(nested)}
    return schema


def _object(cls: type[Any], nested: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return {
        "title": cls.__name__,
        "description": (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " "),
        "type": "object",
        "properties": {field.name: _type(hints[field.name], nested) for field in fields},
        "required": [
            field.name
            for field in fields
            if field.default is missing and field.default_factory is missing
        ],
        "additionalProperties": False,
    }


_SCALARS: dict[Any, dict[str, Any]] = {
    int: {"type": "integer", "minimum": INT_MIN, "maximum": INT_MAX},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    bytes: {"type": "string", "contentEncoding": "binary"},
}


def _type(hint: Any, nested: dict[str, Any]) -> dict[str, Any]:
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_array(hint):
        return {"type": "integer", "minimum": 0, "x-tensor": True}
    if origin in (typing.Union, types.UnionType):
        inner = next(item for item in arguments if item is not types.NoneType)
        return {"anyOf": [_type(inner, nested), {"type": "null"}]}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _type(arguments[0], nested), "maxItems": ITEMS_MAX}
    if origin is tuple:
        items = [_type(item, nested) for item in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        raise LocalProtocolError(f"type {hint!r} does not travel")
    if hint.__name__ not in nested:
        nested[hint.__name__] = None  # reserve the place in case the definition refers to it
        nested[hint.__name__] = _object(hint, nested)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def golden_frame(cls: type[Any]) -> str:
    """The frame of the class's sample, in hexadecimal."""
    return encode_frame(GOLDEN_ENVELOPE, sample_of(cls)).hex()


def subject_table() -> str:
    """The subject table as Markdown rows."""
    table = importlib.import_module("libs.wire.subjects").TABLE
    rows = ["| subject | listener | speaker | lane | purpose |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| `{row.pattern}` | {row.listener} | {row.speaker} | {row.lane} | {row.purpose} |"
        for row in table
    ]
    return "\n".join(rows) + "\n"


def expected_files(root: Path, *, forget: bool = False) -> dict[Path, str]:
    """What every generated file under `root` must contain.

    Raises `LocalProtocolError` when a frame of an earlier version would become unreadable.
    """
    files: dict[Path, str] = {}
    for cls in messages():
        kind = registry.kind_of(cls)
        schema = json.dumps(schema_of(cls), indent=2, ensure_ascii=False) + "\n"
        files[root / "schema" / f"{kind}.json"] = schema
        path = root / "golden" / f"{kind}.hex"
        lines = path.read_text().split() if path.exists() and not forget else []
        for number, line in enumerate(lines, start=1):
            _require_readable(line, f"{path.name} line {number}")
        newest = golden_frame(cls)
        lines = [*(line for line in lines if line != newest), newest]
        files[path] = "\n".join(lines) + "\n"
    page = root / "subjects.md"
    before, _, rest = page.read_text().partition(_TABLE_BEGIN)
    _, _, after = rest.partition(_TABLE_END)
    files[page] = f"{before}{_TABLE_BEGIN}{subject_table()}{_TABLE_END}{after}"
    return files


def _require_readable(line: str, where: str) -> None:
    try:
        decode_frame(bytes.fromhex(line))
    except (RemoteProtocolError, ValueError) as error:
        text = f"{where} is no longer readable ({error}); give new fields a default, or --forget"
        raise LocalProtocolError(text) from error


def differences(root: Path, files: dict[Path, str]) -> list[str]:
    """One line per generated file that is missing, out of date, or left over."""
    found = [
        f"{path.relative_to(root)}: {'out of date' if path.exists() else 'missing'}"
        for path, text in files.items()
        if not path.exists() or path.read_text() != text
    ]
    present = [*root.glob("schema/*.json"), *root.glob("golden/*.hex")]
    found += [f"{path.relative_to(root)}: left over" for path in present if path not in files]
    return sorted(found)


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m libs.wire.schema", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    parser.add_argument("--forget", action="store_true", help="drop frames of earlier versions")
    chosen = parser.parse_args(arguments)
    try:
        files = expected_files(PROTO, forget=chosen.forget)
    except LocalProtocolError as error:
        print(f"proto: {error}", file=sys.stderr)
        return 1
    found = differences(PROTO, files)
    if chosen.check:
        print("\n".join(found) if found else f"proto: {len(files)} files up to date")
        return 1 if found else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [*PROTO.glob("schema/*.json"), *PROTO.glob("golden/*.hex")]:
        if path not in files:
            path.unlink()
    print(f"proto: {len(files)} files written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
