"""Checks the conversation a client sent and brings it into the one form chat templates expect.

In: `messages` and `tools` of the OpenAI API, as parsed JSON, trusted in nothing. Out: plain dicts
with exactly the keys `role`, `content` (always a string), `tool_calls`, `tool_call_id`. What is not
understood is refused by the path of the offending value (`messages[2].content[0].type`), since a
part that is silently dropped changes the answer without anybody noticing.

Called by `libs.model.chat`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from libs.errors import BadInput
from libs.model.tokenizer import require_unicode

Message = dict[str, Any]
Tool = dict[str, Any]

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the OpenAI API allows as the name of a function."""

_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's later name for the same thing
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

# Accepted and not shown to the model: V3.1 drops the reasoning of earlier turns, and the official
# client sends whole answers back with fields that say nothing.
_IGNORED_KEYS = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "reasoning_content", "reasoning"},
    "tool": {"name"},
}
_USED_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}


def normalise_messages(messages: object) -> list[Message]:
    """Checked copies of `messages`; raises `BadInput` naming the path of what is wrong."""
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "must be a non-empty array")
    checked: list[Message] = []
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        clean = _message(message, path)
        if clean["role"] == "tool" and clean["tool_call_id"] not in call_ids:
            raise _bad(f"{path}.tool_call_id", "answers no tool call of an earlier message")
        call_ids.update(call["id"] for call in clean.get("tool_calls", ()))
        checked.append(clean)
    if checked[-1]["role"] not in ("user", "tool"):
        last = f"messages[{len(checked) - 1}].role"
        raise _bad(last, "the last message must come from the user or a tool")
    return checked


def normalise_tools(tools: object) -> list[Tool]:
    """Checked copies of `tools`, each `{"type": "function", "function": {...}}`; None is none."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _bad("tools", "must be an array")
    checked = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _bad(f"tools[{index}].function.name", f"{name!r} is defined twice")
    return checked


def _message(message: object, path: str) -> Message:
    fields = _object(message, path)
    given_role = _string(fields.get("role"), f"{path}.role")
    role = _ROLES.get(given_role)
    if role is None:
        raise _bad(f"{path}.role", f"must be one of {', '.join(_ROLES)}, not {given_role!r}")
    for key, value in fields.items():
        empty = value is None or value == []
        if key not in _USED_KEYS[role] | _IGNORED_KEYS[role] and not empty:
            raise _bad(f"{path}.{key}", f"is not supported in a message of role {given_role}")
    clean: Message = {"role": role}
    calls = fields.get("tool_calls")
    if role == "assistant" and calls:
        clean["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    may_be_empty = "tool_calls" in clean
    clean["content"] = _content(fields.get("content"), f"{path}.content", may_be_empty)
    if role == "tool":
        clean["tool_call_id"] = _string(fields.get("tool_call_id"), f"{path}.tool_call_id")
    return clean


def _content(content: object, path: str, may_be_empty: bool) -> str:
    """The text of a message; several text parts are joined by line breaks."""
    if content is None and may_be_empty:
        return ""
    if isinstance(content, str):
        return _string(content, path)
    if not isinstance(content, list) or not content:
        raise _bad(path, "must be a string or a non-empty array of text parts")
    texts = []
    for index, part in enumerate(content):
        fields = _object(part, f"{path}[{index}]")
        kind = fields.get("type")
        if kind != "text":
            raise _bad(
                f"{path}[{index}].type",
                f"only text parts are supported by this model, not {kind!r}",
            )
        texts.append(_string(fields.get("text"), f"{path}[{index}].text"))
    return "\n".join(texts)


def _tool_calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _bad(path, "must be an array")
    checked = []
    for index, call in enumerate(calls):
        here = f"{path}[{index}]"
        fields = _object(call, here)
        if fields.get("type", "function") != "function":
            raise _bad(f"{here}.type", "only 'function' is supported")
        function = _object(fields.get("function"), f"{here}.function")
        arguments = _string(function.get("arguments"), f"{here}.function.arguments")
        if parse_json_object(arguments) is None:
            raise _bad(f"{here}.function.arguments", "must be a JSON object in a string")
        name = _function_name(function.get("name"), f"{here}.function.name")
        checked.append(
            {
                "id": _string(fields.get("id"), f"{here}.id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return checked


def _tool(tool: object, path: str) -> Tool:
    fields = _object(tool, path)
    if fields.get("type") != "function":
        raise _bad(f"{path}.type", "only 'function' is supported")
    function = _object(fields.get("function"), f"{path}.function")
    clean: Tool = {"name": _function_name(function.get("name"), f"{path}.function.name")}
    if function.get("description") is not None:
        clean["description"] = _string(function["description"], f"{path}.function.description")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_parameters(parameters, f"{path}.function.parameters")
        clean["parameters"] = parameters
    return {"type": "function", "function": clean}


def _check_parameters(schema: object, path: str) -> None:
    """The shape of a JSON Schema for an object of named parameters, one level deep."""
    fields = _object(schema, path)
    if not fields:  # the API's way to say "no parameters"
        return
    if fields.get("type") != "object":
        raise _bad(f"{path}.type", "must be 'object'")
    properties = _object(fields.get("properties", {}), f"{path}.properties")
    for name, entry in properties.items():
        if not isinstance(entry, dict | bool):
            raise _bad(f"{path}.properties.{name}", "must be a JSON Schema")
    required = fields.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _bad(f"{path}.required", "must be an array of parameter names")
    for name in required:
        if name not in properties:
            raise _bad(f"{path}.required", f"{name!r} is not among the properties")
    try:
        require_unicode(json.dumps(fields, ensure_ascii=False), path)
    except (RecursionError, ValueError) as error:
        raise _bad(path, f"is not JSON: {error}") from None


def parse_json_object(text: str) -> dict[str, Any] | None:
    """The object that `text` is the JSON of, or None; NaN and Infinity are not JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _function_name(name: object, path: str) -> str:
    text = _string(name, path)
    if not FUNCTION_NAME.fullmatch(text):
        raise _bad(path, "must be 1 to 64 letters, digits, underscores or dashes")
    return text


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(path, "must be an object")
    return value


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _bad(path, "must be a string" if value is not None else "is missing")
    require_unicode(value, path)
    return value


def _bad(path: str, problem: str) -> BadInput:
    return BadInput(f"{path}: {problem}", field=path)
