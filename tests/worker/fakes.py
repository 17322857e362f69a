"""A model whose next token depends on exactly the k/v found under the page table.

The k/v of a token are its id and its position; the next token of a row is a hash of all ids and
positions found in its pages up to the token that is sampled from. So a token read from a wrong
page, a missing copy or a stale row changes the output. `expected_next` says what must come.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freetoken.model.context import KvPools, StepContext
from freetoken.worker.runner import Limits, Runner
from freetoken.worker.sizes import ModelSizes
from freetoken.worker.source import ReportBytes

VOCAB_SIZE = 97


@dataclass(frozen=True)
class FakeCounters:
    slot_hits: int = 0
    slot_misses: int = 0
    expert_bytes: int = 0
    distinct_experts: int = 0


@dataclass
class HashModel:
    """`fails`: called with the ids before each forward; it may raise."""

    fails: object = None
    forwards: list[tuple[str, int]] = field(default_factory=list)
    num_layers: int = 4
    counters: Tensor | None = None
    pass_distinct: Tensor | None = None

    def forward(self, ids: Tensor, context: StepContext, logits_at: Tensor) -> Tensor:
        count = len(ids) if context.num_tokens is None else int(context.num_tokens)
        self.forwards.append(("forward", count))
        return self._run(ids, context, logits_at)

    def start_pass(
        self, ids: Tensor, context: StepContext, logits_at: Tensor, chunk_tokens: int
    ) -> HashPass:
        self.forwards.append(("pass", len(ids)))
        return HashPass(self, (ids, context, logits_at), chunk_tokens)

    def take_counters(self, on_demand: Sequence[int] | None = None) -> FakeCounters:
        return FakeCounters(distinct_experts=len(self.forwards))

    def _run(self, ids: Tensor, context: StepContext, logits_at: Tensor) -> Tensor:
        count = len(ids) if context.num_tokens is None else int(context.num_tokens)
        ids, rows, positions = ids[:count], context.rows[:count], context.positions[:count]
        if callable(self.fails):
            self.fails(ids)
        pools, size = context.pools, context.pools.page_size
        pages = context.page_table[rows, positions // size].long()
        pools.k[0][pages, positions % size, 0, 0] = ids.float()
        pools.v[0][pages, positions % size, 0, 0] = positions.float()
        assert sum(segment.length for segment in context.segments) == count
        logits = torch.zeros(len(logits_at), VOCAB_SIZE)
        for i, at in enumerate(logits_at.tolist()):
            row, end = int(context.rows[at]), int(context.positions[at]) + 1
            pages = context.page_table[row, : -(-end // size)].long()
            found = pools.k[0][pages, :, 0, 0].flatten()[:end]
            positions = pools.v[0][pages, :, 0, 0].flatten()[:end]
            assert positions.tolist() == list(range(end)), "k/v of another position"
            logits[i, expected_next([int(token) for token in found.tolist()])] = 5.0
        return logits


@dataclass
class HashPass:
    """Computes when its last layer is reached; `fails` is asked chunk by chunk in every layer."""

    model: HashModel
    step: tuple[Tensor, StepContext, Tensor]
    chunk_tokens: int
    at: int = 0
    is_closed: bool = False
    found: Tensor | None = None

    def advance(self, num_layers: int | None = None) -> bool:
        assert not self.is_closed
        fails, ids = self.model.fails, self.step[0]
        for _ in range(num_layers or self.model.num_layers - self.at):
            for chunk in ids.split(self.chunk_tokens):
                if callable(fails):
                    fails(chunk)
            self.at += 1
        assert self.at <= self.model.num_layers
        if self.at == self.model.num_layers:
            self.model.fails, held = None, self.model.fails
            self.found = self.model._run(*self.step)
            self.model.fails = held
        return self.found is not None

    def logits(self) -> Tensor:
        assert self.found is not None
        return self.found

    def close(self) -> None:
        self.is_closed = True


def expected_next(ids: list[int]) -> int:
    """The greedy next token after `ids`."""
    value = 7
    for token in ids:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB_SIZE


def expected_text(prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(expected_next(ids))
    return ids[len(prompt) :]


def fake_pools(num_pages: int, page_size: int) -> KvPools:
    shape = (num_pages + 1, page_size, 1, 1)
    return KvPools((torch.zeros(shape),), (torch.zeros(shape),), page_size)


def new_runner(model: HashModel, *, queues_steps: bool, **changes: int | None) -> Runner:
    """A runner of small limits, which `changes` change."""
    limits: dict[str, Any] = {
        "max_rows": 4,
        "num_pages": 32,
        "page_size": 4,
        "context_tokens": 64,
        "vocab_size": VOCAB_SIZE,
        "max_step_tokens": 64,
        "chunk_tokens": 64,
        "max_pass_tokens": 128,
        "max_on_demand_tokens": None,
    }
    made = Limits(**(limits | changes))
    pools = fake_pools(made.num_pages, made.page_size)
    return Runner(model, pools, made, queues_steps=queues_steps)


class HashSource:
    """A ModelSource of the hash model; `load` and `read_sizes` may be made to fail or to wait."""

    def __init__(self, model: HashModel | None = None, **sizes: int) -> None:
        self.model = model or HashModel()
        self.num_checks = self.num_loads = 0
        self.sizes = fake_sizes(**sizes)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def read_sizes(self) -> ModelSizes:
        return self.sizes

    def find_banks(self, experts: str) -> int:
        return 0

    def check(self, experts: str) -> None:
        self.num_checks += 1

    def load(
        self, experts: str, num_slots: int | None, context_tokens: int, report: ReportBytes
    ) -> HashModel:
        self.num_loads += 1
        report("loading", 5, 10)
        return self.model

    def make_pools(self, num_pages: int, page_size: int) -> KvPools:
        return fake_pools(num_pages, page_size)


def fake_sizes(**changes: int) -> ModelSizes:
    """Sizes that fit the hash model's pools: one float of k and one of v."""
    values = {
        "window": 256,
        "kv_widths": (2,),
        "element_bytes": 4,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 1,
        "query_width": 1,
        "ffn_width": 1,
        "expert_width": 0,
        "num_moe_layers": 0,
        "num_experts": 0,
        "top_k": 0,
        "expert_bytes": 0,
        "dense_bytes": 8,
        "max_gathered_keys": 0,
        "max_scores": 0,
        "library_bytes": 0,
    }
    return ModelSizes(**(values | changes))


class StuckSource(HashSource):
    """Loading hangs in one long operation that no signal handler can interrupt."""

    def load(
        self, experts: str, num_slots: int | None, context_tokens: int, report: ReportBytes
    ) -> HashModel:
        report("stuck now", 0, 1)
        mutex = ctypes.create_string_buffer(128)  # zeros are PTHREAD_MUTEX_INITIALIZER
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return self.model


class SleepySource(HashSource):
    """Loading takes long, in many short operations."""

    def load(
        self, experts: str, num_slots: int | None, context_tokens: int, report: ReportBytes
    ) -> HashModel:
        report("stuck now", 0, 1)
        while True:
            threading.Event().wait(0.01)
