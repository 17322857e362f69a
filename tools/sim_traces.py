"""Made-up loads for the simulator: agents, chats and batch jobs. Deterministic by seed.

A conversation is a closed loop: its next turn is sent some time after the last one was answered. So
a slow server is asked less; the conversations and their lengths are the same for every policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Turn:
    """New tokens of the user or the tools, tokens of the answer, and the time before."""

    new_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """`prefix_tokens` are the same in all conversations with this `prefix`; a turn's prompt is
    all that was said before and its own new tokens."""

    kind: str
    start_s: float
    prefix: int
    prefix_tokens: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """How many conversations of each kind begin, evenly, within `duration_s`."""

    agents: int = 4
    chats: int = 10
    batch: int = 4
    duration_s: float = 300.0


def make_trace(load: Load, seed: int) -> list[Conversation]:
    """In order of their start."""
    makers: list[tuple[int, Callable[[Random, float, int], Conversation]]] = [
        (load.agents, _agent),
        (load.chats, _chat),
        (load.batch, _batch_job),
    ]
    trace = []
    for kind, (count, make) in enumerate(makers):
        random = Random(f"{seed}-{kind}")
        for number in range(count):
            start_s = (number + random.random()) * load.duration_s / count
            trace.append(make(random, start_s, number))
    return sorted(trace, key=lambda conversation: conversation.start_s)


def _agent(random: Random, start_s: float, number: int) -> Conversation:
    """One of two long system prompts with tools, then many small turns: what a tool printed."""
    turns = [
        Turn(
            _around(random, 120, 1.0, 8, 3000),
            _around(random, 60, 0.7, 8, 600),
            random.expovariate(1),
        )
        for _ in range(random.randint(8, 20))
    ]
    return Conversation("agent", start_s, number % 2, 6000 + 2000 * (number % 2), tuple(turns))


def _chat(random: Random, start_s: float, _number: int) -> Conversation:
    """A short system prompt, questions by people."""
    turns = [
        Turn(
            _around(random, 40, 1.0, 4, 1500),
            _around(random, 150, 0.6, 16, 800),
            random.expovariate(1 / 10),
        )
        for _ in range(random.randint(1, 5))
    ]
    return Conversation("chat", start_s, 2, 200, tuple(turns))


def _batch_job(random: Random, start_s: float, _number: int) -> Conversation:
    """A long document, read once."""
    turn = Turn(_around(random, 24_000, 0.3, 8000, 40_000), _around(random, 200, 0.5, 50, 800), 0.0)
    return Conversation("batch", start_s, 3, 100, (turn,))


def _around(random: Random, middle: int, spread: float, least: int, most: int) -> int:
    return min(most, max(least, round(random.lognormvariate(math.log(middle), spread))))
