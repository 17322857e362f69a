"""Stop strings in a stream of text: found across any split, nothing of them shown before.

One Aho-Corasick automaton for all strings (Aho and Corasick 1975): constant time a character
however many strings there are. The first string to be complete wins, the longest of those that end
there; so the result does not depend on how the text was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class StopSet:
    """The automaton; shared by every sequence of a request. Strings are not empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings)
        self.next: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[int] = [0]  # length of the longest string that ends in a state
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
            state = self.next[state][char]
        self.match[state] = len(string)

    def _link(self) -> None:
        queue = list(self.next[0].values())
        for state in queue:  # breadth first; grows while it is walked
            for char, child in self.next[state].items():
                fallback = self.fail[state]
                while fallback and char not in self.next[fallback]:
                    fallback = self.fail[fallback]
                self.fail[child] = self.next[fallback].get(char, 0)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)


@dataclass(frozen=True, slots=True)
class Found:
    """`text` may be shown; `is_stopped` says that a stop string ended it."""

    text: str
    is_stopped: bool


class StopScanner:
    """One text. Holds back what may turn out to be the beginning of a stop string."""

    def __init__(self, stops: StopSet, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str) -> Found:
        """What `text` allows to be shown."""
        stops, state = self._stops, self._state
        step, fail = stops.next, stops.fail
        for position, char in enumerate(text):
            while state and char not in step[state]:
                state = fail[state]
            state = step[state].get(char, 0)
            if stops.match[state]:
                shown = self._held + text[: position + 1]
                if not self._include_stop:
                    shown = shown[: -stops.match[state]]
                self._held = ""
                return Found(shown, True)
        self._state = state
        shown = self._held + text
        split = len(shown) - stops.depth[state]
        self._held = shown[split:]
        return Found(shown[:split], False)

    def finish(self) -> str:
        """The text ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held
