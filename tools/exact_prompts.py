"""Prompts of exactly so many tokens for a server whose tokenizer is unknown.

A *unit* is a piece of text that is one token wherever it stands: a common word with its blank for
most tokenizers, a letter for byte-level ones. Which one it is, and how many tokens the server adds
(a first token, a chat template), is found by asking the server to count two prompts. Units are
drawn at random, so that no two prompts share more than a few tokens by accident.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

CountTokens = Callable[[str], Awaitable[int]]

_COMMON = (
    "the of and to in is that it was for on are with as his they be at one have this from by "
    "not but what all were when we there can an your which their if will each about how up out "
    "them then she many some so these would other into has more her two like him time could no "
    "make than first been people water over did down only way find use may long little very "
    "after called just where most know"
)
WORDS = tuple(f" {word}" for word in _COMMON.split())
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
PROBES = (96, 288)
"""Numbers of units in the two prompts that are counted."""


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """`tokens = overhead + tokens_per_unit * units`; exact if tokens_per_unit is 1."""

    units: tuple[str, ...]
    tokens_per_unit: float
    overhead: int

    @property
    def is_exact(self) -> bool:
        return self.tokens_per_unit == 1

    @property
    def min_tokens(self) -> int:
        return self.overhead + 1

    def make(self, num_tokens: int, rng: random.Random) -> str:
        """A fresh prompt that the server counts as `num_tokens` tokens, template included."""
        return self.more(num_tokens - self.overhead, rng)

    def more(self, num_tokens: int, rng: random.Random) -> str:
        """Text that makes a prompt `num_tokens` tokens longer."""
        return "".join(rng.choices(self.units, k=max(1, round(num_tokens / self.tokens_per_unit))))


async def find_units(count_tokens: CountTokens, rng: random.Random) -> PromptMaker:
    """Words if they are one token each, else letters, else words with their measured rate."""
    fallback: PromptMaker | None = None
    for units in (WORDS, LETTERS):
        short, long = [await count_tokens("".join(rng.choices(units, k=num))) for num in PROBES]
        rate = (long - short) / (PROBES[1] - PROBES[0])
        maker = PromptMaker(units, rate, round(short - rate * PROBES[0]))
        if maker.is_exact:
            return maker
        fallback = fallback or maker
    assert fallback is not None
    return fallback
