"""Decodes the three public sources of prose into plain paragraphs, one per line.

    novels      r-cran-janeaustenr   six novels of Jane Austen inside an R lazy-load database
    scripture   sword-text-web       the World English Bible in the SWORD project's zText format
    docs        python3*-doc         reStructuredText sources of the Python documentation

Each function takes files by path, as `debian.read_package` returns them, and returns clean text:
typographic quotes and dashes become ASCII, so that a small vocabulary is not spent on them.
"""

from __future__ import annotations

import bz2
import html
import itertools
import lzma
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libs.errors import BadInput

NOVELS_PACKAGE = "r-cran-janeaustenr"
SCRIPTURE_PACKAGE = "sword-text-web"
DOCS_PACKAGE = "python3*-doc"

_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": " -- ", "\u00a0": " "})
# Chapters that are long lists of changes or belong to another language.
_DOCS_SKIPPED = ("whatsnew", "distutils", "c-api", "changelog")
_ZTEXT_VERSE = struct.Struct("<IIH")  # block, offset in the block, length
_ZTEXT_BLOCK = struct.Struct("<III")  # offset in the file, packed length, unpacked length


def plain(text: str) -> str:
    """`text` with ASCII quotes, dashes and spaces."""
    return text.translate(_PLAIN)


# ---------------------------------------------------------------- novels: R lazy-load database


def wants_novels(path: str) -> bool:
    """Whether `path` belongs to the novels' database."""
    return path.endswith(("/janeaustenr/data/Rdata.rdx", "/janeaustenr/data/Rdata.rdb"))


def decode_novels(files: Mapping[str, bytes]) -> str:
    """All novels, one paragraph per line; needs the `rdata` package of the train extra."""
    index, blob = _r_value(_only(files, "Rdata.rdx")), _only(files, "Rdata.rdb")
    variables = {str(key): value for key, value in index.items()}.get("variables", {})
    if not variables:
        raise BadInput("the novels' index names no variables", field="Rdata.rdx")
    novels = []
    for name, (offset, length) in variables.items():
        lines = _r_value(unpack_r_chunk(blob[int(offset) : int(offset) + int(length)], str(name)))
        novels.append("\n".join(paragraphs([str(line) for line in lines])))
    return "\n".join(novels)


def paragraphs(lines: Sequence[str]) -> Iterator[str]:
    """Joins hard-wrapped lines; an empty line ends a paragraph. Drops the markup for italics."""
    current: list[str] = []
    for line in [*lines, ""]:
        stripped = line.strip()
        if stripped:
            current.append(stripped)
        elif current:
            yield plain(" ".join(current)).replace("_", "").replace("--", " -- ")
            current = []


def unpack_r_chunk(chunk: bytes, name: str) -> bytes:
    """One object of an `.rdb`: 4 bytes of length, then zlib, or a type letter and bzip2 or LZMA."""
    expected = int.from_bytes(chunk[:4], "big")
    kind = chunk[4:5]
    try:
        if kind == b"2":
            data = bz2.decompress(chunk[5:])
        elif kind == b"Z":
            raw = [{"id": lzma.FILTER_LZMA2}]
            data = lzma.decompress(chunk[5:], format=lzma.FORMAT_RAW, filters=raw)
        else:
            data = zlib.decompress(chunk[4:])
    except (OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise BadInput(f"object {name} cannot be unpacked: {error}", field=name) from error
    if len(data) != expected:
        raise BadInput(f"object {name} has {len(data)} bytes, expected {expected}", field=name)
    return data


def _r_value(data: bytes) -> Any:
    try:
        import rdata
    except ModuleNotFoundError as error:
        message = "reading the novels needs the package rdata: pip install 'xdeepserve[train]'"
        raise BadInput(message, field=NOVELS_PACKAGE) from error
    # The extension tells the parser that this is one bare object, which it would else warn about.
    return rdata.conversion.convert(rdata.parser.parse_data(data, extension=".rds"))


# ---------------------------------------------------------------- scripture: SWORD zText


def wants_scripture(path: str) -> bool:
    """Whether `path` belongs to the scripture's text files."""
    return "/texts/ztext/" in path and path.endswith((".bzs", ".bzv", ".bzz"))


def decode_scripture(files: Mapping[str, bytes]) -> str:
    """The Old and the New Testament, one paragraph per line."""
    pieces: list[str] = []
    for testament in ("ot", "nt"):
        entries = ztext_entries(
            blocks=_only(files, f"/{testament}.bzs"),
            verses=_only(files, f"/{testament}.bzv"),
            packed=_only(files, f"/{testament}.bzz"),
        )
        front = itertools.dropwhile(lambda entry: "<chapter" not in entry, entries)
        pieces += (verse_text(entry) for entry in front)
    text = " ".join(piece for piece in pieces if piece)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def ztext_entries(blocks: bytes, verses: bytes, packed: bytes) -> Iterator[str]:
    """The marked-up entries of one testament, in order.

    `verses` has 10-byte records (block, offset, length), `blocks` 12-byte records (offset, packed
    length, unpacked length) into `packed`, where each block is a zlib stream.
    """
    cache: dict[int, bytes] = {}
    whole = len(verses) - len(verses) % _ZTEXT_VERSE.size
    for block, offset, length in _ZTEXT_VERSE.iter_unpack(verses[:whole]):
        if length == 0:
            continue  # a verse that this versification has and this Bible has not
        if block not in cache:
            cache[block] = _ztext_block(block, blocks, packed)
        yield cache[block][offset : offset + length].decode("utf-8", "ignore")


def _ztext_block(block: int, blocks: bytes, packed: bytes) -> bytes:
    try:
        at, length, unpacked = _ZTEXT_BLOCK.unpack_from(blocks, block * _ZTEXT_BLOCK.size)
        data = zlib.decompress(packed[at : at + length])
    except (struct.error, zlib.error) as error:
        raise BadInput(f"scripture block {block} is damaged: {error}", field="bzz") from error
    if len(data) != unpacked:
        message = f"scripture block {block} has {len(data)} bytes, expected {unpacked}"
        raise BadInput(message, field="bzz")
    return data


def verse_text(entry: str) -> str:
    """The words of one marked-up entry; starts with a newline where a paragraph starts."""
    starts = re.search(r'type="(?:x-p|paragraph)"|<p ?/?>|<lg|<chapter', entry) is not None
    words = re.sub(r"<(note|title)\b.*?</\1>", " ", entry, flags=re.DOTALL)
    words = plain(html.unescape(re.sub(r"<[^>]+>", "", words)))
    words = re.sub(r"\s+", " ", words)
    words = re.sub(r" ([,.;:!?])", r"\1", words).strip()  # a note stood before the mark
    return ("\n" if starts else "") + words


# ---------------------------------------------------------------- docs: reStructuredText


def wants_docs(path: str) -> bool:
    """Whether `path` is a source page of the documentation that is worth learning."""
    _, found, page = path.partition("/_sources/")
    return bool(found) and page.endswith(".rst.txt") and not page.startswith(_DOCS_SKIPPED)


def decode_docs(files: Mapping[str, bytes]) -> str:
    """All pages in the order of their paths, without nested directives, line breaks kept."""
    pages = (files[path].decode("utf-8", "ignore") for path in sorted(files))
    text = plain("\n\n".join(pages))
    text = re.sub(r"\n[ \t]+\.\. .*", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _only(files: Mapping[str, bytes], suffix: str) -> bytes:
    matches = [path for path in files if path.endswith(suffix)]
    if len(matches) != 1:
        raise BadInput(f"expected one file *{suffix}, found {len(matches)}", field=suffix)
    return files[matches[0]]
