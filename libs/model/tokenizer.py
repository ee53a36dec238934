"""Text to token ids and back, for any checkpoint with a byte-level BPE `tokenizer.json`.

Two ways in and one way out:

- `encode` treats its input as plain text: `<｜User｜>` typed by somebody becomes ordinary letters,
  never the control token. `encode_rendered` is for text made by a chat template, where control
  strings mean what they say.
- `decode` leaves control tokens out of the text. A token of byte-level BPE may hold half a UTF-8
  character, so a stream goes through `IncrementalDetokenizer`, which holds incomplete bytes back.
  A control token is a border: bytes before it are never joined with bytes after it, so that no
  character can straddle the end of a reasoning block.

The text of `decode` equals the concatenated pieces of the detokenizer for every sequence of ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from libs.errors import BadInput
from libs.model.weights import SHIPPED

ABSENT = -1
"""Stands for a control token that the checkpoint does not have; equal to no token id."""


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Ids of the control tokens of the DeepSeek V3.1 convention, `ABSENT` where there is none."""

    bos: int
    eos: int
    think_open: int
    think_close: int
    tool_calls_open: int
    tool_calls_close: int
    tool_call_open: int
    tool_call_close: int
    tool_separator: int


class Tokenizer:
    """A checkpoint's vocabulary; immutable, shared by everything in the process.

    `bos` and `eos` are the strings of the begin and end tokens (empty if there is none), `control`
    the ids that structure a conversation, `control_strings` all strings that are never plain text.
    """

    def __init__(self, directory: Path) -> None:
        """Use `Tokenizer.load`, which shares instances."""
        self._directory = directory
        settings = _read_json(directory / "tokenizer_config.json")
        layout = _read_json(directory / "tokenizer.json")
        _require_byte_level(layout, directory)
        self.bos = _token_string(settings.get("bos_token"))
        self.eos = _token_string(settings.get("eos_token"))
        controls, others = _split_added_tokens(layout)
        self._control_ids = controls
        # Without its control tokens the vocabulary cannot mistake typed text for one of them.
        self._plain = _build({**layout, "added_tokens": others, "post_processor": None}, directory)
        self._bytes = _token_bytes(layout["model"]["vocab"], others, controls)
        self._names = {number: name for name, number in controls.items()}
        longest_first = sorted(controls, key=len, reverse=True)
        self._splitter = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.control = _control_ids(controls, self.bos, self.eos)
        self.control_strings = tuple(longest_first)
        assert all(not self._bytes[number] for number in controls.values())

    @staticmethod
    def load(directory: Path | str | None = None) -> Tokenizer:
        """The tokenizer of the checkpoint in `directory` (default: the shipped one).

        Raises `BadInput` naming the file that is missing or not understood.
        """
        return _load(Path(SHIPPED if directory is None else directory).resolve())

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickle and copy as a reference to the directory: vocabularies do not travel."""
        return Tokenizer.load, (str(self._directory),)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes)

    def encode(self, text: str, *, field: str | None = None) -> list[int]:
        """Ids of `text` as plain text; `field` is named when it is not valid Unicode."""
        require_unicode(text, field)
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_rendered(self, text: str, *, hidden: str = "") -> list[int]:
        """Ids of a rendered prompt, in which control strings stand for control tokens.

        The characters `hidden` are dropped after control strings have been found.
        """
        ids: list[int] = []
        start = 0
        for found in self._splitter.finditer(text):
            ids += self._encode_piece(text[start : found.start()], hidden)
            ids.append(self._control_ids[found.group()])
            start = found.end()
        return ids + self._encode_piece(text[start:], hidden)

    def _encode_piece(self, text: str, hidden: str) -> list[int]:
        text = text.replace(hidden, "") if hidden else text
        return self.encode(text) if text else []

    def count(self, text: str) -> int:
        """Number of tokens of `text` as plain text."""
        return len(self.encode(text))

    def is_control(self, token: int) -> bool:
        """Whether `token` structures the conversation instead of carrying text."""
        return token in self._names

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to the text: none for control tokens and padding ids."""
        assert token >= 0, token
        return self._bytes[token] if token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        """How to show `token` alone: half characters as U+FFFD, control tokens by their string."""
        name = self._names.get(token)
        return self.token_bytes(token).decode("utf-8", "replace") if name is None else name

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD, control tokens nothing."""
        pieces: list[str] = []
        run = bytearray()
        for token in ids:
            if self.is_control(token):
                pieces.append(run.decode("utf-8", "replace"))
                run.clear()
            else:
                run += self.token_bytes(token)
        pieces.append(run.decode("utf-8", "replace"))
        return "".join(pieces)


class IncrementalDetokenizer:
    """Turns a stream of token ids into text that is final: no character is ever taken back.

    Its state is the incomplete UTF-8 bytes at the end, at most three.
    """

    __slots__ = ("_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = b""

    def push(self, token: int) -> str:
        """The text that becomes final with `token`."""
        if self._tokenizer.is_control(token):
            return self.flush()
        data = self._pending + self._tokenizer.token_bytes(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        assert len(self._pending) <= 3, self._pending
        return text

    def flush(self) -> str:
        """End the text here: an incomplete character becomes U+FFFD."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


