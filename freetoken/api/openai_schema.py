"""The bodies of OpenAI requests: which fields there are, their types and ranges.

`parse` turns a JSON object into a typed request or a 400 that names field, value and limit. A field
that would change the answer and is not supported is refused by name; null means absent everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from freetoken.api.errors_http import ApiError, invalid
from freetoken.nearest import find_nearest

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_TOKENS = 2**31 - 1

TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; never sent


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True):
    """What the two endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: TokenCount | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    # extensions
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class ChatRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    messages: list[Any]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",  # about tools, which are refused
    }
)
"""Harmless: they change nothing about the answer."""

_TOOLS = "tool calls are not supported"
_NEUTRAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (lambda value: value == [], _TOOLS),
    "tool_choice": (lambda value: value == "none", _TOOLS),
    "functions": (lambda value: value == [], _TOOLS),
    "function_call": (lambda value: value == "none", _TOOLS),
    "response_format": (
        lambda value: value == {"type": "text"},
        'only {"type": "text"} is supported',
    ),
    "modalities": (lambda value: value == ["text"], 'only ["text"] is supported'),
    "audio": (lambda value: False, "audio output is not supported"),
    "prediction": (lambda value: False, "predicted output is not supported"),
    "reasoning_effort": (lambda value: False, "reasoning cannot be steered by it"),
    "verbosity": (lambda value: False, "verbosity cannot be steered by it"),
    "web_search_options": (lambda value: False, "web search is not supported"),
    "suffix": (lambda value: value == "", "filling in the middle is not supported"),
    "echo": (lambda value: value is False, "the prompt is not repeated"),
}
"""Known fields without support: the value that changes nothing, and why any other is refused."""

_T = TypeVar("_T", ChatRequest, CompletionRequest)


def parse(body: dict[str, Any], kind: type[_T]) -> _T:
    """The typed request; 400 names the first field that cannot be honoured."""
    known = kind.__struct_fields__
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in known:
            kept[name] = value
        elif name == "best_of" and value == body.get("n", 1):
            continue
        else:
            _refuse_unless_neutral(name, value, known)
    try:
        request = msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kept) from error
    _check_together(request)
    return request


def _refuse_unless_neutral(name: str, value: object, known: tuple[str, ...]) -> None:
    if name in _NEUTRAL:
        is_neutral, reason = _NEUTRAL[name]
        if not is_neutral(value):
            message = f"{name}={_show(value)} is not supported: {reason}; leave the field out"
            raise invalid(message, name, code="unsupported_field")
        return
    if name == "best_of":
        raise invalid(
            f"best_of={_show(value)} is not supported unless it equals n; leave the field out",
            name,
            code="unsupported_field",
        )
    near = find_nearest(name, known)
    hint = "leave it out" if near is None else f"did you mean {near}?"
    shown = name if len(name) <= 80 else name[:80] + "…"
    raise invalid(f"the field {shown!r} is not supported; {hint}", shown, code="unsupported_field")


def _check_together(request: SamplingFields) -> None:
    """Rules over more than one field, and lengths."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    stops = stop_strings(request)
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop has {len(stops)} strings, the limit is {MAX_STOPS}", "stop")
    for string in stops:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            raise invalid(
                f"a stop string has {len(string)} characters, it needs 1 to {MAX_STOP_CHARS}",
                "stop",
            )


def _check_chat(request: ChatRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise invalid(f"top_logprobs={request.top_logprobs} needs logprobs=true", "top_logprobs")
    old, new = request.max_tokens, request.max_completion_tokens
    if None not in (old, new) and old != new:
        raise invalid(
            f"max_tokens={old} and max_completion_tokens={new} contradict each other; send one",
            "max_tokens",
        )


def stop_strings(request: SamplingFields) -> list[str]:
    stop = request.stop
    return [stop] if isinstance(stop, str) else list(stop or ())


_WHERE = re.compile(r"^(?P<what>.*) - at `(?P<path>.*)`$", re.DOTALL)


def _explain(text: str, body: dict[str, Any]) -> ApiError:
    """msgspec's complaint, with the field in front and the value it is about."""
    match = _WHERE.match(text)
    if match is None:
        missing = re.search(r"required field `(\w+)`", text)
        name = missing[1] if missing else None
        return invalid(f"the field {name} is required" if name else text, name)
    what = match["what"]
    path = match["path"].removeprefix("$").removeprefix(".")
    missing = re.search(r"required field `(\w+)`", what)
    if missing:
        return invalid(f"{path}: the field {missing[1]} is required", path)
    value = _look_up(body, path)
    got = "" if value is _ABSENT or ", got " in what else f", got {_show(value)}"
    return invalid(f"{path}: {what[:1].lower()}{what[1:]}{got}", path)


_ABSENT = object()


def _look_up(body: dict[str, Any], path: str) -> object:
    """The value at msgspec's `a.b[0]`; absent where it does not say which (`a[...]`)."""
    value: Any = body
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return _ABSENT
    return value


def _show(value: object) -> str:
    """A value as JSON, cut to a length that fits a message."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:80] + "…"
