"""A conversation to prompt tokens, through the checkpoint's own chat template.

The template is Jinja, as published with the checkpoint, and runs in a sandbox. It writes control
strings such as `<｜User｜>` between the texts of the conversation, and nothing in its output tells
the two apart. So every control string inside a *client's* text is broken up before rendering, by a
filler character that occurs nowhere in the conversation, and the filler is dropped when the
rendered text is cut into tokens: `<｜Assistant｜>` typed by a user becomes ordinary characters.

    messages, tools --normalise--> --break control strings--> --render--> --cut--> ids

Called by the gateway, once per request.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libs.errors import BadInput
from libs.model.chat_input import normalise_messages, normalise_tools
from libs.model.tokenizer import Tokenizer
from libs.model.weights import SHIPPED

_FIRST_FILLER = 0xE000
"""Fillers are taken from the private use area: no text means anything by these characters."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation: `ids` for the model, `text` for people.

    `reasoning_open` says that the prompt ends inside a reasoning block, so that the answer begins
    with a thought.
    """

    ids: tuple[int, ...]
    text: str
    reasoning_open: bool


class ChatTemplate:
    """The compiled chat template of one checkpoint.

    `presents_tools` says whether the template shows the tool list to the model at all; the shipped
    checkpoint was trained without one and knows its tools by heart.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises `BadInput` if `source` is not a Jinja template."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise BadInput(f"chat_template: {error}", field="chat_template") from error
        self._tokenizer = tokenizer
        self._breaker = _breaker(tokenizer.control_strings)
        self.presents_tools = "tools" in used

    @classmethod
    def load(cls, directory: Path | str | None = None) -> ChatTemplate:
        """The template of the checkpoint in `directory` (default: the shipped one).

        Raises `BadInput` if it has none.
        """
        home = Path(SHIPPED if directory is None else directory)
        return cls(_template_source(home), Tokenizer.load(home))

    def render(self, messages: object, *, tools: object = None, thinking: bool = False) -> Prompt:
        """The prompt for `messages` and `tools` (OpenAI form, as parsed JSON).

        `thinking` asks for a reasoning block before the answer. Raises `BadInput` naming the path
        of what the model or its template cannot take.
        """
        conversation = normalise_messages(messages)
        tool_list = normalise_tools(tools)
        filler = _unused_character(conversation, tool_list)
        try:
            text = self._template.render(
                messages=self._broken(conversation, filler),
                tools=self._broken(tool_list, filler) or None,
                thinking=thinking,
                add_generation_prompt=True,
                bos_token=self._tokenizer.bos,
                eos_token=self._tokenizer.eos,
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise BadInput(message, field="messages") from error
        ids = tuple(self._tokenizer.encode_rendered(text, hidden=filler))
        return Prompt(ids, text.replace(filler, ""), self._ends_in_thought(ids))

    def _broken(self, value: Any, filler: str) -> Any:
        """A copy of JSON-like `value` without a control string in any of its strings."""
        match value:
            case str():
                return self._breaker.sub(rf"\g<0>{filler}", value)
            case dict():
                return {
                    self._broken(key, filler): self._broken(item, filler)
                    for key, item in value.items()
                }
            case list():
                return [self._broken(item, filler) for item in value]
            case bool() | int() | float() | None:
                return value
            case _:
                raise AssertionError(f"not JSON: {type(value)}")

    def _ends_in_thought(self, ids: tuple[int, ...]) -> bool:
        control = self._tokenizer.control
        for token in reversed(ids):
            if token in (control.think_open, control.think_close):
                return token == control.think_open
        return False


def _breaker(control_strings: tuple[str, ...]) -> re.Pattern[str]:
    """Matches every character with which a control string begins, at the end of a text as well.

    Looking for whole control strings would miss the ones that come about where two texts meet
    without anything between them: `<thi` and `nk>`.
    """
    first = {re.escape(string[0]) for string in control_strings}
    return re.compile(f"[{''.join(sorted(first))}]" if first else r"(?!)")


def _unused_character(*values: Any) -> str:
    """The first private-use character that occurs in none of the strings of JSON-like `values`."""
    used = set(json.dumps(values, ensure_ascii=False))
    return next(chr(code) for code in range(_FIRST_FILLER, 0x110000) if chr(code) not in used)


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect in which published chat templates are written."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _template_source(directory: Path) -> str:
    """The template's text: `chat_template.jinja`, or the entry in `tokenizer_config.json`."""
    own_file = directory / "chat_template.jinja"
    config = directory / "tokenizer_config.json"
    try:
        if own_file.exists():
            return own_file.read_text(encoding="utf-8")
        entry = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{config}: {error}", field="chat_template") from error
    if isinstance(entry, list):
        # Several named templates: the one called default is meant for conversations.
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    if not isinstance(entry, str):
        raise BadInput(f"{config}: the checkpoint has no chat template", field="chat_template")
    return entry