def require_unicode(text: str, field: str | None = None) -> None:
    """Raise `BadInput` if `text` holds half of a surrogate pair, which JSON can smuggle in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = field or "text"
        raise BadInput(
            f"{where} is not valid Unicode: lone surrogate at character {error.start}", field=field
        ) from None


@lru_cache(maxsize=8)
def _load(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", field=path.name) from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}", field=path.name) from error
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a JSON object", field=path.name)
    return content


def _require_byte_level(layout: dict[str, Any], directory: Path) -> None:
    """Only byte-level BPE tells the bytes of a token from its string alone."""
    model, decoder = layout.get("model") or {}, layout.get("decoder") or {}
    decoders = {part.get("type") for part in [decoder, *decoder.get("decoders", [])]}
    if model.get("type") != "BPE" or not model.get("vocab") or "ByteLevel" not in decoders:
        raise BadInput(
            f"{directory / 'tokenizer.json'}: expected a BPE model with vocabulary and ByteLevel "
            f"decoder, found model {model.get('type')!r} and decoder {decoder.get('type')!r}",
            field="tokenizer.json",
        )


def _build(layout: dict[str, Any], directory: Path) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(layout))
    except Exception as error:  # the library raises nothing more precise
        raise BadInput(
            f"{directory / 'tokenizer.json'}: {error}", field="tokenizer.json"
        ) from error


def _token_string(entry: object) -> str:
    """A special token of tokenizer_config.json, which may be a string or an AddedToken object."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _split_added_tokens(layout: dict[str, Any]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Control tokens as string -> id, and the other added tokens (runs of spaces, say).

    Checkpoints do not agree on the `special` flag (DeepSeek's own `<think>` does not carry it), so
    whatever is written in angle brackets counts as a control token too.
    """
    controls: dict[str, int] = {}
    others: list[dict[str, Any]] = []
    for token in layout.get("added_tokens") or []:
        name = token["content"]
        if token.get("special") or (name.startswith("<") and name.endswith(">")):
            controls[name] = int(token["id"])
        else:
            others.append(token)
    return controls, others


def _control_ids(controls: dict[str, int], bos: str, eos: str) -> ControlIds:
    def find(name: str) -> int:
        return controls.get(name, ABSENT)

    return ControlIds(
        bos=find(bos),
        eos=find(eos),
        think_open=find("<think>"),
        think_close=find("</think>"),
        tool_calls_open=find("<｜tool▁calls▁begin｜>"),
        tool_calls_close=find("<｜tool▁calls▁end｜>"),
        tool_call_open=find("<｜tool▁call▁begin｜>"),
        tool_call_close=find("<｜tool▁call▁end｜>"),
        tool_separator=find("<｜tool▁sep｜>"),
    )


def _token_bytes(
    vocab: dict[str, int], others: Sequence[dict[str, Any]], controls: dict[str, int]
) -> tuple[bytes, ...]:
    """Bytes of every token id; control tokens and gaps in the numbering have none."""
    added = {int(token["id"]): token["content"].encode() for token in others}
    size = 1 + max([*vocab.values(), *added, *controls.values()])
    table = [b""] * size
    alphabet = _byte_alphabet()
    for string, number in vocab.items():
        if string in controls:
            continue
        if all(character in alphabet for character in string):
            table[number] = bytes(alphabet[character] for character in string)
        else:
            table[number] = string.encode()
    for number, data in added.items():
        table[number] = data
    return tuple(table)


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, for the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    assert len(alphabet) == 256
    return alphabet
