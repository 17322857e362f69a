"""Chat messages as clients send them, checked and brought to the form that templates expect.

Text only: parts of any other kind are refused by name. What a client echoes from our own answers
(refusal, annotations, empty tool_calls …) is taken when it says nothing.
"""

from __future__ import annotations

from typing import Any

from freetoken.api.errors_http import ApiError, invalid, kind_of

ROLES = ("system", "developer", "user", "assistant")
_TEXT_FIELDS = ("name", "reasoning_content")
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "tool_calls", "function_call", "tool_call_id")


def check_messages(messages: list[Any], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Role and text of each message; 400 names the message and field at fault.

    `developer`, OpenAI's newer word for `system`, is kept only for templates that know it.
    """
    if not messages:
        raise invalid("messages is empty; send at least one message", "messages")
    return [
        _check_message(message, f"messages[{index}]", knows_developer)
        for index, message in enumerate(messages)
    ]


def _check_message(message: object, where: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object, not {kind_of(message)}", where)
    role = message.get("role")
    if role in ("tool", "function"):
        raise _unsupported(f"{where}.role={role!r}: tool calls are not supported", f"{where}.role")
    if role not in ROLES:
        raise invalid(f"{where}.role is {role!r}, must be one of {', '.join(ROLES)}", where)
    if role == "developer" and not knows_developer:
        role = "system"
    checked: dict[str, Any] = {"role": role}
    for name, value in message.items():
        path = f"{where}.{name}"
        if name in ("role", "content") or value is None:
            continue
        if name in _TEXT_FIELDS:
            if not isinstance(value, str):
                raise invalid(f"{path} must be text, not {kind_of(value)}", path)
            checked[name] = value
        elif name not in _EMPTY_FIELDS or value not in ([], {}, ""):
            raise _unsupported(f"{path} is not supported; leave it out", path)
    checked["content"] = _check_content(message.get("content"), f"{where}.content")
    return checked


def _check_content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        kind = "missing" if content is None else kind_of(content)
        raise invalid(f"{path} is {kind}, must be text or a list of text parts", path)
    return "".join(_check_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _check_part(part: object, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f'{path} must be a part like {{"type": "text", "text": "…"}}', path)
    if part["type"] != "text":
        raise _unsupported(
            f"{path}: parts of type {part['type'][:80]!r} are not supported, the model takes text",
            path,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{path}.text must be text, not {kind_of(text)}", f"{path}.text")
    return text


def _unsupported(message: str, param: str) -> ApiError:
    return invalid(message, param, code="unsupported_field")
