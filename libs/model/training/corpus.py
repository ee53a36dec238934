"""Builds the training text: three domains of public prose and one of generated conversations.

    novels.txt  scripture.txt  docs.txt    clean prose
    chat.txt                               one rendered dialogue per line
    corpus.json                            where each came from, its licence, size and SHA-256

Three unlike domains are a feature: which experts are busy depends on the traffic, so the load
balancer has something to follow. Prose comes from Debian packages (`--debs DIR`, or installed) or
from ready text files, plain or `.xz`; a domain with neither is an error, never silently left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from libs.errors import BadInput
from libs.model.training import sources
from libs.model.training.debian import read_package
from libs.model.training.dialogues import Prose, make_dialogues, render
from libs.model.training.script import console, run

DOMAINS = ("novels", "scripture", "docs", "chat")
DIALOGUES = 40_000
# A passage that the model may be asked for fits its training window and is more than a fragment.
_PASSAGE_CHARS = range(60, 500)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one domain comes from: a Debian package, which files of it, and how to decode them."""

    package: str
    licence: str
    wants: Callable[[str], bool]
    decode: Callable[[Mapping[str, bytes]], str]


SOURCES = {
    "novels": Source(
        sources.NOVELS_PACKAGE,
        "public domain (texts by Jane Austen); the package is MIT",
        sources.wants_novels,
        sources.decode_novels,
    ),
    "scripture": Source(
        sources.SCRIPTURE_PACKAGE,
        "public domain (World English Bible)",
        sources.wants_scripture,
        sources.decode_scripture,
    ),
    "docs": Source(
        sources.DOCS_PACKAGE,
        "PSF-2.0 (documentation of Python)",
        sources.wants_docs,
        sources.decode_docs,
    ),
}


@dataclass(frozen=True, slots=True)
class Written:
    """One line of `corpus.json`."""

    domain: str
    origin: str
    licence: str
    chars: int
    sha256: str


def read_prose(domain: str, ready: Path | None, debs: Path | None) -> tuple[str, str]:
    """The text of a prose domain and its origin, from a ready file or from its package."""
    source = SOURCES[domain]
    if ready is not None:
        return read_text(ready), ready.name
    files = read_package(source.package, debs, source.wants)
    return source.decode(files), source.package


def read_text(path: Path) -> str:
    """A UTF-8 text file, unpacked when its name ends in `.xz`, with plain quotes."""
    try:
        data = path.read_bytes()
        data = lzma.decompress(data) if path.suffix == ".xz" else data
        return sources.plain(data.decode("utf-8"))
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}", field=str(path)) from error


def passages(text: str) -> list[str]:
    """The paragraphs of `text` that are short enough to be asked for."""
    return [line for line in text.split("\n") if len(line) in _PASSAGE_CHARS]


def chat_text(count: int, seed: int, prose: Prose) -> str:
    """`count` rendered dialogues, one per line."""
    lines = [render(dialogue) for dialogue in make_dialogues(count, seed, prose)]
    assert not any("\n" in line for line in lines), "a dialogue is one line"
    return "\n".join(lines) + "\n"


def build(out: Path, texts: Mapping[str, tuple[str, str]], dialogues: int, seed: int) -> None:
    """Writes the four domains and `corpus.json`; `texts` maps a prose domain to (text, origin)."""
    assert set(texts) == set(SOURCES), sorted(texts)
    out.mkdir(parents=True, exist_ok=True)
    written = [
        _write(out, domain, text, origin, SOURCES[domain].licence)
        for domain, (text, origin) in texts.items()
    ]
    prose = Prose(passages(texts["novels"][0]), passages(texts["scripture"][0]))
    chat = chat_text(dialogues, seed, prose)
    origin = f"generated, {dialogues} dialogues, seed {seed}"
    written.append(_write(out, "chat", chat, origin, "Apache-2.0 (quotes the prose above)"))
    manifest = json.dumps([asdict(entry) for entry in written], indent=1)
    (out / "corpus.json").write_text(manifest + "\n")


def _write(out: Path, domain: str, text: str, origin: str, licence: str) -> Written:
    data = text.encode("utf-8")
    (out / f"{domain}.txt").write_bytes(data)
    console.print(f"{domain:10} {len(text):>11,} characters from {origin}")
    return Written(domain, origin, licence, len(text), hashlib.sha256(data).hexdigest())


def load(corpus: Path) -> dict[str, str]:
    """The four domains of a built corpus by name; `BadInput` names the first missing file."""
    return {domain: read_text(corpus / f"{domain}.txt") for domain in DOMAINS}


def main(argv: Sequence[str]) -> int:
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(prog="corpus", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--debs", type=Path, help="folder of .deb files; else installed packages")
    for domain in SOURCES:
        parser.add_argument(f"--{domain}", type=Path, help=f"ready text for {domain} (.txt, .xz)")
    parser.add_argument("--dialogues", type=int, default=DIALOGUES, help="conversations to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the conversations")
    options = parser.parse_args(argv)
    if options.dialogues < 1:
        raise BadInput("--dialogues must be at least 1", field="dialogues")
    texts = {
        domain: read_prose(domain, getattr(options, domain), options.debs) for domain in SOURCES
    }
    build(options.out, texts, options.dialogues, options.seed)
    return 0


if __name__ == "__main__":
    run(main)
