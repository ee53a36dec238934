"""The generated contract in `proto/` follows the code, and old frames stay readable."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from libs.errors import LocalProtocolError
from libs.wire import registry, schema
from libs.wire.codec import decode_frame, encode_frame
from libs.wire.envelope import Envelope
from libs.wire.samples import same, sample_of
from libs.wire.scalars import INT_MAX
from libs.wire.subjects import TABLE
from tests.unit.wire.kinds import Bulk, Control, Guarded

KINDS = [registry.kind_of(cls) for cls in schema.messages()]


def test_the_contract_is_up_to_date() -> None:
    found = schema.differences(schema.PROTO, schema.expected_files(schema.PROTO))
    assert found == [], "run python -m libs.wire.schema --write"


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_golden_frame_is_the_sample(kind: str) -> None:
    lines = (schema.PROTO / "golden" / f"{kind}.hex").read_text().split()
    envelope, message = decode_frame(bytes.fromhex(lines[-1]))
    assert envelope == schema.GOLDEN_ENVELOPE
    cls = registry.class_of(kind)
    assert cls is not None
    assert same(message, sample_of(cls))


def test_samples_give_every_scalar_its_own_value() -> None:
    sample = sample_of(Control)
    assert len({repr(getattr(sample, name)) for name in ("count", "ratio", "name", "blob")}) == 4


def test_a_class_that_refuses_samples_gets_its_defaults() -> None:
    assert sample_of(Guarded) == Guarded()


def test_same_sees_a_single_changed_bit() -> None:
    left, right = sample_of(Bulk), sample_of(Bulk)
    assert same(left, right)
    right.parts[1].rows[0, 0] += 1
    assert not same(left, right)


def test_the_schema_describes_types_requirements_and_nesting() -> None:
    described: dict[str, Any] = schema.schema_of(Bulk)
    assert described["required"] == ["parts", "pairs", "scale"]
    assert described["additionalProperties"] is False
    assert described["properties"]["parts"]["items"] == {"$ref": "#/$defs/Part"}
    assert described["$defs"]["Part"]["properties"]["rows"]["x-tensor"] is True
    assert schema.schema_of(Control)["properties"]["count"]["maximum"] == INT_MAX


def test_the_subject_page_has_a_row_for_every_subject() -> None:
    page = (schema.PROTO / "subjects.md").read_text()
    for row in TABLE:
        assert f"| `{row.pattern}` | {row.listener} | {row.speaker} | {row.lane} |" in page


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A freshly generated `proto/` of its own, whatever state the repository's is in."""
    root = tmp_path / "proto"
    shutil.copytree(schema.PROTO, root)
    for path, text in schema.expected_files(root, forget=True).items():
        path.write_text(text)
    return root


def test_files_that_differ_are_listed(copy: Path) -> None:
    (copy / "schema" / f"{KINDS[0]}.json").write_text("{}")
    (copy / "golden" / f"{KINDS[1]}.hex").unlink()
    (copy / "schema" / "gone.json").write_text("{}")
    found = schema.differences(copy, schema.expected_files(copy))
    assert set(found) == {
        f"schema/{KINDS[0]}.json: out of date",
        f"golden/{KINDS[1]}.hex: missing",
        "schema/gone.json: left over",
    }


def test_an_old_readable_frame_is_kept_before_the_new_one(copy: Path) -> None:
    path = copy / "golden" / "heartbeat.hex"
    newest = path.read_text()
    other = encode_frame(Envelope("x", 1, 1, 1), decode_frame(bytes.fromhex(newest))[1])
    path.write_text(other.hex() + "\n")
    assert schema.expected_files(copy)[path] == other.hex() + "\n" + newest


def test_an_old_frame_that_became_unreadable_stops_the_generator(copy: Path) -> None:
    path = copy / "golden" / "heartbeat.hex"
    path.write_text("00" * 40 + "\n" + path.read_text())
    with pytest.raises(LocalProtocolError, match=r"heartbeat\.hex line 1 is no longer readable"):
        schema.expected_files(copy)
    assert path in schema.expected_files(copy, forget=True)


def test_the_command_writes_then_finds_nothing_to_do(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schema, "PROTO", copy)
    left_over = copy / "schema" / "gone.json"
    left_over.write_text("{}")
    assert schema.main(["--check"]) == 1
    assert "schema/gone.json: left over" in capsys.readouterr().out
    assert schema.main(["--write"]) == 0
    assert not left_over.exists()
    assert schema.main(["--check"]) == 0
