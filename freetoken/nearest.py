"""The nearest known name to a misspelt one. Used wherever a name is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """`, did you mean X?` for the nearest of `known`, or nothing if none is near."""
    best = find_nearest(name, known)
    return "" if best is None else f", did you mean {best}?"


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`; one that begins it (or begins with it) is preferred."""
    wanted = _plain(name)
    candidates = sorted(known)
    heads = [
        word
        for word in candidates
        if min(len(_plain(word)), len(wanted)) >= 3
        and (wanted.startswith(_plain(word)) or _plain(word).startswith(wanted))
    ]
    if heads:
        return max(heads, key=lambda word: _likeness(wanted, word))
    best = max(candidates, key=lambda word: _likeness(wanted, word), default=None)
    return best if best is not None and _likeness(wanted, best) >= 0.6 else None


def _likeness(wanted: str, word: str) -> float:
    return difflib.SequenceMatcher(None, wanted, _plain(word)).ratio()


def _plain(name: str) -> str:
    """Without what all names of a kind share."""
    return name.lower().removeprefix("freetoken_").strip("-").replace("_", "-")
