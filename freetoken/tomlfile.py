"""A flat TOML file of options: read it, write it. Knows no option by name."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from freetoken.errors import ConfigError


def read(path: Path) -> dict[str, Any]:
    """The table in `path`; ConfigError if it cannot be read or is no TOML."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not valid TOML: {error}") from error


def dump(options: Iterable[tuple[str, object, str | None]], *, with_unset: bool) -> str:
    """TOML of (name, value, comment) options. None has no form in TOML: such an option is left
    out, or shown as a comment `with_unset`."""
    lines = []
    for name, value, comment in options:
        if value is None and not with_unset:
            continue
        if comment:
            lines.append(f"# {comment}")
        lines.append(f"# {name} =" if value is None else f"{name} = {format_value(value)}")
    return "\n".join([*lines, ""])


def format_value(value: object) -> str:
    """A string, path, number, boolean or list of them as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, str | Path):
        return _quote(str(value))
    raise TypeError(f"no TOML form for {type(value).__name__}")


def _quote(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{text!r} is not valid UTF-8 and cannot be configured") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
