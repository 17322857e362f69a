"""Traces of expert routing: made up, or recorded by record_routing.py.

A trace says for each step and layer which experts the step's tokens ask for. The made-up ones have
128 experts, 8 a token, as Qwen3-30B-A3B does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

NUM_EXPERTS, TOP_K = 128, 8
# P(stack depth ≤ 8, 16, 32, 48), as reported for real models of this shape.
DEPTHS = ((0, 0.0), (8, 0.5), (16, 0.66), (32, 0.84), (48, 0.92), (NUM_EXPERTS, 1.0))


@dataclass(frozen=True, slots=True)
class Trace:
    """steps[step][layer]: different experts, ascending · is_counted[step]: do its hits count?"""

    name: str
    num_experts: int
    steps: list[list[list[int]]]
    is_counted: list[bool]

    @property
    def num_layers(self) -> int:
        return len(self.steps[0])

    @property
    def num_lookups(self) -> int:
        """Of the steps that count."""
        pairs = zip(self.steps, self.is_counted, strict=True)
        return sum(len(layer) for step, counted in pairs if counted for layer in step)


@dataclass(frozen=True, slots=True)
class Recording:
    """conversations: for each the ids of its tokens, [T, L, K]."""

    num_experts: int
    conversations: list[np.ndarray]

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.conversations)


class StackRouter:
    """Asks for the experts at random depths of a stack, and puts what it asked for on top."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._stack = rng.sample(range(NUM_EXPERTS), NUM_EXPERTS)

    def route(self) -> set[int]:
        """The experts of the next token."""
        asked: set[int] = set()
        while len(asked) < TOP_K:
            asked.add(self._stack[self._depth()])
        top = self._rng.sample(sorted(asked), TOP_K)
        self._stack = top + [expert for expert in self._stack if expert not in asked]
        return asked

    def _depth(self) -> int:
        x = self._rng.random()
        for (low, p_low), (high, p_high) in pairwise(DEPTHS):
            if x < p_high:
                return low + int((x - p_low) / (p_high - p_low) * (high - low))
        raise AssertionError("probabilities end with 1")


def uniform(num_layers: int, num_steps: int, seed: int = 0, rows: int = 1) -> Trace:
    """Every token asks for any experts."""
    rng = random.Random(seed)

    def layer() -> list[int]:
        return _union(set(rng.sample(range(NUM_EXPERTS), TOP_K)) for _ in range(rows))

    return _counted("uniform", [[layer() for _ in range(num_layers)] for _ in range(num_steps)])


def lru_stack(num_layers: int, num_steps: int, seed: int = 0, rows: int = 1) -> Trace:
    """Recency is all that counts: LRU is the best there is without knowing the future."""
    rng = random.Random(seed)
    routers = [[StackRouter(rng) for _ in range(rows)] for _ in range(num_layers)]
    steps = [[_union(row.route() for row in layer) for layer in routers] for _ in range(num_steps)]
    return _counted("lru-stack" if rows == 1 else f"lru-stack, {rows} rows", steps)


def cyclic(num_layers: int, num_steps: int, seed: int = 0, width: int = 112) -> Trace:
    """One wide step repeated, `width` experts a layer."""
    rng = random.Random(seed)
    step = [sorted(rng.sample(range(NUM_EXPERTS), width)) for _ in range(num_layers)]
    return _counted("cyclic wide", [step] * num_steps)


def topics(num_layers: int, num_steps: int, seed: int = 0, length: int = 200) -> Trace:
    """Some experts are popular (1/rank), others every `length` steps."""
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, NUM_EXPERTS + 1)]
    order: list[list[int]] = []

    def layer(order: list[int]) -> list[int]:
        asked: set[int] = set()
        while len(asked) < TOP_K:
            asked.update(rng.choices(order, weights, k=TOP_K - len(asked)))
        return sorted(asked)

    steps = []
    for step in range(num_steps):
        if step % length == 0:
            order = [rng.sample(range(NUM_EXPERTS), NUM_EXPERTS) for _ in range(num_layers)]
        steps.append([layer(one) for one in order])
    return _counted("topics", steps)


def mixed(
    num_layers: int, num_steps: int, seed: int = 0, every: int = 40, tokens: int = 64
) -> Trace:
    """One row decodes; every so many steps another one extends by `tokens`. Decode steps count."""
    rng = random.Random(seed)
    routers = [(StackRouter(rng), StackRouter(rng)) for _ in range(num_layers)]
    steps, is_counted = [], []
    for step in range(1, num_steps + 1):
        num_extended = tokens if step % every == 0 else 0
        steps.append(
            [
                _union([decode.route(), *(extend.route() for _ in range(num_extended))])
                for decode, extend in routers
            ]
        )
        is_counted.append(num_extended == 0)
    return Trace("decode beside extends", NUM_EXPERTS, steps, is_counted)


def recorded(recording: Recording, rows: int = 1) -> Trace:
    """A token of each of `rows` conversations a step; when these end, the next ones begin."""
    steps = []
    for first in range(0, len(recording.conversations) - rows + 1, rows):
        together = recording.conversations[first : first + rows]
        for tokens in zip(*together, strict=False):
            ids = np.concatenate(tokens, axis=1)
            steps.append([sorted(set(layer)) for layer in ids.tolist()])
    name = "recorded" if rows == 1 else f"recorded, {rows} rows"
    return Trace(name, recording.num_experts, steps, [True] * len(steps))


def save_recording(path: Path, recording: Recording) -> None:
    np.savez_compressed(
        path,
        ids=np.concatenate(recording.conversations),
        lengths=np.array([len(ids) for ids in recording.conversations]),
        num_experts=np.array(recording.num_experts),
    )


def load_recording(path: Path) -> Recording:
    """Raises OSError, ValueError or KeyError for anything but a file of save_recording."""
    with np.load(path) as file:
        ids, lengths = file["ids"], file["lengths"].tolist()
        ends = list(accumulate(lengths, initial=0))
        return Recording(int(file["num_experts"]), [ids[a:b] for a, b in pairwise(ends)])


def _counted(name: str, steps: list[list[list[int]]]) -> Trace:
    return Trace(name, NUM_EXPERTS, steps, [True] * len(steps))


def _union(sets: Iterable[set[int]]) -> list[int]:
    return sorted(set[int]().union(*sets))


MAKERS: Sequence[str] = ("uniform", "lru-stack", "cyclic", "topics", "mixed", "recorded")
