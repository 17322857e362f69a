"""Slot tables: the reference and the device kernels against the policy, slot for slot."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

from freetoken.experts.policy import SlotPolicy
from freetoken.kernels import reference_slots, slot_ops
from freetoken.kernels.slot_tables import DISTINCT, SlotTables, allocate, clear, seat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
L, K = 3, 4
KINDS = ["reference", "triton"]
# Every fifth is wide. The interpreter takes 0.2 s for one.
NUM_STEPS = {"reference": 12, "triton": 12 if DEVICE == "cuda" else 7}


class Twins:
    """The policy and tables that must stay equal to it, over one sequence of steps."""

    def __init__(self, kind: str, num_slots: int, num_experts: int, max_tokens: int) -> None:
        if kind == "triton":
            from freetoken.kernels import triton_slots

            self.ops = triton_slots
        else:
            self.ops = reference_slots
        self.device = DEVICE if kind == "triton" else "cpu"
        self.policy = SlotPolicy(num_slots)
        self.tables = allocate(L, num_experts, num_slots, max_tokens * K, self.device)
        self.counters = [0, 0, 0, 0]

    def resolve(self, layer: int, ids: torch.Tensor, num_tokens: int | None) -> None:
        tables, num_experts = self.tables, self.tables.num_experts
        count = None
        if num_tokens is not None:
            count = torch.tensor([num_tokens], dtype=torch.int32, device=self.device)
        self.ops.resolve(tables, ids.to(self.device), count, layer)
        routed = ids[: len(ids) if num_tokens is None else num_tokens].flatten().tolist()
        found = self.policy.resolve(layer, {e for e in routed if 0 <= e < num_experts})
        scratch = {e: tables.num_slots + i for i, e in enumerate(found.bypass)}
        rows = found.hits | found.loads | scratch
        assert tables.rows.tolist() == [rows.get(e, -1) for e in range(num_experts)]
        num_fetch = int(tables.num_fetch)
        fetched = dict(
            zip(
                tables.fetch_experts[:num_fetch].tolist(),
                tables.fetch_rows[:num_fetch].tolist(),
                strict=True,
            )
        )
        assert fetched == found.loads | scratch
        assert list(fetched) == sorted(fetched)
        assert int(tables.num_cpu) == 0
        check_groups(tables, ids, routed)
        numbers = (len(found.hits), len(fetched), len(rows), len(scratch))
        self.counters = [old + new for old, new in zip(self.counters, numbers, strict=True)]
        self.check()

    def end_step(self) -> None:
        self.ops.build_queue(self.tables)
        self.policy.end_step()
        assert int(self.tables.clock) == self.policy.clock
        self.check()

    def check(self) -> None:
        policy, tables = self.policy, self.tables
        policy.check()
        owners = [-1 if o is None else o[0] * tables.num_experts + o[1] for o in policy._owner]
        assert tables.owner.tolist() == owners
        assert tables.stamp.tolist() == policy._stamp
        for layer in range(L):
            first = layer * tables.num_experts
            held = policy.find(layer)
            experts = range(tables.num_experts)
            slots = tables.slot_of[first : first + tables.num_experts].tolist()
            assert slots == [held.get(e, -1) for e in experts]
            priorities = tables.priority[first : first + tables.num_experts].tolist()
            assert priorities == [policy._priority.get((layer, e), 0) for e in experts]
        assert tables.queue[: int(tables.num_victims)].tolist() == policy._queue
        assert int(tables.cursor) == policy._cursor
        assert tables.counters.tolist() == self.counters


def check_groups(tables: SlotTables, ids: torch.Tensor, routed: list[int]) -> None:
    """active, offsets and pairs group exactly the pairs that route."""
    num_active = int(tables.num_active)
    offsets = tables.offsets.tolist()
    wanted = sorted({e for e in routed if 0 <= e < tables.num_experts})
    assert tables.active[:num_active].tolist() == wanted
    for i, expert in enumerate(wanted):
        pairs = tables.pairs[offsets[i] : offsets[i + 1]].tolist()
        assert pairs == [pair for pair, e in enumerate(routed) if e == expert]
    num_pairs = sum(0 <= e < tables.num_experts for e in routed)
    assert offsets[0] == 0
    assert set(offsets[num_active:]) == {num_pairs}


def steps(
    rng: random.Random, num_experts: int, num_steps: int, max_tokens: int
) -> Iterator[list[torch.Tensor]]:
    """For each step, the ids of each layer: mostly narrow, some wide; some outside [0, E)."""
    for step in range(num_steps):
        width = max_tokens if step % 5 == 4 else rng.choice([1, 1, 2])
        popular = rng.sample(range(num_experts), max(2, num_experts // 2))
        yield [
            torch.tensor(
                [
                    [
                        rng.choice([*popular, rng.randrange(num_experts), -1, num_experts])
                        for _ in range(K)
                    ]
                    for _ in range(width)
                ]
            )
            for _ in range(L)
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_slots", "num_experts"),  # none to more than L · E
    [(0, 6), (1, 16), (5, 6), (13, 16), (40, 6), (40, 16)],
)
def test_tables_equal_the_policy(kind: str, num_slots: int, num_experts: int) -> None:
    rng = random.Random(num_slots * 100 + num_experts)
    twins = Twins(kind, num_slots, num_experts, max_tokens=9)
    for layers in steps(rng, num_experts, NUM_STEPS[kind], max_tokens=9):
        num_tokens = rng.choice([None, len(layers[0]), rng.randrange(len(layers[0]) + 1)])
        for layer, ids in enumerate(layers):
            twins.resolve(layer, ids, num_tokens)
        twins.end_step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_layer", [(4, 4, 5), (6, 0, 2), (6, 6, 1)])
def test_seated_tables_equal_the_filled_policy(kind: str, per_layer: tuple[int, ...]) -> None:
    rng = random.Random(1)
    twins = Twins(kind, num_slots=13, num_experts=6, max_tokens=9)
    seat(twins.tables, per_layer)
    twins.ops.build_queue(twins.tables)
    twins.policy.fill(per_layer)
    twins.check()
    for layers in steps(rng, 6, 6, max_tokens=9):
        for layer, ids in enumerate(layers):
            twins.resolve(layer, ids, None)
        twins.end_step()


@pytest.mark.parametrize("kind", KINDS)
def test_wide_step_over_many_experts_equals_the_policy(kind: str) -> None:
    """More ids, experts and slots than one block of the kernels holds."""
    rng = random.Random(3)
    twins = Twins(kind, num_slots=600, num_experts=300, max_tokens=270)
    for width in (70, 270, 1, 70):
        ids = torch.tensor([rng.sample(range(300), K) for _ in range(width)])
        for layer in range(L):
            twins.resolve(layer, (ids + 97 * layer) % 300, None)
        twins.end_step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_of_either_type_and_not_contiguous(kind: str, dtype: torch.dtype) -> None:
    twins = Twins(kind, num_slots=8, num_experts=6, max_tokens=3)
    ids = torch.tensor([[0, 1, 2], [1, 2, 3], [4, 3, 5], [0, 5, 2]], dtype=dtype).T
    twins.resolve(1, ids, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_resolve_passes_over_more_used_slots_than_a_window_holds(kind: str) -> None:
    """The slots in front of the queue are in use by the time the last layer looks for victims."""
    twins = Twins(kind, num_slots=200, num_experts=100, max_tokens=25)
    everything = torch.arange(100).view(25, K)
    for layer in (0, 1):
        twins.resolve(layer, everything, None)
    twins.end_step()
    twins.resolve(0, everything, None)
    twins.resolve(1, everything, 12)
    twins.resolve(2, everything, 1)
    assert int(twins.tables.cursor) == 100 + 48 + K


@pytest.mark.parametrize("kind", KINDS)
def test_clear_forgets_everything(kind: str) -> None:
    twins = Twins(kind, num_slots=5, num_experts=6, max_tokens=2)
    for _ in range(3):
        twins.resolve(0, torch.tensor([[0, 1, 2, 5]]), None)
        twins.end_step()
    clear(twins.tables)
    fresh = Twins(kind, num_slots=5, num_experts=6, max_tokens=2)
    fresh.tables = twins.tables
    fresh.resolve(1, torch.tensor([[3, 1, 2, 5]]), None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_fetch", [0, 1, 4])
def test_fetch_copies_the_listed_rows_and_no_others(kind: str, num_fetch: int) -> None:
    twins = Twins(kind, num_slots=3, num_experts=5, max_tokens=1)
    generator = torch.Generator().manual_seed(0)
    bank = torch.randint(0, 256, (5, 272), generator=generator, dtype=torch.uint8)
    pool = torch.zeros(8, 272, dtype=torch.uint8, device=twins.device)
    ids = torch.tensor([[4, 0, 3, 2][:num_fetch] + [-1] * (4 - num_fetch)])
    twins.resolve(0, ids, None)
    twins.ops.fetch(bank.pin_memory() if twins.device == "cuda" else bank, pool, twins.tables)
    expected = torch.zeros(8, 272, dtype=torch.uint8)
    for expert, row in enumerate(twins.tables.rows.tolist()):
        if row >= 0:
            expected[row] = bank[expert]
    assert torch.equal(pool.cpu(), expected)


def test_tables_know_their_size() -> None:
    tables = allocate(2, 3, 5, 4, "cpu")
    assert tables.num_bytes == 8 * (5 + 1 + 4) + 4 * (2 * 6 + 3 * 5 + 2 + 5 * 3 + 3 + 4 + 4)


def test_operations_run_where_the_tables_are() -> None:
    tables = allocate(1, 4, 2, 2, "cpu")
    bank, pool = torch.ones(4, 16, dtype=torch.uint8), torch.zeros(6, 16, dtype=torch.uint8)
    slot_ops.resolve(tables, torch.tensor([[3, 1]]), None, 0)
    slot_ops.fetch(bank, pool, tables)
    slot_ops.build_queue(tables)
    assert pool.sum(1).tolist() == [16, 16, 0, 0, 0, 0]
    assert tables.counters[DISTINCT] == 2


def test_more_pairs_than_there_is_room_for_are_refused() -> None:
    tables = allocate(1, 4, 2, 2, "cpu")
    with pytest.raises(AssertionError, match="3 pairs, max_pairs 2"):
        slot_ops.resolve(tables, torch.tensor([[3, 1, 2]]), None, 0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_step_follows_the_policy_when_it_is_replayed() -> None:
    """Resolve, fetch and build_queue of all layers in one graph, over changing ids and lengths."""
    rng = random.Random(0)
    num_experts, num_slots, max_tokens = 16, 20, 9
    twins = Twins("triton", num_slots, num_experts, max_tokens)
    tables, policy = twins.tables, twins.policy
    banks = torch.randint(0, 256, (L, num_experts, 4096), dtype=torch.uint8).pin_memory()
    pool = torch.zeros(num_slots + num_experts, 4096, dtype=torch.uint8, device="cuda")
    seen = torch.zeros(L, num_experts, 4096, dtype=torch.uint8, device="cuda")
    ids = torch.zeros(L, max_tokens, K, dtype=torch.int64, device="cuda")
    num_tokens = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step() -> None:
        for layer in range(L):
            slot_ops.resolve(tables, ids[layer], num_tokens, layer)
            slot_ops.fetch(banks[layer], pool, tables)
            rows = tables.rows.long()
            seen[layer] = pool[rows.clamp(min=0)] * (rows >= 0)[:, None]
        slot_ops.build_queue(tables)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    clear(tables)
    for layers in steps(rng, num_experts, 60, max_tokens):
        width = len(layers[0])
        ids[:, :width] = torch.stack(layers).cuda()
        num_tokens.fill_(width)
        graph.replay()
        expected = torch.zeros_like(seen)
        for layer, asked in enumerate(layers):
            experts = {e for e in asked.flatten().tolist() if 0 <= e < num_experts}
            found = policy.resolve(layer, experts)
            chosen = sorted(experts)
            expected[layer, chosen] = banks[layer, chosen].cuda()
            numbers = (
                len(found.hits),
                len(found.loads) + len(found.bypass),
                len(experts),
                len(found.bypass),
            )
            twins.counters = [a + b for a, b in zip(twins.counters, numbers, strict=True)]
        policy.end_step()
        twins.check()
        assert torch.equal(seen, expected)
