"""Sizes and rates as people write them: 24GiB, 0.5TiB, 64 GB, 25GB/s."""

from __future__ import annotations

import re

from freetoken.errors import ConfigError

_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt])(i?)b?", re.IGNORECASE)
_BITS = re.compile(r"[KMGT]i?b\s*$")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of a size above 0; ConfigError names `flag`. A unit is required: `24` would be a guess.

    With an `i` the unit is a power of 1024, without one of 1000.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{flag} {text}: give a size with its unit, such as 24GiB or 0.5TiB")
    number, unit, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()]
    if size < 1:
        raise ConfigError(f"{flag} {text} must be above 0")
    return int(size)


def parse_rate(text: str, flag: str) -> float:
    """Bytes per second, from a size followed by /s; ConfigError names `flag`.

    `Gb/s` is refused: in rates it means bits.
    """
    size, slash, unit = text.partition("/")
    if slash and unit.strip().lower() == "s" and not _BITS.search(size):
        return float(parse_bytes(size, flag))
    raise ConfigError(f"{flag} {text}: give bytes per second with their unit, such as 25GB/s")


def show_gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
