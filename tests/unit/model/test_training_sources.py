"""Decoding of the public sources: tiny archives, databases and texts made by hand."""

from __future__ import annotations

import bz2
import io
import lzma
import struct
import tarfile
import zlib
from pathlib import Path

import pytest

from libs.errors import BadInput
from libs.model.training import debian, sources


def ar_archive(members: dict[str, bytes]) -> bytes:
    body = b"!<arch>\n"
    for name, payload in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(payload):<10}`\n"
        body += header.encode() + payload + b"\n" * (len(payload) % 2)
    return body


def data_tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for path, content in files.items():
            info = tarfile.TarInfo(f".{path}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def make_deb(folder: Path, name: str, files: dict[str, bytes]) -> None:
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data_tar(files)}
    (folder / name).write_bytes(ar_archive(members))


def test_wanted_files_come_out_of_an_archive(tmp_path: Path) -> None:
    make_deb(tmp_path, "demo_1.0_all.deb", {"/usr/a.txt": b"alpha", "/usr/b.bin": b"beta"})
    found = debian.read_package("demo", tmp_path, lambda path: path.endswith(".txt"))
    assert found == {"/usr/a.txt": b"alpha"}


def test_a_glob_takes_the_newest_archive(tmp_path: Path) -> None:
    make_deb(tmp_path, "python3-doc_3.11_all.deb", {"/old": b"old"})
    make_deb(tmp_path, "python3.11-doc_3.11.2_all.deb", {"/new": b"new"})
    assert debian.read_package("python3*-doc", tmp_path, lambda _: True) == {"/new": b"new"}


def test_a_missing_archive_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="apt-get download demo") as caught:
        debian.read_package("demo", tmp_path, lambda _: True)
    assert caught.value.field == "demo"


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(BadInput, match="no-such-package is not installed"):
        debian.read_package("no-such-package", None, lambda _: True)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"plain text", "not a Debian archive"),
        (ar_archive({"debian-binary": b"2.0\n"}), "no data.tar"),
        (ar_archive({"data.tar.zst": b"(\xb5/\xfd"}), "cannot read"),
        (b"!<arch>\n" + b"x" * 60, "damaged"),
    ],
)
def test_a_bad_archive_is_refused_in_words(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "demo_1_all.deb").write_bytes(content)
    with pytest.raises(BadInput, match=complaint):
        debian.read_package("demo", tmp_path, lambda _: True)


def r_chunk(kind: str, data: bytes) -> bytes:
    length = struct.pack(">I", len(data))
    match kind:
        case "zlib":
            return length + zlib.compress(data)
        case "bzip2":
            return length + b"2" + bz2.compress(data)
        case "lzma":
            raw = [{"id": lzma.FILTER_LZMA2}]
            return length + b"Z" + lzma.compress(data, format=lzma.FORMAT_RAW, filters=raw)
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["zlib", "bzip2", "lzma"])
def test_every_packing_of_a_database_object_is_read(kind: str) -> None:
    data = b"Emma Woodhouse, handsome, clever, and rich" * 20
    assert sources.unpack_r_chunk(r_chunk(kind, data), "emma") == data


@pytest.mark.parametrize(
    "chunk",
    [b"\0\0\0\x05" + zlib.compress(b"four"), b"\0\0\0\x04xx", b"\0\0\0\x04Z\xff", b"\0\0\0\x042??"],
)
def test_a_damaged_database_object_is_named(chunk: bytes) -> None:
    with pytest.raises(BadInput, match="object emma"):
        sources.unpack_r_chunk(chunk, "emma")


def test_hard_wrapped_lines_become_paragraphs() -> None:
    lines = ["CHAPTER I", "", "", "It was a _fine_ day--", "she said so.", ""]
    assert list(sources.paragraphs(lines)) == ["CHAPTER I", "It was a fine day --  she said so."]


def test_typographic_marks_become_ascii() -> None:
    assert sources.plain("\u201cDon\u2019t\u201d\u2014he said") == '"Don\'t" -- he said'


def ztext(blocks: list[list[str]]) -> tuple[bytes, bytes, bytes]:
    index, verses, packed = b"", struct.pack("<IIH", 0, 0, 0), b""
    for number, entries in enumerate(blocks):
        text = b""
        for entry in entries:
            data = entry.encode()
            verses += struct.pack("<IIH", number, len(text), len(data))
            text += data
        block = zlib.compress(text)
        index += struct.pack("<III", len(packed), len(block), len(text))
        packed += block
    return index, verses, packed


def test_scripture_is_read_verse_by_verse_across_blocks() -> None:
    blocks = [["<title>Preface</title>"], ["<chapter n='1'/>", "<w>In</w> the beginning,", "God"]]
    index, verses, packed = ztext(blocks)
    assert list(sources.ztext_entries(index, verses, packed)) == [*blocks[0], *blocks[1]]


def test_scripture_starts_at_the_first_chapter_and_keeps_paragraphs() -> None:
    old = ztext(
        [["<p/>Preface"], ["<chapter n='1'/>", "Verse one.", '<div type="x-p"/>Verse two.']]
    )
    new = ztext([["<chapter n='1'/>", "Verse three."]])
    files = {
        f"/texts/ztext/{name}.{kind}": part
        for name, parts in (("ot", old), ("nt", new))
        for kind, part in zip(("bzs", "bzv", "bzz"), parts, strict=True)
    }
    assert sources.decode_scripture(files) == "Verse one.\nVerse two.\nVerse three."


def test_a_verse_loses_markup_and_notes_but_no_space() -> None:
    entry = '<w lemma="x">God</w><note>or: <i>Elohim</i></note><w>created</w> light<note>n</note>.'
    assert sources.verse_text(entry) == "God created light."


def test_damaged_scripture_is_refused() -> None:
    index, verses, packed = ztext([["a verse"]])
    with pytest.raises(BadInput, match="block 0 is damaged"):
        list(sources.ztext_entries(index, verses, packed[:4]))
    with pytest.raises(BadInput, match="block 0 is damaged"):
        list(sources.ztext_entries(b"", verses, packed))


def test_a_missing_scripture_file_is_named() -> None:
    with pytest.raises(BadInput, match=r"/ot\.bzs"):
        sources.decode_scripture({})


@pytest.mark.parametrize(
    ("page", "wanted"),
    [
        ("library/asyncio.rst.txt", True),
        ("whatsnew/3.11.rst.txt", False),
        ("c-api/abstract.rst.txt", False),
        ("library/asyncio.html", False),
    ],
)
def test_only_pages_worth_learning_are_wanted(page: str, wanted: bool) -> None:
    assert sources.wants_docs(f"/usr/share/doc/python3.11/html/_sources/{page}") is wanted


def test_docs_are_ordered_by_path_without_nested_directives() -> None:
    files = {
        "/_sources/b.rst.txt": b"Second\n\n\n\nend",
        "/_sources/a.rst.txt": b"First\n   .. index::\nmore",
    }
    assert sources.decode_docs(files) == "First\n\nmore\n\nSecond\n\nend"
